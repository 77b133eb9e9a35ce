"""Figures of the machine's processor: Antiphon by lanes and by workers, beside CTranslate2 on all cores."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from antiphon.bundle.manifest import load_bundle
from antiphon.client.many import DEFAULT_CONCURRENCY
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.tools.bench.corpus import everyday
from antiphon.tools.bench.gpu.reports import Figure
from antiphon.tools.bench.processes import BenchServer, run_client
from antiphon.tools.bench.report import Finding, machine
from antiphon.tools.bench.setup import Setup, Subject
from antiphon.tools.bench.throughput import decode, growth_of, num_requests

_REPEAT = 2


def measure_cpu(
    work: Path, *, preset: str, rows: int, threads: int, models: Sequence[str] = ("bundle", "random")
) -> Iterator[Figure]:
    """Yield tokens per second of the shipped bundle, and then of a random model of a preset's size.

    Of each, CTranslate2 beside Antiphon comes first, then lanes, then workers. models: which of the two. work: folder
    that keeps the random model and those of CTranslate2. What is not installed is a figure {"missing": reason}.
    """
    has_torch, has_ctranslate2 = (importlib.util.find_spec(name) is not None for name in ("torch", "ctranslate2"))
    yield {"machine": machine(threads)}
    if not (has_torch and has_ctranslate2):
        yield {"missing": "the package ctranslate2, or torch, which converts models for it"}
    for model in models:
        if model == "random" and not has_torch:
            yield {"missing": "the package torch, which makes the random model"}
            continue
        setup = Setup(
            bundle=load_bundle(SHIPPED_BUNDLE), corpus=everyday(), models=(model,), work=work.absolute(), preset=preset,
            rows=(rows,), threads=threads, repeat=_REPEAT,
        )  # fmt: skip
        if has_torch and has_ctranslate2:
            yield from map(asdict, decode(setup))
        for subject in setup.subjects():
            yield from map(asdict, _by_lanes(subject, setup, rows))
            yield from map(asdict, _by_workers(subject, setup, rows))


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4 and so on, up to a limit."""
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]


def _by_lanes(subject: Subject, setup: Setup, rows: int) -> Iterator[Finding]:
    for lanes in powers_of_two(min(setup.threads, rows)):
        yield growth_of(subject, rows, replace(setup, lanes=lanes))


def _by_workers(subject: Subject, setup: Setup, rows: int) -> Iterator[Finding]:
    """Measure a client with one GenerateMany call, which has a process of its own on the same cores."""
    count = num_requests(subject, rows)
    messages = subject.sources(count) if subject.is_endless else subject.texts(count)
    for workers in powers_of_two(setup.threads):
        with BenchServer(subject.bundle.path, rows=rows, threads=setup.threads, workers=workers) as server:
            speeds = []
            for _ in range(1 + _REPEAT):  # the first run is not measured
                run = run_client(
                    server.target, messages, kind="many", concurrency=DEFAULT_CONCURRENCY,
                    max_new_tokens=subject.max_new_tokens,
                )  # fmt: skip
                speeds.append(run.speed.num_tokens / run.speed.seconds)
        case = f"{subject.name}, {workers} workers with {setup.threads // workers} threads each"
        yield Finding(name="workers", case=case, rows=rows, antiphon=round(max(speeds[1:]), 1), unit="tokens/s")
