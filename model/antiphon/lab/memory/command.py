"""`antiphon memory`: the arithmetic of a model's memory with its formulas, beside measured peaks."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from antiphon.architecture.config import ModelConfig, preset
from antiphon.bundle.machine import available_bytes
from antiphon.bundle.manifest import Bundle, load_bundle
from antiphon.checkpoints.checkpoint import read_config
from antiphon.errors import ModelError
from antiphon.lab.memory import arithmetic, inference, measurement
from antiphon.lab.memory.lengths import with_length
from antiphon.lab.memory.page import Native, Page, Row, print_page
from antiphon.lab.memory.terms import Case, LabBackend, Prediction

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
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w+)", text)
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise MemoryCommandError(f"--memory is {text!r}; it must be a number above 0 and one of {', '.join(_UNITS)}")
    return int(float(found[1]) * _UNITS[found[2]])


def make_page(args: argparse.Namespace, subject: Subject, memory_bytes: int | None) -> Page:
    """Return the page of the parsed flags. Raises UncoveredModelError, GraphError or WorkspaceError."""
    predict = arithmetic.training if args.train else inference.translation
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
    prediction = inference.native(replace(case, config=subject.config), precision, cache)
    if bundle is None or not is_measured or case.length > bundle.manifest.model.max_source_len:
        return prediction, (None, None, None)
    measured = (
        measurement.weights_bytes(bundle),
        measurement.pool_bytes(bundle, case),
        measurement.native_workspace_peak(bundle, case),
    )
    return prediction, measured
