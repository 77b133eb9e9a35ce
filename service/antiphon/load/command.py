"""`antiphon load`: open-loop load on a running server, with a report. A client; loads no model itself."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from antiphon.cli.common import report_error, write_problem
from antiphon.cli.connection_flags import connection_problem, server_problem
from antiphon.client import ServerError
from antiphon.load.drive import DriveError, bracketed_rate
from antiphon.load.drive import run as drive
from antiphon.load.flags import add_load_flags, read_plan
from antiphon.load.plan import Plan, PlanError
from antiphon.load.probe import Probe
from antiphon.load.report import as_json, as_text, curve, mlperf_as_json, mlperf_as_text, warnings
from antiphon.load.results import Result

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

# A search ends within 5 % of a rate that fails; runs of a few seconds are not more precise.
_PRECISION = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon load`."""
    add_load_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Load the server and return the exit code."""
    try:
        _check_outputs(arguments)
        plan, entries = read_plan(arguments)
        with Probe(plan) as probe:
            model = probe.model()
            if entries:
                sources = probe.sources(entries)
                asks = (replace(ask, source=source) for ask, source in zip(plan.asks, sources, strict=True))
                plan = replace(plan, asks=tuple(asks))
        plan = replace(plan, model=model.name)
        return _Session(arguments, plan).run() if arguments.mlperf is None else _run_mlperf(arguments, plan)
    except (PlanError, DriveError) as error:
        return report_error("load", error)
    except ValueError as error:  # an invalid connection, or a number out of its field's range
        return report_error("load", connection_problem(error))
    except ServerError as error:
        return report_error("load", server_problem(error, arguments.target))


class _Session:
    """Runs of one command, and their report."""

    def __init__(self, arguments: argparse.Namespace, plan: Plan) -> None:
        self._arguments = arguments
        self._plan = plan
        self._results: list[Result] = []
        self._highest: float | None = None
        self._is_interrupted = False

    def run(self) -> int:
        try:
            self._measure_all()
        except KeyboardInterrupt:
            self._is_interrupted = True
        if self._results:
            self._report()
        return EXIT_INTERRUPTED if self._is_interrupted else self._exit_code()

    def _measure_all(self) -> None:
        if self._arguments.search:
            assert self._plan.rate is not None
            self._highest = bracketed_rate(self._holds, self._plan.rate, _PRECISION)
        elif self._arguments.rates:
            for rate in self._arguments.rates:
                self._measure(replace(self._plan, rate=rate))
        else:
            self._measure(self._plan)

    def _holds(self, rate: float) -> bool:
        result = self._measure(replace(self._plan, rate=rate))
        return result.has_met_objective and result.has_kept_up

    def _measure(self, plan: Plan) -> Result:
        _announce(plan)
        result = drive(plan)
        self._results.append(result)
        for warning in warnings(result):
            print(f"antiphon load: {warning}", file=sys.stderr)
        if result.is_interrupted:
            raise KeyboardInterrupt
        return result

    def _report(self) -> None:
        if self._arguments.search or self._arguments.rates:
            print(curve(self._results))
        else:
            print(as_text(self._results[0]))
        if self._arguments.search and not self._is_interrupted:
            print(_verdict(self._highest, self._plan))
        if self._arguments.json is not None:
            _write_json(self._arguments.json, self._as_json())
        if self._arguments.plot is not None:
            from antiphon.load.plot import draw_curve

            _write("--plot", self._arguments.plot, draw_curve(self._results, self._highest))

    def _as_json(self) -> dict[str, Any]:
        if not self._arguments.search and not self._arguments.rates:
            return as_json(self._results[0])
        return {"highest_rate": self._highest, "runs": [as_json(result) for result in self._results]}

    def _exit_code(self) -> int:
        if self._arguments.search:
            has_failed = not self._highest
        else:
            has_failed = any(result.num_dropped or not result.num_ok for result in self._results)
            if self._arguments.fail:
                has_failed |= not all(result.has_met_objective for result in self._results)
        has_failed |= any(result.record.num_mismatches for result in self._results)
        return EXIT_FAILED if has_failed else 0


def _run_mlperf(arguments: argparse.Namespace, plan: Plan) -> int:
    from antiphon.load.mlperf import check_plan, run_server_scenario

    check_plan(plan)
    _announce(plan)
    verdict = run_server_scenario(plan, arguments.mlperf)
    print(mlperf_as_text(verdict))
    if arguments.json is not None:
        _write_json(arguments.json, mlperf_as_json(plan, verdict))
    return EXIT_FAILED if verdict.errors or (arguments.fail and not verdict.is_valid) else 0


def _announce(plan: Plan) -> None:
    """Print rate, duration and target of the next run to standard error, since a run takes long."""
    rate = "a trace" if plan.rate is None else f"{plan.rate:,.1f} requests/s"
    print(f"antiphon load: {rate} for {plan.end_s:g} s to {plan.model} on {plan.target}", file=sys.stderr)


def _verdict(highest: float | None, plan: Plan) -> str:
    if not highest:
        return "no tried rate meets the objective"
    return f"highest rate that meets the objective: {highest:,.1f} requests/s"


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Check the output files before the load. Raises PlanError if they cannot be written."""
    for flag, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise PlanError(f"{flag} {path} cannot be written: it must name a file in a directory that exists")
    if arguments.plot is not None:
        import matplotlib  # noqa: F401  # the command line says what to install


def _write_json(path: Path, figures: dict[str, Any]) -> None:
    _write("--json", path, f"{json.dumps(figures, indent=2, ensure_ascii=False)}\n".encode())


def _write(flag: str, path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise PlanError(write_problem(flag, path, error)) from None
