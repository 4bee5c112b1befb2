"""Which row to use, why, and what to try next."""
