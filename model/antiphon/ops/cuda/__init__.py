"""GPU: conventions that graphs, kernels and the server share. Imports nothing."""

from __future__ import annotations

from pathlib import Path

PADDING = -1
"""Position of a token that pads a batch to the size of its bucket: nothing is written for it."""
PREVIOUS = -1
"""Token id that stands for the token that the row sampled in the step before, which is on the device only."""
TILE = 64
"""Number of queries that one program of packed attention computes."""

ARCHITECTURES = (80, 86, 89, 90, 120)
"""Compute capabilities, times ten, for which the provider of ONNX Runtime has code and the kernels do not spill."""
FOLDER = Path(__file__).with_name("compiled")
"""Folder of the compiled kernels."""


def library_name(architecture: int) -> str:
    """Return the name of the file with the kernels of an architecture."""
    return f"kernels.sm_{architecture}.bin"
