"""Benchmark of an NVIDIA GPU: `make gpu-bench`."""
