"""One iteration of continuous batching."""
