"""What is asked: workload, configuration, placement, and the flags as one value."""
