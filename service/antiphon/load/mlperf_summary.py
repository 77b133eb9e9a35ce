"""Verdict of MLPerf's LoadGen, read from the summary that it writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from antiphon.load.drive import DriveError

_FILE = "mlperf_log_summary.txt"
_LINE = re.compile(r"^\s*(?P<name>\S.*?)\s*:\s*(?P<value>\S+)\s*$")
_PERCENTILE = re.compile(r"^(?P<percent>[\d.]+) percentile (?P<what>.*) \(ns\)$")
_CONSTRAINTS = (
    "Performance constraints satisfied",
    "Min duration satisfied",
    "Min queries satisfied",
    "Early stopping satisfied",
)
_TOKENS = "Completed tokens per second"
# Names of latencies in LoadGen's summary, and here.
_LATENCIES = {"first token latency": "ttft_ms", "time to output token": "per_token_ms", "latency": "e2e_ms"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Figures of LoadGen."""

    is_valid: bool
    missed: tuple[str, ...]
    """Constraints that were not satisfied."""
    completed_per_s: float
    scheduled_per_s: float
    tokens_per_s: float | None
    percentiles_ms: dict[str, dict[str, float]]
    """As {"e2e_ms": {"p50": 9.7}}. Times to the first token and per token only if LoadGen checked token latencies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of LoadGen."""

    summary: Summary
    errors: dict[str, int]
    """Failed queries by status; LoadGen counts them as answers."""

    @property
    def is_valid(self) -> bool:
        """Return whether LoadGen reports VALID and every query was answered."""
        return self.summary.is_valid and not self.errors


def read_summary(folder: Path) -> Summary:
    """Read the summary in a folder of LoadGen's logs. Raises DriveError if it has another format."""
    path = folder / _FILE
    try:
        matches = [match for line in path.read_text("utf-8").splitlines() if (match := _LINE.match(line))]
        values = {match["name"]: match["value"] for match in matches}
        return Summary(
            is_valid=values["Result is"] == "VALID",
            missed=tuple(name for name in _CONSTRAINTS if values.get(name, "Yes").upper() != "YES"),
            completed_per_s=float(values["Completed samples per second"]),
            scheduled_per_s=float(values["Scheduled samples per second"]),
            tokens_per_s=float(values[_TOKENS]) if _TOKENS in values else None,
            percentiles_ms=_percentiles(values),
        )
    except (OSError, KeyError, ValueError) as error:
        raise DriveError(f"{path} is not a summary of LoadGen: {error!r}") from None


def _percentiles(values: Mapping[str, str]) -> dict[str, dict[str, float]]:
    percentiles: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        match = _PERCENTILE.match(name)
        if match is not None and match["what"] in _LATENCIES:
            percent = f"p{float(match['percent']):g}".replace(".", "_")
            percentiles.setdefault(_LATENCIES[match["what"]], {})[percent] = int(value) / 1e6
    return percentiles
