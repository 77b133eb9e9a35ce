"""What a benchmark found, as numbers, as a table and as JSON. Knows medians and machines, not what was measured."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


class BenchError(Exception):
    """The benchmark cannot run; the message names the argument or file."""


class BenchFailure(Exception):
    """What was measured did not do its work: outputs differ, or a process of the benchmark ended early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One figure, and what it is compared with; None where there is nothing of the kind.

    name: the section. case: what of it. rows: sequences together.
    antiphon, ctranslate2: medians, in `unit`. baseline: the same of another side of our own, where there is one.
    against: what stands beside antiphon, with the settings it ran at.
    ratio: median of the ratios of neighbouring runs, antiphon over the other; of latencies and memory, less is better.
    equal_outputs: share of requests for which both sides gave the same tokens.
    """

    name: str
    case: str
    rows: int
    antiphon: float
    ctranslate2: float | None = None
    baseline: float | None = None
    against: str | None = None
    ratio: float | None = None
    unit: str
    equal_outputs: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """One run: tokens, end tokens included, and the seconds they took, by the wall and of this process's CPU."""

    num_tokens: int
    seconds: float
    cpu_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What findings are about; see Finding. is_twin: the other side is CTranslate2."""

    name: str
    case: str
    rows: int
    against: str
    is_twin: bool = False
    equal_outputs: float | None = None

    def finding(self, pairs: Sequence[tuple[float, float]], unit: str, *, digits: int = 1) -> Finding:
        """Medians of pairs of neighbouring figures, (antiphon, other) each, and of their ratios."""
        theirs = round(statistics.median(other for _, other in pairs), digits)
        ratios = [ours / other for ours, other in pairs if other]
        return Finding(
            name=self.name,
            case=self.case,
            rows=self.rows,
            antiphon=round(statistics.median(ours for ours, _ in pairs), digits),
            ctranslate2=theirs if self.is_twin else None,
            baseline=None if self.is_twin else theirs,
            against=self.against,
            ratio=round(statistics.median(ratios), 3) if ratios else None,
            unit=unit,
            equal_outputs=None if self.equal_outputs is None else round(self.equal_outputs, 4),
        )


def compare(case: Case, pairs: Sequence[tuple[Speed, Speed]], unit: str = "tokens/s") -> list[Finding]:
    """Findings of runs that alternated, (antiphon, other) each: by the wall, and by CPU time where both know theirs."""
    wall = [(ours.num_tokens / ours.seconds, theirs.num_tokens / theirs.seconds) for ours, theirs in pairs]
    cpu = [
        (ours.num_tokens / ours.cpu_s, theirs.num_tokens / theirs.cpu_s)
        for ours, theirs in pairs
        if ours.cpu_s and theirs.cpu_s
    ]
    return [case.finding(wall, unit)] + ([case.finding(cpu, "tokens/CPU s")] if cpu else [])


def share_equal(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of requests whose targets are the same on both sides."""
    return sum(list(a) == list(b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


_HEADING = ("section", "case", "rows", "antiphon", "other", "ratio", "unit", "equal", "against")
_RIGHT = (2, 3, 4, 5, 7)


def table(findings: Sequence[Finding]) -> str:
    """The findings in aligned columns, one a line, under a heading."""
    lines = [_HEADING, *(_cells(finding) for finding in findings)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADING))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in _RIGHT else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def to_json(findings: Sequence[Finding], threads: int) -> str:
    """One object {machine, commit, sections}; commit is null outside a checkout."""
    described = {
        "machine": machine(threads),
        "commit": _commit(),
        "sections": [asdict(finding) for finding in findings],
    }
    return json.dumps(described, indent=2) + "\n"


def machine(threads: int) -> str:
    """Processor, cores, threads used and the versions of both runtimes, in one line."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    runtimes = ", ".join(f"{name} {_version(name)}" for name in ("onnxruntime", "ctranslate2") if _version(name))
    return f"{cpu}, {os.cpu_count()} cores, {threads} threads, {runtimes}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ("git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=12")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cells(finding: Finding) -> tuple[str, ...]:
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
