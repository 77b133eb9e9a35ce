"""Operators for NVIDIA GPUs: nodes of CUDA graphs, their kernels in Triton, and eager references in PyTorch."""
