"""Sections with a server: `grpc_overhead` against the engine, `clients` against CTranslate2, and others alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from antiphon.client import Source
from antiphon.client.many import DEFAULT_CONCURRENCY
from antiphon.tools.bench.corpus import Ids
from antiphon.tools.bench.ctranslate2 import CTranslate2Reference, prompts_of
from antiphon.tools.bench.processes import BenchServer, ClientRun, EchoServer, Served, StagedServer, run_client
from antiphon.tools.bench.report import BenchFailure, Case, Finding, Speed, alternate, compare, timed
from antiphon.tools.bench.setup import Setup, Subject
from antiphon.tools.bench.throughput import settings_for
from antiphon.tools.offline import Offline

STREAMS = 64
_RANDOM_FILLS = 4


@dataclass(frozen=True, slots=True)
class Way:
    """Work of a client: a kind of `client.py`, the name of the case, and the requests at a time."""

    kind: str
    name: str
    concurrency: int

    def run(self, server: Served, sources: Sequence[Source], max_new_tokens: int) -> tuple[ClientRun, float]:
        """Send all sources to a server. Return the run, and microseconds of the server's event loop a request."""
        before_s = server.loop_cpu_s
        run = run_client(
            server.target, sources, kind=self.kind, concurrency=self.concurrency, max_new_tokens=max_new_tokens
        )
        return run, (server.loop_cpu_s - before_s) / len(sources) * 1e6

    def speed(self, server: Served, sources: Sequence[Source], max_new_tokens: int) -> Speed:
        """Return the speed of answering all sources."""
        return self.run(server, sources, max_new_tokens)[0].speed


_UNARY = Way("unary", f"{STREAMS} unary calls", STREAMS)
_MANY = Way("many", f"one call, {DEFAULT_CONCURRENCY} requests", DEFAULT_CONCURRENCY)
WAYS = (Way("streams", f"{STREAMS} streams", STREAMS), _UNARY, _MANY)


def grpc_overhead(setup: Setup) -> list[Finding]:
    """Measure a client against the engine alone with the same number of requests at a time."""
    return [finding for subject in setup.subjects() for finding in _over_grpc(subject, setup)]


def _over_grpc(subject: Subject, setup: Setup) -> list[Finding]:
    """Measure one model. The client sends texts, or ids for random models, from its own process on the same cores."""
    with Offline(*setup.runners(subject, STREAMS), rows=STREAMS) as offline, EchoServer() as echo:
        return [
            finding
            for server, name in _servers(subject, setup)
            for way in WAYS
            for finding in _by_way(subject, setup, (offline, server, echo), way, name)
        ]


def _servers(subject: Subject, setup: Setup) -> Iterator[tuple[BenchServer, str]]:
    """Yield a server of one process, and then one with a worker for each thread."""
    for workers in dict.fromkeys((1, setup.threads)):
        with BenchServer(subject.bundle.path, rows=STREAMS, threads=setup.threads, workers=workers) as server:
            yield server, f"{workers} worker{'s' if workers > 1 else ''}"


def _by_way(
    subject: Subject, setup: Setup, sides: tuple[Offline, BenchServer, EchoServer], way: Way, name: str
) -> list[Finding]:
    offline, server, echo = sides
    limit = subject.max_new_tokens
    sources, messages = _work_of(subject, setup)
    alone = partial(offline.translate, sources, concurrency=way.concurrency, max_new_tokens=limit)
    expected = [subject.tokenizer.decode(target) for target in alone()]
    if way.run(server, messages, limit)[0].texts != expected:
        raise BenchFailure(f"grpc_overhead, {subject.name}, {way.name}: texts differ from the engine's")
    pairs = alternate(partial(way.run, server, messages, limit), partial(timed, alone), setup.repeat)
    case = f"{subject.name}, {way.name}, {name}"
    by_engine = Case(name="grpc_overhead", case=case, rows=STREAMS, against="the engine alone")
    on_loop = replace(by_engine, case=f"{case}, event loop", against="a bare echo of a unary call")
    loops = [(loop_us, _UNARY.run(echo, messages, limit)[1]) for (_, loop_us), _ in pairs]
    return [
        *compare(by_engine, [(run.speed, theirs) for (run, _), theirs in pairs]),
        on_loop.finding(loops, "us of CPU a request"),
    ]


def _work_of(subject: Subject, setup: Setup) -> tuple[list[Ids], Sequence[Source]]:
    """Return the sources as ids, and as a client sends them."""
    sources = subject.sources(_RANDOM_FILLS * STREAMS if subject.is_endless else setup.num_sentences)
    return sources, sources if subject.is_endless else subject.texts(setup.num_sentences)


def clients(setup: Setup) -> list[Finding]:
    """Measure a client with one call against CTranslate2 in a process of its own: no network, no other client."""
    findings = []
    for subject in setup.with_ctranslate2():
        limit = subject.max_new_tokens
        sources, messages = _work_of(subject, setup)
        reference = CTranslate2Reference(subject.ctranslate2_folder)
        settings = settings_for(subject, reference, STREAMS, setup.threads)
        theirs = partial(reference.translate, prompts_of(sources), settings, limit)
        for server, name in _servers(subject, setup):
            many = partial(_MANY.speed, server, messages, limit)
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


def stages(setup: Setup) -> list[Finding]:
    """Measure microseconds of the event loop for each request, by stage and way, beside a bare echo of a unary call.

    The rest is gRPC, tasks, and answers of the engine. Measuring takes some 5 us a request.
    """
    subject = setup.bundle_subject
    _, messages = _work_of(subject, setup)
    findings = []
    with EchoServer() as echo, StagedServer(subject.bundle.path, rows=STREAMS, threads=setup.threads) as server:
        _, echo_us = _UNARY.run(echo, messages, subject.max_new_tokens)
        for way in WAYS:
            way.run(server, messages, subject.max_new_tokens)  # not measured
            before, all_before_s = server.seconds()
            way.run(server, messages, subject.max_new_tokens)
            after, all_after_s = server.seconds()
            us = {stage: 1e6 * (after[stage] - before[stage]) / len(messages) for stage in after}
            if missing := [stage for stage, value in us.items() if not value]:
                raise BenchFailure(f"stages, {way.name}: the server did nothing in the stages {', '.join(missing)}")
            all_us = 1e6 * (all_after_s - all_before_s) / len(messages)
            us["grpc.aio, tasks, answers of the engine"] = all_us - sum(us.values())
            case = Case(name="stages", case=f"{way.name}, all", rows=STREAMS, against="a bare echo of a unary call")
            findings += [
                _figure("stages", f"{way.name}, {stage}", value, "us of CPU a request") for stage, value in us.items()
            ]
            findings.append(case.finding([(all_us, echo_us)], "us of CPU a request"))
    return findings


def one_user(setup: Setup) -> list[Finding]:
    """Measure the streams of one user, one after another, on an idle server: seen by a client on the same cores."""
    return [finding for subject in setup.subjects() for finding in _of_one_user(subject, setup)]


def _of_one_user(subject: Subject, setup: Setup) -> list[Finding]:
    _, messages = _work_of(subject, setup)
    limit = subject.max_new_tokens
    with BenchServer(subject.bundle.path, rows=STREAMS, threads=setup.threads) as server:
        run = run_client(server.target, messages, concurrency=1, max_new_tokens=limit)
    figures = {"first token": run.first_s, "whole answer": run.total_s}
    return [
        Finding(
            name="one_user",
            case=f"{subject.name}, {what}, p{percent}",
            rows=1,
            antiphon=round(1e3 * float(np.percentile(seconds, percent)), 3),
            unit="ms",
        )
        for what, seconds in figures.items()
        for percent in (50, 99)
    ]


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
    return [_figure("startup", "until ready", statistics.median(ready_s), "s")] + [
        _figure("startup", f"resident {when}", megabytes, "MB") for when, megabytes in figures
    ]


def _figure(name: str, case: str, value: float, unit: str) -> Finding:
    return Finding(name=name, case=case, rows=STREAMS, antiphon=round(value, 3), unit=unit)
