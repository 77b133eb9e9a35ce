"""Sections with a server: `grpc_overhead` against the engine, `clients` against CTranslate2, `startup`.

`engine` has none: it measures the engine against static batches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from antiphon.client import Source
from antiphon.client.many import DEFAULT_CONCURRENCY
from antiphon.runtime.runner import Runner
from antiphon.tools.bench.ctranslate2.reference import CTranslate2Reference, prompts_of
from antiphon.tools.bench.drivers.static import translate_static
from antiphon.tools.bench.processes.server import BenchServer, EchoServer, Served, run_client
from antiphon.tools.bench.report import BenchFailure, Case, Finding, Speed, compare
from antiphon.tools.bench.sections.decode import settings_for
from antiphon.tools.bench.setup import Setup, Subject
from antiphon.tools.bench.sources import Ids
from antiphon.tools.bench.timing import alternate, timed
from antiphon.tools.offline import Offline

ENGINE_ROWS = (32,)
# Number of static batches in one run of the engine section; each has `rows` sources.
_NUM_BATCHES = 12
STREAMS = 64
_RANDOM_FILLS = 4


@dataclass(frozen=True, slots=True)
class _Asking:
    """Result of one client. loop_us: CPU time of the server's event loop for each request."""

    speed: Speed
    texts: list[str]
    loop_us: float


@dataclass(frozen=True, slots=True)
class Way:
    """Work of a client: a kind of `client.py`, the name of the case, and the requests at a time."""

    kind: str
    name: str
    concurrency: int

    def ask(self, server: Served, asked: Sequence[Source], max_new_tokens: int) -> _Asking:
        """Ask a server for all sources."""
        before_s = server.loop_cpu_s
        speed, texts = run_client(
            server.target, asked, kind=self.kind, concurrency=self.concurrency, max_new_tokens=max_new_tokens
        )
        return _Asking(speed, texts, (server.loop_cpu_s - before_s) / len(asked) * 1e6)

    def speed(self, server: Served, asked: Sequence[Source], max_new_tokens: int) -> Speed:
        """Return the speed of asking a server for all sources."""
        return self.ask(server, asked, max_new_tokens).speed


_ECHOED = Way("unary", f"{STREAMS} unary calls", STREAMS)
_MANY = Way("many", f"one call, {DEFAULT_CONCURRENCY} requests", DEFAULT_CONCURRENCY)
WAYS = (Way("streams", f"{STREAMS} streams", STREAMS), _ECHOED, _MANY)


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
    with Offline(*setup.runners(subject, STREAMS), rows=STREAMS) as offline, EchoServer() as echo:
        return [
            found
            for server, name in _servers(subject, setup)
            for way in WAYS
            for found in _in_one_way(subject, setup, (offline, server, echo), way, name)
        ]


def _servers(subject: Subject, setup: Setup) -> Iterator[tuple[BenchServer, str]]:
    """Yield a server of one process, and then one with a worker for each thread."""
    for workers in dict.fromkeys((1, setup.threads)):
        with BenchServer(subject.bundle.path, rows=STREAMS, threads=setup.threads, workers=workers) as server:
            yield server, f"{workers} worker{'s' if workers > 1 else ''}"


def _in_one_way(
    subject: Subject, setup: Setup, sides: tuple[Offline, BenchServer, EchoServer], way: Way, name: str
) -> list[Finding]:
    offline, server, echo = sides
    limit = subject.max_new_tokens
    sources, asked = work_of(subject, setup)
    alone = partial(offline.translate, sources, concurrency=way.concurrency, max_new_tokens=limit)
    expected = [subject.tokenizer.decode(target) for target in alone()]
    if way.ask(server, asked, limit).texts != expected:
        raise BenchFailure(f"grpc_overhead, {subject.name}, {way.name}: texts differ from the engine's")
    pairs = alternate(partial(way.ask, server, asked, limit), partial(timed, alone), setup.repeat)
    case = f"{subject.name}, {way.name}, {name}"
    by_engine = Case(name="grpc_overhead", case=case, rows=STREAMS, against="the engine alone")
    on_loop = replace(by_engine, case=f"{case}, event loop", against="a bare echo of a unary call")
    loops = [(asking.loop_us, _ECHOED.ask(echo, asked, limit).loop_us) for asking, _ in pairs]
    return [
        *compare(by_engine, [(asking.speed, theirs) for asking, theirs in pairs]),
        on_loop.finding(loops, "us of CPU a request"),
    ]


def work_of(subject: Subject, setup: Setup) -> tuple[list[Ids], Sequence[Source]]:
    """Return the sources as ids, and as a client sends them."""
    sources = subject.sources(_RANDOM_FILLS * STREAMS if subject.is_endless else setup.num_sentences)
    return sources, sources if subject.is_endless else subject.texts(setup.num_sentences)


def clients(setup: Setup) -> list[Finding]:
    """Measure a client with one call against CTranslate2 in a process of its own: no network, no other client."""
    findings = []
    for subject in setup.with_ctranslate2():
        limit = subject.max_new_tokens
        sources, asked = work_of(subject, setup)
        reference = CTranslate2Reference(subject.ctranslate2_folder)
        settings = settings_for(subject, reference, STREAMS, setup.threads)
        theirs = partial(reference.translate, prompts_of(sources), settings, limit)
        for server, name in _servers(subject, setup):
            many = partial(_MANY.speed, server, asked, limit)
            many()
            pairs = alternate(many, partial(_speed_of, theirs), setup.repeat)
            case = f"{subject.name}, {_MANY.name}, {name}"
            against = f"{settings}, in process"
            findings += compare(
                Case(name="clients", case=case, rows=STREAMS, against=against, is_ctranslate2=True), pairs
            )
    return findings


def _speed_of(translate: Callable[[], tuple[Speed, object]]) -> Speed:
    return translate()[0]


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
