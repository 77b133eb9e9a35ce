"""Attention operators: schemas, eager references, ONNX translations, native code."""
