"""Section `memory`: resident memory of each side, in its own process that loads the model and translates one batch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from antiphon.tools.bench.ctranslate2 import CTranslate2Reference, CTranslate2Settings, decode_candidates, prompts_of
from antiphon.tools.bench.processes import PATIENCE_S
from antiphon.tools.bench.report import BenchFailure, Case, Finding
from antiphon.tools.bench.setup import Setup, Subject

ROWS = 64
_MOMENTS = {"loaded_mb": "resident after load", "peak_mb": "peak resident, one full batch"}


def memory(setup: Setup) -> list[Finding]:
    """Measure every model that CTranslate2 can run."""
    return [finding for subject in setup.with_ctranslate2() for finding in _memory_of(subject, setup)]


def _memory_of(subject: Subject, setup: Setup) -> list[Finding]:
    sources = subject.sources(ROWS)
    candidates = decode_candidates(ROWS, setup.threads, sum(map(len, sources)) / ROWS)
    reference = CTranslate2Reference(subject.ctranslate2_folder)
    settings = reference.best(candidates, prompts_of(sources), subject.max_new_tokens)
    runs = [
        (
            _child(subject, "antiphon", subject.bundle.path, [setup.threads]),
            _child(subject, "ctranslate2", subject.ctranslate2_folder, _as_arguments(settings)),
        )
        for _ in range(setup.repeat)
    ]
    case = partial(Case, name="memory", rows=ROWS, against=str(settings), is_ctranslate2=True)
    return [
        case(case=f"{subject.name}, {what}").finding([(ours[moment], theirs[moment]) for ours, theirs in runs], "MB")
        for moment, what in _MOMENTS.items()
    ]


def _as_arguments(settings: CTranslate2Settings) -> list[object]:
    return [settings.workers, settings.threads, settings.max_batch_size, settings.batch_type]


def _child(subject: Subject, side: str, folder: Path, arguments: Sequence[object]) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "antiphon.tools.bench.resident",
        side,
        str(folder),
        str(subject.max_new_tokens),
    ]
    ended = subprocess.run(
        [*command, *map(str, arguments)], input=json.dumps(subject.sources(ROWS)), stdout=subprocess.PIPE, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    if ended.returncode != 0:
        raise BenchFailure(f"memory: the {side} process failed; its error message is above")
    measured: dict[str, float] = json.loads(ended.stdout)
    return measured
