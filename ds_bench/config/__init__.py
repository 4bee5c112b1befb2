"""The request: options, workload, configurations and placement."""
