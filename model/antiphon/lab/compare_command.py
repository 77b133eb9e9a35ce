"""`antiphon compare`: kinds of encoders beside each other; the experiment `compare` of the laboratory."""

from __future__ import annotations

import argparse

from antiphon.lab.command import add_options, run_named
from antiphon.lab.experiments.compare import COMPARE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the experiment; return the exit code of `antiphon lab compare`."""
    return run_named([COMPARE.name], args)
