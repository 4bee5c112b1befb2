"""From a request to trials: its rows and their configurations, the trials in order, the search for the largest size."""
