"""What happens to a unit, and when?"""
