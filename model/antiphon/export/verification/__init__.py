"""Verification of exported graphs against the PyTorch model."""
