"""What proves that meshard works?"""
