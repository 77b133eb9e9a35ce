"""ONNX Runtime, which sends nothing to anybody: whoever runs graphs imports it from here.

Its published builds report events of the process to their maker over HTTPS, on Linux too, unless a variable says
otherwise before the library is loaded (its Privacy.md, "Disabling Telemetry"). Calling disable_telemetry_events() would
come too late for the first event and for the identifier that it keeps below ~/.cache.
"""

from __future__ import annotations

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime as ort

__all__ = ["ort"]
