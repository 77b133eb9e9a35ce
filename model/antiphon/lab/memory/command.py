"""`antiphon memory`: the arithmetic of a model's memory with its formulas, beside measured peaks."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from antiphon.architecture.config import ModelConfig, preset
from antiphon.bundle.machine import available_bytes
from antiphon.bundle.manifest import Bundle, load_bundle
from antiphon.checkpoints.checkpoint import read_config
from antiphon.errors import ModelError
from antiphon.lab.memory import arithmetic, measurement
from antiphon.lab.memory.terms import Case, LabBackend, Prediction, Term, crossings, lecture_rows, longest, with_length

Native = tuple[Prediction, tuple[int | None, ...]]
"""Terms of the native graphs, and the measured bytes of each term; None where it was not measured."""
_MIB = 1 << 20
_NOTES = (
    "256 MiB, 4 GiB and 64 GiB are ONE float32 matrix T x T: one head, one layer, one sequence",
    "GiB are powers of two; in GB (10^9 bytes) the matrices are 0.27, 4.29 and 68.72",
    "times B H, and one for each attention of a layer; training keeps them all, and works with two more of one layer",
    "fused attention keeps 4 H bytes a token instead; a padding mask in PyTorch is still e B T^2 a layer",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One case: predicted and measured peak, and seconds of a step where they were measured."""

    case: Case
    prediction: Prediction
    measured_bytes: int | None = None
    seconds: float | None = None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return self.prediction.peak_bytes / self.measured_bytes - 1 if self.measured_bytes else None

    @property
    def options(self) -> str:
        """Options of the case as text."""
        chosen = [self.case.backend, "checkpointing" * self.case.checkpointing, "bf16" * self.case.bf16]
        return ", ".join(filter(None, chosen))


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Content of the page. limit: longest source and target that the model itself supports.

    native: None for training.
    """

    name: str
    predict: Callable[[Case], Prediction]
    is_training: bool
    rows: tuple[Row, ...]
    native: Native | None
    free_bytes: int
    memory_bytes: int | None
    limit: int

    def longest_lengths(self) -> list[int]:
        """Return the longest T of every row, in memory_bytes; empty without a size."""
        size = self.memory_bytes
        return [] if size is None else [longest(row.case, self.predict, size) for row in self.rows]

    def as_json(self) -> dict[str, object]:
        """Return the page as JSON values; sizes in bytes."""
        case = self.rows[0].case
        return {
            "model": self.name,
            "training": self.is_training,
            "length": case.length,
            "batch": case.batch,
            "rows": [self._row_json(row) for row in self.rows],
            "native": None if self.native is None else [
                {**asdict(term), "measured_bytes": measured}
                for term, measured in zip(self.native[0].terms, self.native[1], strict=True)
            ],
            "crossings": [asdict(crossing) for crossing in crossings(case.config)],
            "lecture": [asdict(row) for row in lecture_rows(case.config)],
            "memory_bytes": self.memory_bytes,
            "longest": self.longest_lengths(),
        }  # fmt: skip

    @staticmethod
    def _row_json(row: Row) -> dict[str, object]:
        return {
            "backend": row.case.backend,
            "checkpointing": row.case.checkpointing,
            "bf16": row.case.bf16,
            "terms": [asdict(term) for term in row.prediction.terms],
            "predicted_bytes": row.prediction.peak_bytes,
            "measured_bytes": row.measured_bytes,
            "error": row.error,
            "seconds": row.seconds,
        }


def print_page(page: Page) -> None:
    """Print the page."""
    case = page.rows[0].case
    kind = "one training step" if page.is_training else "one translation"
    print(f"{page.name}: {kind} in PyTorch, B = {case.batch}, T = {case.length}; n = B T, sizes in MiB")
    if case.length > page.limit:
        print(f"the model supports {page.limit} tokens; its tables of positions are extended here")
    eager, sdpa = page.rows[0], page.rows[len(page.rows) // 2]
    print(f"\n{'term, float32':<40}{'eager':>11}{'sdpa':>11}  formula")
    _print_terms(eager.prediction.terms, sdpa.prediction.terms)
    print(
        f"\n{'peak':<40}{'predicted':>11}{'measured':>11}{'error':>8}{'saved':>8}"
        + f"{'s/step':>9}" * bool(eager.seconds)
    )
    for row in page.rows:
        print(_peak_line(row, eager if row.case.backend == "eager" else sdpa))
    if any(row.measured_bytes is None and row.prediction.peak_bytes > page.free_bytes for row in page.rows):
        print(f"- not measured: {_mib(page.free_bytes)} MiB are free")
    if page.native is not None:
        _print_native(*page.native)
    _print_lengths(page)


def _mib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / _MIB:,.1f}"


def _print_terms(eager: tuple[Term, ...], sdpa: tuple[Term, ...]) -> None:
    sizes = {term.name: term.num_bytes for term in sdpa}
    own = {term.name: term.num_bytes for term in eager}
    formulas: dict[str, dict[str, None]] = {}
    for term in (*eager, *sdpa):
        formulas.setdefault(term.name, {})[term.formula] = None  # the formula of sdpa second, if it differs
    for name, texts in formulas.items():
        if own.get(name) or sizes.get(name):
            text = "; sdpa: ".join(texts)
            print(f"{name:<40}{_mib(own.get(name, 0)):>11}{_mib(sizes.get(name, 0)):>11}  {text}")


def _peak_line(row: Row, plain: Row) -> str:
    """Return the line of a row. saved: share of the peak of `plain` that its options save."""
    error = "-" if row.error is None else f"{row.error:+.1%}"
    line = f"{row.options:<40}{_mib(row.prediction.peak_bytes):>11}{_mib(row.measured_bytes):>11}{error:>8}"
    line += f"{1 - row.prediction.peak_bytes / plain.prediction.peak_bytes:>8.0%}"
    return line if row.seconds is None else f"{line}{row.seconds:>9.3f}"


def _print_native(prediction: Prediction, measured: tuple[int | None, ...]) -> None:
    print(f"\n{'native graphs':<40}{'predicted':>11}{'measured':>11}  formula")
    for term, size in zip(prediction.terms, measured, strict=True):
        print(f"{term.name:<40}{_mib(term.num_bytes):>11}{_mib(size):>11}  {term.formula}")


def _print_lengths(page: Page) -> None:
    config = page.rows[0].case.config
    print("\nattention exceeds the feed-forward layer of an encoder layer from length")
    for crossing in crossings(config):
        print(f"{crossing.name:<40}{crossing.length:>11,.0f}  {crossing.formula}")
    if page.memory_bytes is not None:
        print(f"\nlongest T in {_mib(page.memory_bytes)} MiB, B = {page.rows[0].case.batch}")
        for row, length in zip(page.rows, page.longest_lengths(), strict=True):
            print(f"{row.options:<40}{length:>11,}")
    print(f"\n{'lecture: T':<20}{'claim':>10}{'one matrix':>14}{'all of ' + page.name:>20}, one sequence")
    for entry in lecture_rows(config):
        print(f"{entry.length:<20,}{entry.claim:>10}{_mib(entry.matrix_bytes):>14}{_mib(entry.model_bytes):>20}")
    for note in _NOTES:
        print(f"- {note}")


MAX_LENGTH = 1 << 20
MAX_BATCH = 4096
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_TIMED_STEPS = 5
_BACKENDS: tuple[LabBackend, ...] = ("eager", "sdpa")


class MemoryCommandError(ModelError):
    """The page cannot be made with these arguments; the message names the flag and the allowed range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Shape to calculate: its name, its configuration, and the bundle if it is one."""

    name: str
    config: ModelConfig
    bundle: Bundle | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model", metavar="MODEL_OR_PRESET", help="base, big, tiny, a checkpoint's directory, or a bundle"
    )
    parser.add_argument("--length", type=int, required=True, metavar="T", help="tokens of each source and target")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="number of rows (default 1)")
    parser.add_argument("--train", action="store_true", help="one training step instead of one translation")
    parser.add_argument("--memory", metavar="SIZE", help="find the longest T that fits, for example in 16GiB")
    parser.add_argument("--no-measure", action="store_true", help="print only the arithmetic")
    parser.add_argument("--time", action="store_true", help="with --train: also seconds of a step, on an idle machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the page as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the page; return 0, or 2 after an error, with one line on standard error."""
    try:
        _check(args)
        memory_bytes = parse_size(args.memory) if args.memory else None
        page = make_page(args, _subject(args.model), memory_bytes)
        if args.json:
            args.json.write_text(json.dumps(page.as_json(), indent=2) + "\n", encoding="utf-8")
    except (ModelError, OSError) as error:
        print(f"antiphon memory: {error}", file=sys.stderr)
        return 2
    print_page(page)
    return 0


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 16GiB. Raises MemoryCommandError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w+)", text)
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise MemoryCommandError(f"--memory is {text!r}; it must be a number above 0 and one of {', '.join(_UNITS)}")
    return int(float(match[1]) * _UNITS[match[2]])


def make_page(args: argparse.Namespace, subject: Subject, memory_bytes: int | None) -> Page:
    """Return the page of the parsed flags. Raises UncoveredModelError, GraphError or WorkspaceError."""
    predict = arithmetic.training if args.train else arithmetic.translation
    cases = _cases(subject.config, args)
    free = available_bytes()
    rows = [_row(case, predict(case), args, free) for case in cases]
    native = _native(subject, cases[0], is_measured=not args.no_measure) if not args.train else None
    return Page(
        name=subject.name,
        predict=predict,
        is_training=args.train,
        rows=tuple(rows),
        native=native,
        free_bytes=free,
        memory_bytes=memory_bytes,
        limit=min(subject.config.max_source_len, subject.config.max_target_len),
    )


def _check(args: argparse.Namespace) -> None:
    for flag, value, most in (("--length", args.length, MAX_LENGTH), ("--batch", args.batch, MAX_BATCH)):
        if not 1 <= value <= most:
            raise MemoryCommandError(f"{flag} is {value}; it must be from 1 to {most}")
    if args.time and (not args.train or args.no_measure):
        raise MemoryCommandError("--time needs --train, and measurement without --no-measure")
    if args.json and not args.json.parent.is_dir():
        raise MemoryCommandError(f"--json is {args.json}, but there is no directory {args.json.parent}")


def _subject(model: str) -> Subject:
    path = Path(model)
    if (path / "manifest.json").is_file():
        bundle = load_bundle(path)
        return Subject(name=bundle.manifest.name, config=bundle.manifest.model, bundle=bundle)
    if path.is_dir():
        return Subject(name=path.name, config=read_config(path / "config.json", ModelConfig))
    try:
        return Subject(name=model, config=preset(model))
    except ValueError as error:
        raise MemoryCommandError(f"MODEL_OR_PRESET: no such directory, and {error}") from None


def _cases(config: ModelConfig, args: argparse.Namespace) -> list[Case]:
    options = product(_BACKENDS, (False, True) if args.train else (False,), (False, True))
    return [
        with_length(
            Case(config=config, batch=args.batch, length=1, backend=backend, checkpointing=checkpointing, bf16=bf16),
            args.length,
        )
        for backend, checkpointing, bf16 in options
    ]


def _row(case: Case, prediction: Prediction, args: argparse.Namespace, free_bytes: int) -> Row:
    """Return one case's prediction, measured unless the flags or the free memory forbid it."""
    row = Row(case=case, prediction=prediction)
    if args.no_measure or prediction.peak_bytes > free_bytes:
        return row
    if not args.train:
        return replace(row, measured_bytes=measurement.translation_peak(case))
    step = measurement.TrainingStep(case)
    row = replace(row, measured_bytes=step.peak_bytes())
    return replace(row, seconds=step.seconds(_TIMED_STEPS)) if args.time else row


def _native(subject: Subject, case: Case, *, is_measured: bool) -> Native | None:
    """Return the terms of the native graphs, and their measured bytes where the bundle supports the length.

    A preset stands for float32 graphs with caches of float32, as `antiphon export` writes them. None for int4 graphs.
    """
    bundle = subject.bundle
    graphs = bundle.graph_set() if bundle else None
    precision = graphs.precision if graphs else "float32"
    if precision not in ("float32", "int8"):
        return None
    cache = np.dtype(graphs.cache if graphs and graphs.cache else "float32").itemsize
    prediction = arithmetic.native(replace(case, config=subject.config), precision, cache)
    if bundle is None or not is_measured or case.length > bundle.manifest.model.max_source_len:
        return prediction, (None, None, None)
    measured = (
        measurement.weights_bytes(bundle),
        measurement.pool_bytes(bundle, case),
        measurement.native_workspace_peak(bundle, case),
    )
    return prediction, measured
