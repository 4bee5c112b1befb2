"""Is this machine ready for the run?"""
