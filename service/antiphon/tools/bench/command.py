"""`antiphon bench`: measures a bundle on this machine, section by section. Each section is independent of the others.

Runs of the two sides alternate, so that a busy machine slows both. Outputs are compared, so that a wrong answer does
not count as a fast one.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from antiphon.bundle.manifest import load_bundle
from antiphon.cli.common import report_error
from antiphon.errors import ModelError
from antiphon.server.machine import usable_cores
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.tools.bench.corpus import Corpus, everyday, held_out, read_corpus
from antiphon.tools.bench.graphs import graphs
from antiphon.tools.bench.host import host
from antiphon.tools.bench.kernels import kernels
from antiphon.tools.bench.memory import memory
from antiphon.tools.bench.node_profile import profile_nodes
from antiphon.tools.bench.poisson import poisson
from antiphon.tools.bench.positions import positions
from antiphon.tools.bench.report import (
    BenchError,
    BenchFailure,
    Finding,
    machine,
    plot_decode,
    plot_growth,
    table,
    to_json,
)
from antiphon.tools.bench.rivals import rivals
from antiphon.tools.bench.served import clients, grpc_overhead, one_user, stages, startup
from antiphon.tools.bench.setup import MODELS, PRESETS, Setup
from antiphon.tools.bench.simulated_device import simulated_device
from antiphon.tools.bench.throughput import beams, decode, encode, engine, growth, sampling

EXIT_FAILURE = 1

SECTIONS: dict[str, Callable[[Setup], list[Finding]]] = {
    "decode": decode,
    "beams": beams,
    "sampling": sampling,
    "encode": encode,
    "poisson": poisson,
    "memory": memory,
    "grpc_overhead": grpc_overhead,
    "clients": clients,
    "stages": stages,
    "one_user": one_user,
    "engine": engine,
    "growth": growth,
    "graphs": graphs,
    "positions": positions,
    "simulated_device": simulated_device,
    "host": host,
    "startup": startup,
    "kernels": kernels,
    "rivals": rivals,
}
"""Sections by name, in the order in which they run."""
# Installs gigabytes of packages of other projects.
_ONLY_BY_NAME = {"rivals"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon bench`."""
    parser.add_argument(
        "bundle", type=Path, nargs="?", default=SHIPPED_BUNDLE, metavar="BUNDLE",
        help="exported model (default: the English-German one)",
    )  # fmt: skip
    parser.add_argument(
        "--section", nargs="+", choices=SECTIONS, metavar="NAME",
        help=f"sections to run, of {', '.join(SECTIONS)} (default: all but {', '.join(_ONLY_BY_NAME)}; with --profile: "
        "none)",
    )  # fmt: skip
    _add_models(parser)
    _add_sentences(parser)
    _add_scale(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE as one JSON object")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot the section decode, or else growth, to FILE, as PNG"
    )
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write the time of each graph operator to FILE")


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME",
        help="random: random weights and fixed lengths; bundle: BUNDLE on sentences (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--preset", choices=PRESETS, default="base", help="size of the random model (default: %(default)s)"
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR",
        help="what BUNDLE was made of: float32 weights for CTranslate2 (default: the weights of BUNDLE itself), or the "
        "imported directory, for rivals",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep generated models in DIR (default: generate them every time)"
    )


def _add_sentences(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source", type=Path, metavar="FILE", help="sentences, one per line (default: built-in sentences)"
    )
    parser.add_argument(
        "--reference", type=Path, metavar="FILE", help="translations of the sentences, for BLEU of both sides"
    )
    parser.add_argument("--recipe", metavar="NAME", help="or: held-out sentences of this recipe, with references")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder of the recipe's data files (default: $ANTIPHON_DATA)"
    )


def _add_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows", type=_positive, nargs="+", metavar="N",
        help="rows of decode (default: 1 8 32 64 128), of engine (default: 32) and of kernels (default: 1 8 32 64)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=_positive, default=usable_cores(), metavar="N", help="CPU threads (default: all cores)"
    )
    parser.add_argument(
        "--lanes", type=_lanes, default="auto", metavar="N",
        help="lanes of the engine, each with its part of the threads; auto: the fastest number (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=_positive, default=5, metavar="N", help="measured runs of each side (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=8.0, metavar="S",
        help="length of one open-loop run of poisson; other loads grow with it (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and print. Return 0; 2 for a wrong argument; 1 if a side failed or the outputs of the sides differ."""
    try:
        _check_outputs(args)
        with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as scratch:
            _measure(args, _setup(args, Path(scratch)))
    except (BenchError, ModelError) as error:
        return report_error("bench", error)
    except BenchFailure as failure:
        print(f"antiphon bench: {failure}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def _measure(args: argparse.Namespace, setup: Setup) -> None:
    names = args.section or ([] if args.profile else [name for name in SECTIONS if name not in _ONLY_BY_NAME])
    findings = [finding for name in dict.fromkeys(names) for finding in _run_section(name, setup)]
    if findings:
        print(f"{machine(args.threads)}\n{table(findings)}")
    if args.json is not None:
        command = shlex.join(("antiphon", *sys.argv[1:]))
        _write("--json", args.json, to_json(findings, args.threads, command))
    if args.plot is not None:
        draw = plot_decode if "decode" in names else plot_growth
        draw(args.plot, findings, machine(args.threads))
    if args.profile is not None:
        profiles = f"{machine(args.threads)}\n{profile_nodes(setup)}"
        print(profiles)
        _write("--profile", args.profile, profiles + "\n")


def _check_outputs(args: argparse.Namespace) -> None:
    """Check the output files before anything is measured, so that writing does not fail at the end."""
    for flag in ("json", "plot", "profile"):
        path: Path | None = getattr(args, flag)
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchError(f"--{flag} {path}: {path.absolute().parent} is not a directory")
    if args.plot is not None:
        if args.section and not {"decode", "growth"}.intersection(args.section):
            raise BenchError("--plot draws the section decode, or else growth; add one of them to --section")
        if importlib.util.find_spec("matplotlib") is None:
            raise BenchError("--plot needs matplotlib, which is not installed; run: pip install matplotlib")
    if args.work is not None and args.work.exists() and not args.work.is_dir():
        raise BenchError(f"--work {args.work} is not a directory")


def _setup(args: argparse.Namespace, scratch: Path) -> Setup:
    setup = Setup(
        bundle=load_bundle(args.bundle),
        corpus=_corpus(args),
        models=args.model,
        work=(args.work or scratch).absolute(),
        checkpoint=args.checkpoint,
        preset=args.preset,
        rows=tuple(dict.fromkeys(args.rows)) if args.rows else None,
        threads=args.threads,
        lanes=args.lanes,
        repeat=args.repeat,
        seconds=args.seconds,
    )
    setup.bundle_subject.sources(
        len(setup.corpus.texts)
    )  # raises for a sentence that is too long, before anything is measured
    return setup


def _corpus(args: argparse.Namespace) -> Corpus:
    if args.recipe is not None:
        if args.source is not None:
            raise BenchError("--recipe and --source exclude each other: give one of them")
        return held_out(args.recipe, args.data)
    if args.source is None:
        if args.reference is not None:
            raise BenchError(f"--reference {args.reference} needs --source with the sentences it translates")
        return everyday()
    return read_corpus(args.source, args.reference)


def _run_section(name: str, setup: Setup) -> list[Finding]:
    print(f"antiphon bench: {name}", file=sys.stderr)
    return SECTIONS[name](setup)


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{flag} {path} cannot be written: {error}") from None


def _lanes(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else _positive(text)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 600 or math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 600")
    return value
