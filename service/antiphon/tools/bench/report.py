"""Figures of a benchmark: timed runs of two sides, findings, and findings as a table, as JSON and as plots."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from antiphon.bundle.machine import processor_name
from antiphon.tools.bench.kernel_runs import active_kernels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# OpenMP threads spin for some time after their work has ended. This must not take time from the other side.
SETTLE_S = 0.25

A = TypeVar("A")
B = TypeVar("B")


class BenchError(Exception):
    """The benchmark cannot run; the message names the argument or file."""


class BenchFailure(Exception):
    """A measured side failed: outputs differ, or a process of the benchmark ended early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One figure and its comparison. Absent values are None."""

    name: str
    """The section."""
    case: str
    """The measured case of that section."""
    rows: int
    """Number of sequences that run together."""
    antiphon: float
    """Median, in `unit`."""
    ctranslate2: float | None = None
    """Median of CTranslate2, in `unit`."""
    baseline: float | None = None
    """Median of another side that is not CTranslate2."""
    against: str | None = None
    """Name of the other side, with its settings."""
    ratio: float | None = None
    """Median of the ratios of neighbouring runs, antiphon over the other. For latency and memory, less is better."""
    unit: str
    equal_outputs: float | None = None
    """Share of requests for which both sides gave the same tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Speed of one run: tokens, end tokens included; wall-clock seconds; and CPU seconds of this process."""

    num_tokens: int
    seconds: float
    cpu_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Subject of findings; see Finding for the fields. is_ctranslate2: the other side is CTranslate2."""

    name: str
    case: str
    rows: int
    against: str
    is_ctranslate2: bool = False
    equal_outputs: float | None = None

    def finding(self, pairs: Sequence[tuple[float, float]], unit: str, *, digits: int = 1) -> Finding:
        """Return medians of pairs (antiphon, other) of neighbouring figures, and the median of their ratios."""
        theirs = round(statistics.median(other for _, other in pairs), digits)
        ratios = [ours / other for ours, other in pairs if other]
        return Finding(
            name=self.name,
            case=self.case,
            rows=self.rows,
            antiphon=round(statistics.median(ours for ours, _ in pairs), digits),
            ctranslate2=theirs if self.is_ctranslate2 else None,
            baseline=None if self.is_ctranslate2 else theirs,
            against=self.against,
            ratio=round(statistics.median(ratios), 3) if ratios else None,
            unit=unit,
            equal_outputs=None if self.equal_outputs is None else round(self.equal_outputs, 4),
        )


def compare(case: Case, pairs: Sequence[tuple[Speed, Speed]], unit: str = "tokens/s") -> list[Finding]:
    """Return findings of alternating runs (antiphon, other): by wall clock, and by CPU time if both sides have it."""
    wall = [(ours.num_tokens / ours.seconds, theirs.num_tokens / theirs.seconds) for ours, theirs in pairs]
    cpu = [
        (ours.num_tokens / ours.cpu_s, theirs.num_tokens / theirs.cpu_s)
        for ours, theirs in pairs
        if ours.cpu_s and theirs.cpu_s
    ]
    return [case.finding(wall, unit)] + ([case.finding(cpu, "tokens/CPU s")] if cpu else [])


def share_equal(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return the share of requests whose targets are the same on both sides."""
    return sum(list(a) == list(b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


HEADING = ("section", "case", "rows", "antiphon", "other", "ratio", "unit", "equal", "against")
"""Headings of the columns of `cells`."""
_RIGHT = (2, 3, 4, 5, 7)


def table(findings: Sequence[Finding]) -> str:
    """Return the findings as a table with a heading and aligned columns, one finding per line."""
    lines = [HEADING, *(cells(finding) for finding in findings)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADING))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in _RIGHT else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def to_json(findings: Sequence[Finding], threads: int, command: str) -> str:
    """Return a JSON object {date, machine, commit, command, sections}; commit is null outside a git checkout."""
    described = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(threads),
        "commit": commit(),
        "command": command,
        "sections": [asdict(finding) for finding in findings],
    }
    return json.dumps(described, indent=2) + "\n"


def machine(threads: int) -> str:
    """Describe the machine in one line: processor, cores, threads in use, instruction set, versions of the runtimes."""
    packages = ("onnxruntime", "onnxruntime-gpu", "ctranslate2")
    runtimes = ", ".join(f"{name} {_version(name)}" for name in packages if _version(name))
    return f"{processor_name()}, {os.cpu_count()} cores, {threads} threads, {active_kernels()}, {runtimes}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit of the checkout, with `-dirty` if files differ from it; None outside a checkout."""
    command = ("git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=12")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def cells(finding: Finding) -> tuple[str, ...]:
    """Return the finding as text, a cell for each column."""
    other = finding.baseline if finding.ctranslate2 is None else finding.ctranslate2
    return (
        finding.name,
        finding.case,
        str(finding.rows),
        _number(finding.antiphon),
        _number(other),
        "" if finding.ratio is None else f"{finding.ratio:.2f}",
        finding.unit,
        "" if finding.equal_outputs is None else f"{finding.equal_outputs:.0%}",
        finding.against or "",
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def timed(translate: Callable[[], Sequence[Sequence[int]]]) -> Speed:
    """Run once; return the number of target tokens, the wall-clock seconds and the CPU seconds of this process."""
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    targets = translate()
    seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    return Speed(num_tokens=sum(map(len, targets)), seconds=seconds, cpu_s=cpu_s)


def alternate(ours: Callable[[], A], theirs: Callable[[], B], count: int) -> list[tuple[A, B]]:
    """Run both sides `count` times in turn. The side that runs first changes every time."""
    pairs = []
    for index in range(count):
        if index % 2:
            theirs_first = _settled(theirs)
            pairs.append((_settled(ours), theirs_first))
        else:
            pairs.append((_settled(ours), _settled(theirs)))
    return pairs


def _settled(run: Callable[[], A]) -> A:
    time.sleep(SETTLE_S)
    return run()


def plot_decode(path: Path, findings: Sequence[Finding], title: str) -> None:
    """Write a PNG with two panels, the speed of both sides and their ratio. Findings of other sections are ignored."""
    from matplotlib.figure import Figure

    shown = [
        finding for finding in findings if finding.name == "decode" and finding.unit == "tokens/s" and finding.ratio
    ]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speed, ratio = figure.subplots(1, 2)
    for case in dict.fromkeys(finding.case for finding in shown):
        of_case = sorted((finding for finding in shown if finding.case == case), key=lambda finding: finding.rows)
        rows = [finding.rows for finding in of_case]
        lines = speed.plot(rows, [finding.antiphon for finding in of_case], "o-", label=f"Antiphon, {case}")
        color = lines[0].get_color()
        speed.plot(
            rows, [finding.ctranslate2 or 0 for finding in of_case], "s--", color=color, label=f"CTranslate2, {case}"
        )
        ratio.plot(rows, [finding.ratio or 0 for finding in of_case], "o-", color=color, label=case)
    ratio.axhline(1, color="black", linewidth=1)
    ticks = sorted({finding.rows for finding in shown})
    for axes, label in ((speed, "target tokens/s"), (ratio, "Antiphon over CTranslate2")):
        axes.set(xlabel="rows", ylabel=label, xscale="log", ylim=(0, None))
        axes.set_xticks(ticks, [str(rows) for rows in ticks])
        axes.minorticks_off()
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    _save(figure, path, title)


def plot_growth(path: Path, findings: Sequence[Finding], title: str) -> None:
    """Write a PNG with one line for each division of the threads. Findings of other sections are ignored."""
    from matplotlib.figure import Figure

    shown = [finding for finding in findings if finding.name == "growth"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for case in dict.fromkeys(finding.case for finding in shown):
        of_case = sorted((finding for finding in shown if finding.case == case), key=lambda finding: finding.rows)
        axes.plot([finding.rows for finding in of_case], [finding.antiphon for finding in of_case], "o-", label=case)
    ticks = sorted({finding.rows for finding in shown})
    axes.set(xlabel="rows", ylabel="target tokens/s", xscale="log", ylim=(0, None))
    axes.set_xticks(ticks, [str(rows) for rows in ticks])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    _save(figure, path, title)


def _save(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise BenchError(f"--plot {path} cannot be written: {error}") from None
