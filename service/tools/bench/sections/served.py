"""Sections without CTranslate2: `engine` against static batches, `grpc_overhead` against the engine, `startup`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

from antiphon.client import Source
from antiphon.client.many import DEFAULT_CONCURRENCY
from antiphon.service.runtime.runner import Runner
from antiphon.service.tools.bench.drivers.offline import Offline
from antiphon.service.tools.bench.drivers.static import translate_static
from antiphon.service.tools.bench.processes.server import BenchServer, run_client
from antiphon.service.tools.bench.report import BenchFailure, Case, Finding, Speed, compare
from antiphon.service.tools.bench.setup import Setup, Subject
from antiphon.service.tools.bench.sources import Ids
from antiphon.service.tools.bench.timing import alternate, timed

ENGINE_ROWS = (32,)
# Number of static batches in one run of the engine section; each has `rows` sources.
_NUM_BATCHES = 12
STREAMS = 64
# What a client does: the name of the case, and its requests at a time.
_WAYS = {
    "streams": (f"{STREAMS} streams", STREAMS),
    "unary": (f"{STREAMS} unary calls", STREAMS),
    "many": (f"one call, {DEFAULT_CONCURRENCY} requests", DEFAULT_CONCURRENCY),
}
_RANDOM_FILLS = 4


def engine(setup: Setup) -> list[Finding]:
    """Measure the engine, with all requests queued at the start, against static batches of the same number of rows."""
    findings = []
    for rows in setup.rows or ENGINE_ROWS:
        subject = setup.bundle_subject
        runner = setup.runner(subject, rows)
        sources, limit = subject.sources(_NUM_BATCHES * rows), subject.max_new_tokens
        targets = translate_static(runner, sources, rows=rows, max_new_tokens=limit, is_sorted=True)
        findings += _against_static(runner, setup, (rows, limit), "sentences", sources)
        length = statistics.median_high(map(len, targets))
        # Sources whose targets are at least `length` long: with that limit all targets have the same length.
        lasting = [source for source, target in zip(sources, targets, strict=True) if len(target) >= length]
        repeated = (lasting * (len(sources) // len(lasting) + 1))[: len(sources)]
        findings += _against_static(runner, setup, (rows, length), f"{length} tokens each", repeated)
    return findings


def _against_static(
    runner: Runner, setup: Setup, shape: tuple[int, int], case: str, sources: Sequence[Ids]
) -> list[Finding]:
    """Compare the engine with static batches. shape: number of rows, and maximum length of every target."""
    rows, limit = shape
    static = partial(translate_static, runner, sources, rows=rows, max_new_tokens=limit)
    arriving, sorted_first = partial(static, is_sorted=False), partial(static, is_sorted=True)
    with Offline(runner, rows=rows) as offline:
        ours = partial(offline.translate, sources, concurrency=len(sources), max_new_tokens=limit)
        if not ours() == arriving() == sorted_first():
            raise BenchFailure(f"engine, {case}: the engine and the static batches disagree on tokens")
        runs = [(timed(ours), timed(arriving), timed(sorted_first)) for _ in range(setup.repeat)]
    return [
        finding
        for side, against in ((1, "static batches as they arrive"), (2, "static batches sorted by length"))
        for finding in compare(
            Case(name="engine", case=case, rows=rows, against=against), [(run[0], run[side]) for run in runs]
        )
    ]


def grpc_overhead(setup: Setup) -> list[Finding]:
    """Measure a client against the engine alone with the same number of requests at a time."""
    return [found for subject in setup.subjects() for found in _over_grpc(subject, setup)]


def _over_grpc(subject: Subject, setup: Setup) -> list[Finding]:
    """Measure one model. The client sends texts, or ids for random models, from its own process on the same cores."""
    limit = subject.max_new_tokens
    sources = subject.sources(_RANDOM_FILLS * STREAMS if subject.is_endless else setup.num_sentences)
    asked: Sequence[Source] = sources if subject.is_endless else subject.texts(setup.num_sentences)
    with (
        Offline(*setup.runners(subject, STREAMS), rows=STREAMS) as offline,
        BenchServer(subject.bundle.path, rows=STREAMS, threads=setup.threads) as server,
    ):
        findings = []
        for kind, (name, concurrency) in _WAYS.items():
            alone = partial(offline.translate, sources, concurrency=concurrency, max_new_tokens=limit)
            ask = partial(run_client, server.target, asked, kind=kind, concurrency=concurrency, max_new_tokens=limit)
            expected = [subject.tokenizer.decode(target) for target in alone()]
            if ask()[1] != expected:
                raise BenchFailure(f"grpc_overhead, {subject.name}, {name}: texts differ from the engine's")
            pairs = alternate(partial(_speed, ask), partial(timed, alone), setup.repeat)
            case = Case(name="grpc_overhead", case=f"{subject.name}, {name}", rows=STREAMS, against="the engine alone")
            findings += compare(case, pairs)
    return findings


def _speed(ask: Callable[[], tuple[Speed, list[str]]]) -> Speed:
    return ask()[0]


def startup(setup: Setup) -> list[Finding]:
    """Measure seconds to the ready line, and resident memory at that time, after load and at its peak."""
    subject = setup.bundle_subject
    texts, limit = subject.texts(setup.num_sentences), subject.max_new_tokens
    ready_s = []
    for _ in range(setup.repeat):
        with BenchServer(subject.bundle.path, rows=STREAMS, threads=setup.threads) as server:
            ready_s.append(server.ready_s)
            figures = [("ready", server.memory_mb("VmRSS"))]
            run_client(server.target, texts, concurrency=STREAMS, max_new_tokens=limit)
            figures += [("after load", server.memory_mb("VmRSS")), ("at its peak", server.memory_mb("VmHWM"))]
    return [_figure("until ready", statistics.median(ready_s), "s")] + [
        _figure(f"resident {when}", megabytes, "MB") for when, megabytes in figures
    ]


def _figure(case: str, value: float, unit: str) -> Finding:
    return Finding(name="startup", case=case, rows=STREAMS, antiphon=round(value, 3), unit=unit)
