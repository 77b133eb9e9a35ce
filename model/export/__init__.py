"""From a checkpoint to a bundle: tracing, passes over ONNX graphs, quantisation and verification."""
