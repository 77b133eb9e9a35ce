"""Parts of `make card`, the most valuable first. Each yields its figures one by one, as dictionaries.

A part opens its own runners, and makes the random model that it needs if the work folder does not have it.
"""

from __future__ import annotations

import gc
import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.bundle.manifest import Bundle, Lowering, Precision
from antiphon.errors import RecipeError
from antiphon.ops.cuda.driver import CudaDevice
from antiphon.runtime.cuda.runner import CudaEncoderRunner, CudaRunner
from antiphon.runtime.native import EncoderRunner, NativeRunner
from antiphon.server.machine import usable_cores
from antiphon.tools.bench.gpu.decoding import (
    Decoded,
    Load,
    bytes_of_step,
    decode,
    generate_with_transformers,
    kept_bundle,
    random_bundle,
    serve,
    shape_of,
    step_weight_bytes,
)
from antiphon.tools.bench.gpu.reports import Figure, MissingError
from antiphon.tools.bench.report import timed
from antiphon.tools.offline import Offline

SERVER_FLAGS: tuple[tuple[str, ...], ...] = ((), ("--fronts", "2"))
"""Further flags of `antiphon serve`: the part `served` measures a server with each of these tuples."""

_COPIES = 10
_COMPARED = Load(rows=4, source_len=20, num_steps=16)  # with the processor
_SWITCH_ROWS = 128
_BEAM_WIDTH = 4
_MOST_FEW_ROWS = 128
_TEXT_LEN = 128
_ENCODER_RUNS = 5
_GENERATE_BATCHES = (1, 64)
_CPU_ROWS = 64
_CUDA: tuple[Precision, ...] = ("float32", "bfloat16", "float16")
_BOTH: tuple[Lowering, ...] = ("native", "cuda")
_SAMPLING: dict[str, dict[str, float]] = {
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top_k 50, top_p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Sizes to measure.

    shape: of the random model, see decoding.py; with `tiny`, those of other models are tiny too. rows, served_rows: of
    the runner, and of the server. source_lens: tokens; the first one is that of all parts but `decode`. num_steps:
    tokens that each row decodes. copy_bytes: of one copy that measures the bandwidth. work: folder of the models.
    recipe, data, training_steps: of the part `training`; data is None if there is none.
    """

    shape: str
    rows: Sequence[int]
    served_rows: Sequence[int]
    source_lens: Sequence[int]
    num_steps: int
    copy_bytes: int
    work: Path
    recipe: str
    data: Path | None
    training_steps: int

    @property
    def few_rows(self) -> list[int]:
        """Numbers of rows for further settings and models."""
        return sorted({min(rows, _MOST_FEW_ROWS) for rows in self.rows})

    @property
    def size(self) -> str:
        """Return `tiny` or `base`: the size of models that do not have the plan's shape."""
        return "tiny" if self.shape == "tiny" else "base"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part. estimate_s: expected seconds; guesses, since no card has run the parts yet. needs_model: of the
    plan's shape. runs_beside: the next part starts at once, and those that need the model wait for this one.
    """

    name: str
    estimate_s: float
    needs_model: bool = False
    runs_beside: bool = False


PARTS = (
    Part(name="model", estimate_s=60, runs_beside=True),
    Part(name="parity", estimate_s=30),
    Part(name="served", estimate_s=80, needs_model=True),
    Part(name="decode", estimate_s=60, needs_model=True),
    Part(name="beams", estimate_s=30, needs_model=True),
    Part(name="sampling", estimate_s=30, needs_model=True),
    Part(name="encoder", estimate_s=40),
    Part(name="ssru", estimate_s=40),
    Part(name="generate", estimate_s=40),
    Part(name="sanitizer", estimate_s=40),
    Part(name="cpu", estimate_s=120),
    Part(name="training", estimate_s=60),
)
"""All parts in their order."""


class Parts:
    """The parts by name; each is a method that yields figures. device: with loaded kernels.

    A part raises MissingError if it lacks a program, a package or data.
    """

    def __init__(self, device: CudaDevice, plan: Plan) -> None:
        self._device = device
        self._plan = plan

    def part(self, name: str) -> Callable[[], Iterator[Figure]]:
        """Return the part of PARTS with this name."""
        method: Callable[[], Iterator[Figure]] = getattr(self, name)
        return method

    def model(self) -> Iterator[Figure]:
        """Make the random model that most parts share; yield seconds, 0 if the work folder has it."""
        began_s, is_kept = time.perf_counter(), self._is_kept(self._plan.shape)
        path = self._shared.path
        yield {"bundle": str(path), "make_s": 0.0 if is_kept else round(time.perf_counter() - began_s, 1)}

    def parity(self) -> Iterator[Figure]:
        """Compare greedy tokens of each precision with those of the processor in float32, for a small model."""
        yield from self._against_processor(self._bundle("tiny", _CUDA, _BOTH, name="parity"), _CUDA)

    def served(self) -> Iterator[Figure]:
        """Measure streams and GenerateMany over gRPC beside the runner with the same rows."""
        for rows in self._plan.served_rows:
            runner = self._measured(self._runner([load := self._load(rows)]), load)
            gc.collect()  # frees the runner's memory for the server
            yield {"way": "runner", **runner}
            best = runner["all_tokens_per_s"]
            for flags in SERVER_FLAGS:
                speeds = serve(
                    self._shared.path, self._sources(2 * rows), load.num_steps, device="cuda", rows=rows, flags=flags
                )
                for way, speed in speeds:
                    tokens_per_s = speed.num_tokens / speed.seconds
                    shares = {"tokens_per_s": tokens_per_s, "share_of_runner": tokens_per_s / best}
                    yield {"way": way, "rows": rows, "server_flags": list(flags), **shares}

    def decode(self) -> Iterator[Figure]:
        """Measure the runner: by rows and lengths of sources, then without steps ahead, and without CUDA graphs."""
        bytes_per_s = self._bytes_per_s()
        yield {"copy_bytes_per_s": bytes_per_s}
        weight_bytes = step_weight_bytes(self._shared.manifest.model)
        for length in self._plan.source_lens:
            loads = [self._load(rows, length) for rows in self._plan.rows]
            runner = self._runner(loads)
            for load in loads:
                figure = self._measured(runner, load)
                num_bytes = bytes_of_step(runner, load, weight_bytes)
                bound = {"bytes_of_step": num_bytes, "share_of_bound": num_bytes / bytes_per_s / figure["step_s"]}
                yield figure | bound
            del runner
        load = self._load(min(_SWITCH_ROWS, max(self._plan.rows)))
        for goes_ahead, captures in ((True, True), (False, True), (False, False)):
            runner = self._runner([load], goes_ahead=goes_ahead, captures=captures)
            yield {"goes_ahead": goes_ahead, "captures": captures, **self._measured(runner, load)}
            del runner

    def beams(self) -> Iterator[Figure]:
        """Measure beam search by the engine, beside greedy decoding with the same number of requests."""
        all_requests = sorted({max(1, rows // _BEAM_WIDTH) for rows in self._plan.few_rows})
        max_rows, length = _BEAM_WIDTH * max(all_requests), self._plan.source_lens[0]
        runner = CudaRunner(self._shared, self._device, max_rows=max_rows, precision="bfloat16")
        with Offline(runner, rows=max_rows) as offline:
            for requests in all_requests:
                sources = self._sources(2 * requests)
                for width in (1, _BEAM_WIDTH):

                    def translate(sources: Any = sources, requests: int = requests, width: int = width) -> Any:
                        return offline.translate(
                            sources, concurrency=requests, max_new_tokens=self._plan.num_steps, beam_width=width,
                            ignore_eos=True,
                        )  # fmt: skip

                    translate()  # captures graphs
                    speed = timed(translate)
                    sizes = {"requests": requests, "beam_width": width, "source_len": length}
                    yield {**sizes, "tokens_per_s": speed.num_tokens / speed.seconds}

    def sampling(self) -> Iterator[Figure]:
        """Measure the runner with top-k and top-p."""
        loads = [self._load(rows) for rows in self._plan.few_rows]
        runner = self._runner(loads)
        for load in loads:
            for name, parameters in _SAMPLING.items():
                yield {"sampling": name, **self._measured(runner, load, parameters)}

    def encoder(self) -> Iterator[Figure]:
        """Measure an encoder of BERT's shape: the difference from the processor in float32, and texts per second."""
        shape = f"bert-{self._plan.size}"
        bundle = self._bundle(shape, ("float32", "bfloat16"), _BOTH)
        small = self._small
        texts = self._sources(small.rows, small.source_len, shape)
        native = EncoderRunner(bundle, max_rows=small.rows, threads=usable_cores(), precision="float32")
        expected = _states(native, texts)
        for precision in ("float32", "bfloat16"):
            runner = CudaEncoderRunner(bundle, self._device, max_rows=small.rows, precision=precision)
            difference = float(np.abs(_states(runner, texts) - expected).max())
            yield {"precision": precision, "largest_difference": difference, "largest_state": float(expected.max())}
        for rows in self._plan.few_rows:
            runner = CudaEncoderRunner(bundle, self._device, max_rows=rows, precision="bfloat16")
            texts = self._sources(rows, min(_TEXT_LEN, self._plan.source_lens[0]), shape)
            _states(runner, texts)  # loads the kernels
            began_s = time.perf_counter()
            for _ in range(_ENCODER_RUNS):
                _states(runner, texts)
            texts_per_s = rows * _ENCODER_RUNS / (time.perf_counter() - began_s)
            yield {"shape": shape, "rows": rows, "text_len": len(texts[0]), "texts_per_s": texts_per_s}

    def ssru(self) -> Iterator[Figure]:
        """Compare an SSRU decoder's greedy tokens with the processor's, and measure it by rows."""
        bundle = self._bundle(f"{self._plan.size}-ssru", ("float32", "bfloat16"), _BOTH)
        yield from self._against_processor(bundle, ("float32", "bfloat16"))
        length = min(self._plan.source_lens[0], bundle.manifest.model.max_source_len)
        loads = [self._load(rows, length) for rows in self._plan.few_rows]
        runner = self._runner(loads, bundle)
        for load in loads:
            yield self._measured(runner, load)

    def generate(self) -> Iterator[Figure]:
        """Measure transformers.generate in bfloat16, for one source and in a static batch."""
        _require("torch", "transformers")
        _require_torch_with_cuda()
        yield from generate_with_transformers(
            shape_of(self._plan.shape), self._sources(max(_GENERATE_BATCHES)), self._plan.num_steps, device="cuda",
            batches=_GENERATE_BATCHES,
        )  # fmt: skip

    def sanitizer(self) -> Iterator[Figure]:
        """Run the part `parity` under compute-sanitizer; yield its exit status and its last lines."""
        program = shutil.which("compute-sanitizer")
        if program is None:
            raise MissingError("compute-sanitizer is not on PATH")
        flags = ("--child", "--part", "parity", "--steps", "4", "--work", str(self._plan.work))
        module = (sys.executable, "-m", "antiphon.tools.bench.gpu", *flags, "--folder", str(self._plan.work))
        command = (program, "--error-exitcode", "1", *module)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        yield {"exit_status": done.returncode, "lines": [line for line in lines if line.startswith("=====")][-5:]}

    def cpu(self) -> Iterator[Figure]:
        """Measure the shipped bundle and a random model on all cores of the processor, beside CTranslate2."""
        from antiphon.tools.bench.gpu.cpu import measure_cpu

        rows = min(_CPU_ROWS, max(self._plan.rows))
        yield from measure_cpu(self._plan.work, preset=self._plan.size, rows=rows, threads=usable_cores())

    def training(self) -> Iterator[Figure]:
        """Name the first step and tensor of a training that is not finite, in bfloat16 and in float32."""
        _require("torch")
        _require_torch_with_cuda()
        if (data := self._plan.data) is None:
            raise MissingError(f"the data of the recipe {self._plan.recipe}: give --data or ANTIPHON_DATA")
        import torch

        from antiphon.tools.bench.gpu.training import first_not_finite
        from antiphon.training.recipe import load_any_recipe

        plan = self._plan
        try:
            yield from first_not_finite(
                load_any_recipe(plan.recipe), data, plan.work, plan.training_steps, torch.device("cuda")
            )
        except RecipeError as error:  # files of the data
            raise MissingError(str(error)) from error

    def _against_processor(self, bundle: Bundle, precisions: Sequence[Precision]) -> Iterator[Figure]:
        """Yield for each precision the share of greedy tokens that equal the processor's in float32.

        The log-probabilities are compared as long as all tokens of a row before them are equal.
        """
        load = self._small
        native = NativeRunner(bundle, max_rows=load.rows, threads=1, precision="float32")
        expected = decode(native, load, {"num_logprobs": 0})
        for precision in precisions:
            runner = CudaRunner(bundle, self._device, max_rows=load.rows, precision=precision)
            decoded = decode(runner, load, {"num_logprobs": 0})
            yield {
                "shape": bundle.manifest.name,
                "precision": precision,
                "equal_greedy_tokens": float(np.mean(decoded.tokens == expected.tokens)),
                "largest_logprob_difference": _largest_difference(decoded, expected),
            }

    def _measured(self, runner: CudaRunner, load: Load, sampling: dict[str, float] | None = None) -> Figure:
        decode(runner, load, sampling)  # captures the graph and loads the kernels
        num_ahead = runner.num_ahead
        times = decode(runner, load, sampling).times
        num_tokens = load.rows * load.num_steps
        return {
            "rows": load.rows,
            "source_len": load.source_len,
            "steps": load.num_steps,
            "decode_tokens_per_s": num_tokens / times.decode_s,
            "all_tokens_per_s": num_tokens / (times.decode_s + times.encode_s),
            "encode_s": times.encode_s,
            "step_s": times.decode_s / load.num_steps,
            "host_s_a_step": times.host_s / load.num_steps,
            "steps_ahead": runner.num_ahead - num_ahead,
        }

    def _bytes_per_s(self) -> float:
        """Return the bytes read and written per second by copies inside the device."""
        size = self._plan.copy_bytes
        source, target = self._device.allocate(size), self._device.allocate(size)
        self._device.fill(source.address, 0, size)
        self._device.copy_within(target.address, source.address, size)
        self._device.wait()
        began_s = time.perf_counter()
        for _ in range(_COPIES):
            self._device.copy_within(target.address, source.address, size)
        self._device.wait()
        return 2 * size * _COPIES / (time.perf_counter() - began_s)

    def _runner(
        self, loads: Sequence[Load], bundle: Bundle | None = None, *, goes_ahead: bool = True, captures: bool = True
    ) -> CudaRunner:
        """Open a runner in bfloat16 with cache blocks for the largest of some loads."""
        return CudaRunner(
            bundle or self._shared, self._device, max_rows=max(load.rows for load in loads), precision="bfloat16",
            num_blocks=max(load.num_blocks for load in loads), goes_ahead=goes_ahead, captures=captures,
        )  # fmt: skip

    @property
    def _small(self) -> Load:
        """The load that is compared with the processor."""
        return Load(
            rows=min(_COMPARED.rows, max(self._plan.rows)),
            source_len=min(_COMPARED.source_len, self._plan.source_lens[0]),
            num_steps=min(_COMPARED.num_steps, self._plan.num_steps),
        )

    def _load(self, rows: int, source_len: int | None = None) -> Load:
        return Load(rows=rows, source_len=source_len or self._plan.source_lens[0], num_steps=self._plan.num_steps)

    def _sources(self, count: int, length: int | None = None, shape: str | None = None) -> list[list[int]]:
        vocab_size = shape_of(shape or self._plan.shape).vocab_size
        size = (count, length or self._plan.source_lens[0])
        drawn: list[list[int]] = np.random.default_rng(0).integers(4, vocab_size, size).tolist()
        return drawn

    @cached_property
    def _shared(self) -> Bundle:
        """The bundle of the plan's shape."""
        return self._bundle(self._plan.shape, ("bfloat16",), ("cuda",))

    def _is_kept(self, name: str) -> bool:
        return kept_bundle(self._plan.work / name) is not None

    def _bundle(
        self, shape: str, precisions: Sequence[Precision], lowerings: Sequence[Lowering], name: str | None = None
    ) -> Bundle:
        """Return the bundle of the work folder with this name, or make it. name: None is the shape."""
        folder = self._plan.work / (name or shape)
        bundle = kept_bundle(folder)
        if bundle is None:
            _require("torch")
            bundle = random_bundle(shape, precisions, lowerings, folder)
        return bundle


def _states(runner: EncoderRunner | CudaEncoderRunner, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Return the states [tokens, width] of texts that are encoded together."""
    memory = runner.encode(texts, [()] * len(texts), keep_memory=True).memory
    assert memory is not None
    return memory


def _largest_difference(decoded: Decoded, expected: Decoded) -> float:
    is_equal = np.logical_and.accumulate(decoded.tokens == expected.tokens, axis=0)
    return float(np.abs(decoded.logprobs - expected.logprobs)[is_equal].max(initial=0.0))


def _require(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingError(f"the package {package} is not installed")


def _require_torch_with_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise MissingError(f"torch {torch.__version__} finds no CUDA device")
