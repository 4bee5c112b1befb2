"""Facts about this machine, without judging them."""
