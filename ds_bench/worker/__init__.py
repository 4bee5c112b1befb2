"""The code inside the ranks of a trial, and helper programs that need torch: builds, trains and measures the model."""
