"""What this machine has: facts only, no judgement."""
