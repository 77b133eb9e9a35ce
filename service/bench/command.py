"""`antiphon bench`: measures a bundle on this machine, section by section, and stops by itself."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from antiphon.model.bundle import BundleError, load_bundle
from antiphon.model.graph import GraphError
from antiphon.model.ops.workspace import WorkspaceError
from antiphon.model.tokenizer import Tokenizer, TokenizerError
from antiphon.service.bench.report import BenchError, BenchFailure, Finding, machine, table, to_json
from antiphon.service.bench.sections import SECTIONS, Setup
from antiphon.service.bench.sources import load_texts
from antiphon.service.config import SHIPPED_BUNDLE, usable_cores

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `antiphon bench`."""
    parser.add_argument(
        "bundle", type=Path, nargs="?", default=SHIPPED_BUNDLE, metavar="BUNDLE",
        help="exported model (default: the English-German one)",
    )  # fmt: skip
    parser.add_argument(
        "--section", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME",
        help=f"which of {', '.join(SECTIONS)} to run (default: all)",
    )  # fmt: skip
    parser.add_argument("--source", type=Path, metavar="FILE", help="sentences, one a line (default: some built in)")
    parser.add_argument(
        "--rows", type=_positive, default=32, metavar="N", help="rows of the engine section (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=_positive, default=usable_cores(), metavar="N", help="CPU threads (default: every core)"
    )
    parser.add_argument(
        "--repeat", type=_positive, default=5, metavar="N", help="measured runs of each side (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure; 0 when done, 2 for a wrong argument, 1 when a side failed or the sides disagree."""
    try:
        setup = _setup(args)
        findings = [finding for name in dict.fromkeys(args.section) for finding in _run_section(name, setup)]
        print(f"{machine(args.threads)}\n{table(findings)}")
        if args.json is not None:
            _write(args.json, to_json(findings, args.threads))
    except (BenchError, BundleError, TokenizerError, GraphError, WorkspaceError) as error:
        print(f"antiphon bench: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BenchFailure as failure:
        print(f"antiphon bench: {failure}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def _setup(args: argparse.Namespace) -> Setup:
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise BenchError(f"--json {args.json}: {args.json.absolute().parent} is not a directory")
    bundle = load_bundle(args.bundle)
    setup = Setup(
        bundle=bundle,
        tokenizer=Tokenizer.load(bundle.file(bundle.manifest.tokenizer)),
        source=args.source,
        rows=args.rows,
        threads=args.threads,
        repeat=args.repeat,
    )
    setup.sources(load_texts(args.source, None))  # a wrong file is found before anything is measured
    return setup


def _run_section(name: str, setup: Setup) -> list[Finding]:
    print(f"antiphon bench: {name}", file=sys.stderr)
    return SECTIONS[name](setup)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--json {path} cannot be written: {error}") from None


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value
