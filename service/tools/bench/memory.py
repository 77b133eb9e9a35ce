"""Section `memory`: what each side keeps resident, in a process of its own that loads and works through one batch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from antiphon.service.tools.bench.report import BenchFailure, Case, Finding
from antiphon.service.tools.bench.server import PATIENCE_S
from antiphon.service.tools.bench.setup import Setup, Subject
from antiphon.service.tools.bench.twin import Twin, TwinSettings, decode_candidates, prompts_of

ROWS = 64
_MOMENTS = {"loaded_mb": "resident after load", "peak_mb": "peak resident, one full batch"}


def memory(setup: Setup) -> list[Finding]:
    """Every model that has a twin."""
    return [found for subject in setup.twinned() for found in _memory_of(subject, setup)]


def _memory_of(subject: Subject, setup: Setup) -> list[Finding]:
    sources = subject.sources(ROWS)
    candidates = decode_candidates(ROWS, setup.threads, sum(map(len, sources)) / ROWS)
    settings = Twin(subject.twin_folder).best(candidates, prompts_of(sources), subject.max_new_tokens)
    runs = [
        (
            _child(subject, "antiphon", subject.bundle.path, [setup.threads]),
            _child(subject, "ctranslate2", subject.twin_folder, _as_arguments(settings)),
        )
        for _ in range(setup.repeat)
    ]
    return [
        Case(name="memory", case=f"{subject.name}, {what}", rows=ROWS, against=str(settings), is_twin=True).finding(
            [(ours[moment], theirs[moment]) for ours, theirs in runs], "MB"
        )
        for moment, what in _MOMENTS.items()
    ]


def _as_arguments(settings: TwinSettings) -> list[object]:
    return [settings.workers, settings.threads, settings.max_batch_size, settings.batch_type]


def _child(subject: Subject, side: str, folder: Path, arguments: Sequence[object]) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "antiphon.service.tools.bench.resident",
        side,
        str(folder),
        str(subject.max_new_tokens),
    ]
    ended = subprocess.run(
        [*command, *map(str, arguments)], input=json.dumps(subject.sources(ROWS)), stdout=subprocess.PIPE, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    if ended.returncode != 0:
        raise BenchFailure(f"memory: the {side} process failed; its own words are above")
    measured: dict[str, float] = json.loads(ended.stdout)
    return measured
