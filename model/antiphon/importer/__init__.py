"""Import of checkpoints of other libraries as bundles."""
