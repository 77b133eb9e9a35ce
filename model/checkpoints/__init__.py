"""Checkpoints on disk: ours, and the tensors and settings of other libraries."""
