"""Measures an NVIDIA GPU: `make gpu-bench`. Writes one JSON file for each part, the most valuable first.

    python -m antiphon.tools.bench.gpu --folder FOLDER [--shape bart-large] [--budget-s 1500]

A part starts only while there is time left. Needs a card, compiled kernels, onnxruntime-gpu and torch; exits with 2 and
the reason where one is missing. Figures of a card are in docs/BENCHMARKS.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.bundle.manifest import Bundle, Lowering
from antiphon.ops.cuda import FOLDER
from antiphon.ops.cuda.driver import CudaDevice
from antiphon.runtime.cuda.open_device import DeviceError, open_device
from antiphon.runtime.cuda.runner import CudaRunner
from antiphon.runtime.native import NativeRunner
from antiphon.tools.bench.gpu.decoding import (
    SHAPES,
    Load,
    bytes_of_step,
    decode,
    generate_with_transformers,
    kept_bundle,
    random_bundle,
    serve_streams,
    shape_of,
    step_weight_bytes,
)
from antiphon.tools.bench.report import BenchFailure

_COPIES = 10
_STREAMS = 64
PARTS = ("bandwidth", "parity", "decode", "switches", "generate", "streams", "sanitizer")
"""Names of the parts, the most valuable first."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Sizes to measure. shape: of the random model. copy_bytes: of one copy that measures the bandwidth."""

    shape: str
    rows: Sequence[int]
    source_lens: Sequence[int]
    num_steps: int
    copy_bytes: int


class Parts:
    """The parts, which share the model and the measured bandwidth. A part is a method that takes nothing."""

    def __init__(self, device: CudaDevice, plan: Plan, folder: Path) -> None:
        self._device = device
        self._plan = plan
        self._folder = folder
        self._bundle: Bundle | None = None
        self._bytes_per_s = 0.0

    def run(self, name: str) -> Any:
        """Run the part of PARTS with this name and return its figures."""
        part: Callable[[], Any] = getattr(self, name)
        return part()

    def bandwidth(self) -> dict[str, float]:
        """Copy inside the device: bytes read and written per second."""
        size = self._plan.copy_bytes
        source, target = self._device.allocate(size), self._device.allocate(size)
        self._device.fill(source.address, 0, size)
        self._device.copy_within(target.address, source.address, size)
        self._device.wait()
        began_s = time.perf_counter()
        for _ in range(_COPIES):
            self._device.copy_within(target.address, source.address, size)
        self._device.wait()
        self._bytes_per_s = 2 * size * _COPIES / (time.perf_counter() - began_s)
        return {"bytes_per_s": self._bytes_per_s}

    def parity(self) -> dict[str, Any]:
        """Return how many greedy tokens of each precision equal those of the processor in float32."""
        lowerings: tuple[Lowering, ...] = ("native", "cuda")
        folder = self._folder / "parity"
        bundle = kept_bundle(folder) or random_bundle("tiny", ("float32", "bfloat16", "float16"), lowerings, folder)
        load = Load(rows=4, source_len=20, num_steps=min(16, self._plan.num_steps))
        _, expected = decode(NativeRunner(bundle, max_rows=4, threads=1, precision="float32"), load)
        shares = {}
        for precision in ("float32", "bfloat16", "float16"):
            _, tokens = decode(CudaRunner(bundle, self._device, max_rows=4, precision=precision), load)
            shares[precision] = float(np.mean(tokens == expected))
        return {"equal_greedy_tokens": shares}

    def decode(self) -> list[dict[str, Any]]:
        """Measure every number of rows and length of sources."""
        return [
            self._measured(Load(rows=rows, source_len=length, num_steps=self._plan.num_steps))
            for length in self._plan.source_lens
            for rows in self._plan.rows
        ]

    def switches(self) -> list[dict[str, Any]]:
        """Measure the smallest and the largest number of rows without steps ahead, and without CUDA graphs."""
        settings = (dict(goes_ahead=False), dict(goes_ahead=False, captures=False))
        return [
            self._measured(
                Load(rows=rows, source_len=self._plan.source_lens[0], num_steps=self._plan.num_steps), **switches
            )
            for rows in (min(self._plan.rows), max(self._plan.rows))
            for switches in settings
        ]

    def generate(self) -> list[dict[str, Any]] | str:
        """Measure transformers.generate request by request and in static batches; or return what is missing for it."""
        try:
            return generate_with_transformers(
                shape_of(self._plan.shape),
                self._sources(_STREAMS),
                self._plan.num_steps,
                device="cuda",
                batches=(1, _STREAMS),
            )
        except (ImportError, RuntimeError, AssertionError) as error:  # no transformers; no CUDA in this torch
            return str(error)

    def streams(self) -> dict[str, Any] | str:
        """Measure streams of clients over gRPC; or return the reason why the server could not be measured."""
        num_streams = 2 * _STREAMS
        try:
            return serve_streams(
                self._made().path,
                self._sources(2 * num_streams),
                self._plan.num_steps,
                device="cuda",
                streams=num_streams,
            )
        except BenchFailure as error:
            return str(error)

    def sanitizer(self) -> str:
        """Run the part `parity` under compute-sanitizer and return its last line; or that it is missing."""
        program = shutil.which("compute-sanitizer")
        if program is None:
            return "compute-sanitizer is not on PATH"
        module = ("-m", "antiphon.tools.bench.gpu", "--part", "parity", "--shape", "tiny", "--steps", "4")
        command = (program, "--error-exitcode", "1", sys.executable, *module, "--folder", str(self._folder / "checked"))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]

    def _sources(self, count: int) -> list[list[int]]:
        vocab_size, length = shape_of(self._plan.shape).vocab_size, self._plan.source_lens[0]
        drawn: list[list[int]] = np.random.default_rng(0).integers(4, vocab_size, (count, length)).tolist()
        return drawn

    def _measured(self, load: Load, **settings: bool) -> dict[str, Any]:
        bundle = self._made()
        runner = CudaRunner(
            bundle, self._device, max_rows=load.rows, precision="bfloat16", num_blocks=load.num_blocks, **settings
        )
        decode(runner, load)  # captures the graph and loads the kernels
        times, _ = decode(runner, load)
        num_bytes = bytes_of_step(runner, load, step_weight_bytes(bundle.manifest.model))
        num_tokens = load.rows * load.num_steps
        bound_s = num_bytes / self._bytes_per_s if self._bytes_per_s else None
        return {
            **settings,
            "rows": load.rows,
            "source_len": load.source_len,
            "steps": load.num_steps,
            "decode_tokens_per_s": num_tokens / times.decode_s,
            "all_tokens_per_s": num_tokens / (times.decode_s + times.encode_s),
            "encode_s": times.encode_s,
            "step_s": times.decode_s / load.num_steps,
            "host_s_a_step": times.host_s / load.num_steps,
            "steps_ahead": runner.num_ahead,
            "bytes_of_step": num_bytes,
            "share_of_bound": bound_s * load.num_steps / times.decode_s if bound_s is not None else None,
        }

    def _made(self) -> Bundle:
        if self._bundle is None:
            folder = self._folder / self._plan.shape
            self._bundle = kept_bundle(folder) or random_bundle(self._plan.shape, ("bfloat16",), ("cuda",), folder)
        return self._bundle


if __name__ == "__main__":
    sys.exit(main())
