"""Architecture of a model, as its configuration states it. No tensors: serving, training and export share it."""
