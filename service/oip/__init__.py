"""The Open Inference Protocol v2 beside antiphon.v1: tensors in and out, over the same requests and models."""
