"""Graphs of a model's parts: tracing, lowerings and passes."""
