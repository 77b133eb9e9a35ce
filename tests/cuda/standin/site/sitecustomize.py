"""Loads the stand-in for CUDA into every Python process that has this folder on PYTHONPATH, before its program starts.

STANDIN_FOLDER: where `build` wrote the libraries, and `write_kernels` the kernels. Clients compute nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if "STANDIN_FOLDER" in os.environ and "antiphon.tools.bench.client" not in sys.orig_argv:
    import antiphon.ops.cuda
    from tests.cuda.standin.device import StandIn

    antiphon.ops.cuda.FOLDER = Path(os.environ["STANDIN_FOLDER"])
    standin = StandIn(antiphon.ops.cuda.FOLDER, is_built=True)
