"""Benchmark of an NVIDIA GPU: `make card`."""
