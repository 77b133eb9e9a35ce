"""The Open Inference Protocol v2: tensors in and out, over the same requests and models."""
