"""`antiphon lab` and `antiphon compare`: run experiments, resume them, and write their reports."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from antiphon.client import ServerError
from antiphon.errors import ModelError, RecipeError
from antiphon.lab.experiment import Experiment, Setting, parse_scale, run_trials
from antiphon.lab.experiments.ablations import ABLATIONS, DEPTH
from antiphon.lab.experiments.complexity import COMPLEXITY
from antiphon.lab.experiments.decoding import DECODING
from antiphon.lab.experiments.encoders import COMPARE, TRANSFER
from antiphon.lab.experiments.heads import HEADS
from antiphon.lab.experiments.length import LENGTH
from antiphon.lab.experiments.sequences import ALGORITHMIC, SCAN
from antiphon.lab.report import write_report

_EXPERIMENTS = (ABLATIONS, DEPTH, LENGTH, SCAN, ALGORITHMIC, COMPLEXITY, DECODING, HEADS, COMPARE, TRANSFER)

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _EXPERIMENTS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"experiments: {', '.join(EXPERIMENTS)}, or all")
    _add_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="folder of public data, as for `antiphon train`")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/lab"), help="folder of runs and reports (default: %(default)s)"
    )
    parser.add_argument(
        "--scale", default="1", help="factor on training steps, or toy: seconds, artificial data (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="number of seeds (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, of one thread each (default: all cores)"
    )


def run(args: argparse.Namespace) -> int:
    """Run experiments; return 0, 2 after an error with one line on standard error, 130 after an interrupt."""
    return _run_named(args.names, args)


@dataclass(frozen=True, slots=True)
class ExperimentCommand:
    """Command that runs one experiment, with the options and exit codes of `antiphon lab`."""

    experiment: Experiment

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""
        _add_options(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Run the experiment; return the exit code of `antiphon lab NAME`."""
        return _run_named([self.experiment.name], args)


COMPARE_COMMAND = ExperimentCommand(COMPARE)
"""`antiphon compare`: kinds of encoders beside each other."""


def _run_named(names: list[str], args: argparse.Namespace) -> int:
    try:
        setting = _setting(args)
        for experiment in _chosen(names):
            _run(experiment, setting, args.jobs)
    except (ModelError, ServerError, OSError) as error:
        print(f"antiphon lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("antiphon lab: interrupted; the same command resumes every run", file=sys.stderr)
        return 130
    return 0


def _setting(args: argparse.Namespace) -> Setting:
    for option in ("seeds", "jobs"):
        if not 1 <= getattr(args, option) <= 64:
            raise RecipeError(f"--{option} is {getattr(args, option)}; it must be from 1 to 64")
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    seeds = tuple(range(1, args.seeds + 1))
    return Setting(data=args.data, output=output, scale=parse_scale(args.scale), seeds=seeds)


def _chosen(names: list[str]) -> list[Experiment]:
    if unknown := [name for name in names if name not in (*EXPERIMENTS, "all")]:
        raise RecipeError(f"NAME is {unknown[0]!r}; experiments: {', '.join(EXPERIMENTS)}, or all")
    return list(EXPERIMENTS.values()) if "all" in names else [EXPERIMENTS[name] for name in names]


def _run(experiment: Experiment, setting: Setting, jobs: int) -> None:
    """Run one experiment and print its section of the report."""
    results = run_trials(experiment, setting, jobs)
    if experiment.alone is not None:
        runs = setting.folders(experiment.name).runs
        first = [trial for trial in experiment.trials(setting) if trial.seed == setting.seeds[0]]
        averaged = {trial.name: runs / trial.key / "averaged" for trial in first}
        trained = {name: folder for name, folder in averaged.items() if folder.is_dir()}  # not those that diverged
        results = replace(results, alone=experiment.alone(setting, trained))
    scale = "toy" if setting.is_toy else f"{setting.scale:g}"
    command = f"antiphon lab {experiment.name} --data DATA --scale {scale} --seeds {len(setting.seeds)}"
    print(write_report(experiment, results, setting, command))
