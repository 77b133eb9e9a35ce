"""A stand-in for CUDA, with which the CUDA provider of ONNX Runtime runs on a machine without a card."""
