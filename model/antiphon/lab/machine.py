"""The machine of a run, as reports name it."""

from __future__ import annotations

import os

import torch

from antiphon.bundle.machine import processor_name
from antiphon.training.task import Group


def machine() -> str:
    """Return processor, number of cores, version of torch, and whether products in bfloat16 are computed as such."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{processor_name()}, {os.cpu_count()} cores"
    return f"{name}, torch {torch.__version__}, bfloat16 {'in hardware' if Group.join().computes_bf16 else 'off'}"
