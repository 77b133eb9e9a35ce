"""The running sequences as arrays, and the batches that the runner decodes."""
