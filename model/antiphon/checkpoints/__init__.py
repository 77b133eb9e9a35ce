"""Checkpoints on disk: this project's format, and tensors and settings of other libraries."""
