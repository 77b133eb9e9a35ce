"""What a benchmark found, as numbers, as a table and as JSON. Knows medians and machines, not what was measured."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import onnxruntime as ort


class BenchError(Exception):
    """The benchmark cannot run; the message names the argument or file."""


class BenchFailure(Exception):
    """What was measured did not do its work: outputs differ, or a process of the benchmark ended early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One figure. baseline, against and ratio are None where there is nothing to compare with.

    name: the section. case: what of it. rows: sequences together. antiphon, baseline: medians, in `unit`.
    against: what the baseline is. ratio: median of the ratios of neighbouring runs, antiphon over baseline.
    """

    name: str
    case: str
    rows: int
    antiphon: float
    baseline: float | None = None
    against: str | None = None
    ratio: float | None = None
    unit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """One run: target tokens, end tokens included, and the seconds they took, by the wall and of this process's CPU."""

    num_tokens: int
    seconds: float
    cpu_s: float | None = None


def compare(name: str, case: str, rows: int, pairs: Sequence[tuple[Speed, Speed]], *, against: str) -> list[Finding]:
    """Findings of runs that alternated, (antiphon, baseline) each: tokens a second, and a CPU second where known."""
    wall = [(ours.num_tokens / ours.seconds, theirs.num_tokens / theirs.seconds) for ours, theirs in pairs]
    cpu = [
        (ours.num_tokens / ours.cpu_s, theirs.num_tokens / theirs.cpu_s)
        for ours, theirs in pairs
        if ours.cpu_s and theirs.cpu_s
    ]
    return [
        Finding(
            name=name,
            case=case,
            rows=rows,
            antiphon=round(statistics.median(ours for ours, _ in rates), 1),
            baseline=round(statistics.median(theirs for _, theirs in rates), 1),
            against=against,
            ratio=round(statistics.median(ours / theirs for ours, theirs in rates), 3),
            unit=unit,
        )
        for rates, unit in ((wall, "tokens/s"), (cpu, "tokens/CPU s"))
        if rates
    ]


def table(findings: Sequence[Finding]) -> str:
    """The findings in aligned columns, one a line, under a heading."""
    lines = [("section", "case", "rows", "antiphon", "baseline", "ratio", "unit", "against")]
    lines += [
        (
            finding.name,
            finding.case,
            str(finding.rows),
            _number(finding.antiphon),
            _number(finding.baseline),
            "" if finding.ratio is None else f"{finding.ratio:.2f}",
            finding.unit,
            finding.against or "",
        )
        for finding in findings
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    right = (2, 3, 4, 5)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
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
    """Processor, cores, threads used and runtime, in one line."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return f"{cpu}, {os.cpu_count()} cores, {threads} threads, onnxruntime {ort.__version__}"


def _commit() -> str | None:
    command = ("git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=12")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
