"""Training data: sentence pairs, labelled texts, and batches of tensors."""
