"""Measures an NVIDIA GPU: `make gpu-bench`. Writes one JSON file for each part, the most valuable first.

    python -m antiphon.tools.bench.gpu --folder FOLDER [--shape bart-large] [--budget-s 1500]

A part starts only while there is time left. Needs a card, compiled kernels, onnxruntime-gpu and torch; exits with 2 and
the reason where one is missing. Figures of a card are in docs/GPU.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.ops.cuda.driver import CudaDevice
from antiphon.ops.cuda.library_file import FOLDER
from antiphon.runtime.cuda.open_device import DeviceError, open_device
from antiphon.tools.bench.gpu.models import SHAPES
from antiphon.tools.bench.gpu.parts import PARTS, Parts, Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 0, or 2 without a usable GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--shape", choices=SHAPES, default="bart-large")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: all, in this order")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--sources", type=int, nargs="+", default=[350, 64, 512, 1024], help="lengths in tokens")
    parser.add_argument("--steps", type=int, default=128, help="tokens that each row decodes")
    parser.add_argument("--copy-bytes", type=int, default=1 << 30)
    parser.add_argument("--budget-s", type=float, default=1500.0)
    parser.add_argument("--work", type=Path, help="keep the random models in this folder (default: delete them)")
    parser.add_argument("--kernels", type=Path, default=FOLDER, help="folder of the compiled kernels")
    args = parser.parse_args(arguments)
    try:
        device = open_device("cuda", kernels=args.kernels)
    except DeviceError as error:
        print(f"gpu-bench: {error}", file=sys.stderr)
        return 2
    assert device is not None
    run(device, args)
    return 0


def run(device: CudaDevice, args: argparse.Namespace) -> None:
    """Run the parts in order while there is time, and write the figures of each."""
    plan = Plan(
        shape=args.shape, rows=args.rows, source_lens=args.sources, num_steps=args.steps, copy_bytes=args.copy_bytes
    )
    args.folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        parts = Parts(device, plan, args.work or Path(temporary))
        for name in args.part:
            if time.monotonic() - began_s > args.budget_s:
                print(f"gpu-bench: no time left for {name}", file=sys.stderr)
                break
            _write(args.folder / f"{name}.json", {"device": device.description().name, name: parts.run(name)})


def _write(path: Path, figures: dict[str, Any]) -> None:
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    sys.exit(main())
