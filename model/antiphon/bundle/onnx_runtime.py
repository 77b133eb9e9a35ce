"""ONNX Runtime with telemetry disabled: all modules that run graphs import `ort` from here.

The published builds send events of the process to the vendor over HTTPS, on Linux too, unless an environment variable
forbids it before the library is loaded (its Privacy.md, "Disabling Telemetry"). A call of disable_telemetry_events()
would be too late for the first event and for the identifier that the library stores below ~/.cache.
"""

from __future__ import annotations

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime as ort

__all__ = ["ort"]
