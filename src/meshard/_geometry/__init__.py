"""Which numbers place a parameter on a mesh?"""
