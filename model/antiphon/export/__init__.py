"""Export of a checkpoint as a bundle: tracing, passes over ONNX graphs, quantisation and verification."""
