"""The sections of `antiphon bench`: what is compared with what. Each returns its findings and starts from nothing.

Runs of the two sides alternate and outputs are compared, so that neither a busy machine nor a wrong answer can pass
for speed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from antiphon.model.bundle import Bundle
from antiphon.model.tokenizer import Tokenizer
from antiphon.service.bench.offline import Offline
from antiphon.service.bench.report import BenchFailure, Finding, Speed, compare
from antiphon.service.bench.server import BenchServer, run_client
from antiphon.service.bench.sources import load_texts, tokenize
from antiphon.service.bench.static import translate_static
from antiphon.service.model_runner import ModelRunner

# Static batches, of `rows` each, that one run of the engine section is worth.
NUM_BATCHES = 12
GRPC_STREAMS = 64
GRPC_TEXTS = 512
# Everyday sentences end long before; a model of random weights never ends by itself.
MAX_NEW_TOKENS = 64

Targets = list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What every section works with. source: file of sentences; None takes the ones built in."""

    bundle: Bundle
    tokenizer: Tokenizer
    source: Path | None
    rows: int
    threads: int
    repeat: int

    @property
    def max_new_tokens(self) -> int:
        """Bound of every target."""
        return min(MAX_NEW_TOKENS, self.bundle.manifest.model.max_target_len)

    def texts(self, count: int) -> list[str]:
        """Sentences to translate."""
        return load_texts(self.source, count)

    def sources(self, texts: list[str]) -> list[list[int]]:
        """Source ids of sentences, end token included."""
        return tokenize(texts, self.tokenizer, self.bundle.manifest.model.max_source_len)

    def runner(self, rows: int) -> ModelRunner:
        """The bundle's graphs, warmed up."""
        runner = ModelRunner(self.bundle, max_rows=rows, threads=self.threads)
        runner.warm_up()
        return runner


def engine(setup: Setup) -> list[Finding]:
    """The engine, with everything waiting from the start, against static batches of as many rows."""
    runner, rows = setup.runner(setup.rows), setup.rows
    sources = setup.sources(setup.texts(NUM_BATCHES * rows))
    limit = setup.max_new_tokens
    targets = translate_static(runner, sources, rows=rows, max_new_tokens=limit, is_sorted=True)
    findings = _engine_against_static(runner, setup, "sentences", sources, limit)
    length = statistics.median_high(map(len, targets))
    # Sources that do not end before, so that a limit makes all targets equally long.
    lasting = [source for source, target in zip(sources, targets, strict=True) if len(target) >= length]
    repeated = (lasting * (len(sources) // len(lasting) + 1))[: len(sources)]
    return findings + _engine_against_static(runner, setup, f"{length} tokens each", repeated, length)


def _engine_against_static(
    runner: ModelRunner, setup: Setup, case: str, sources: Sequence[list[int]], max_new_tokens: int
) -> list[Finding]:
    def static(*, is_sorted: bool) -> Targets:
        return translate_static(runner, sources, rows=setup.rows, max_new_tokens=max_new_tokens, is_sorted=is_sorted)

    arriving, sorted_first = partial(static, is_sorted=False), partial(static, is_sorted=True)
    with Offline(runner, rows=setup.rows) as offline:
        ours = partial(offline.translate, sources, concurrency=len(sources), max_new_tokens=max_new_tokens)
        if not ours() == arriving() == sorted_first():
            raise BenchFailure(f"engine, {case}: the engine and the static batches disagree on tokens")
        runs = [(_timed(ours), _timed(arriving), _timed(sorted_first)) for _ in range(setup.repeat)]
    return [
        finding
        for side, against in ((1, "static batches as they arrive"), (2, "static batches sorted by length"))
        for finding in compare("engine", case, setup.rows, [(run[0], run[side]) for run in runs], against=against)
    ]


def grpc_overhead(setup: Setup) -> list[Finding]:
    """What a client gets over concurrent streams, against the engine alone with as many requests under way."""
    texts = setup.texts(GRPC_TEXTS)
    sources, limit = setup.sources(texts), setup.max_new_tokens
    pairs = []
    with (
        Offline(setup.runner(GRPC_STREAMS), rows=GRPC_STREAMS) as offline,
        BenchServer(setup.bundle.path, rows=GRPC_STREAMS, threads=setup.threads) as server,
    ):
        alone = partial(offline.translate, sources, concurrency=GRPC_STREAMS, max_new_tokens=limit)
        expected = [setup.tokenizer.decode(target) for target in alone()]
        run_client(server.target, texts, streams=GRPC_STREAMS, max_new_tokens=limit)
        for _ in range(setup.repeat):
            speed, answers = run_client(server.target, texts, streams=GRPC_STREAMS, max_new_tokens=limit)
            if answers != expected:
                raise BenchFailure("grpc_overhead: the client's texts differ from the engine's")
            pairs.append((speed, _timed(alone)))
    return compare("grpc_overhead", "sentences", GRPC_STREAMS, pairs, against="the engine alone")


def startup(setup: Setup) -> list[Finding]:
    """Seconds to the ready line, and memory resident then and after a load."""
    texts, limit = setup.texts(GRPC_TEXTS), setup.max_new_tokens
    ready_s = []
    for _ in range(setup.repeat):
        with BenchServer(setup.bundle.path, rows=GRPC_STREAMS, threads=setup.threads) as server:
            ready_s.append(server.ready_s)
            figures = [("ready", server.memory_mb("VmRSS"))]
            run_client(server.target, texts, streams=GRPC_STREAMS, max_new_tokens=limit)
            figures += [("after load", server.memory_mb("VmRSS")), ("at its peak", server.memory_mb("VmHWM"))]
    return [_figure("until ready", statistics.median(ready_s), "s")] + [
        _figure(f"resident {when}", megabytes, "MB") for when, megabytes in figures
    ]


def _figure(case: str, value: float, unit: str) -> Finding:
    return Finding(name="startup", case=case, rows=GRPC_STREAMS, antiphon=round(value, 3), unit=unit)


def _timed(translate: Callable[[], Targets]) -> Speed:
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    targets = translate()
    seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    return Speed(num_tokens=sum(map(len, targets)), seconds=seconds, cpu_s=cpu_s)


SECTIONS: dict[str, Callable[[Setup], list[Finding]]] = {
    "engine": engine,
    "grpc_overhead": grpc_overhead,
    "startup": startup,
}
