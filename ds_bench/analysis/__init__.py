"""From records to a comparison of rows; pure functions, no processes."""
