"""Section `graphs`: encoder passes and decoder steps without the engine, beside the bound of their products.

The bound of a run is the longer of two times, each with all threads: its multiply-adds at the rate of a bare loop on
registers, and its weights read once. Attention, norms, quantisation and the choice of tokens are not part of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from antiphon.architecture.config import ModelConfig
from antiphon.tools.bench.kernel_runs import PORTABLE, KernelRun, active_kernels, bare_run, read_run
from antiphon.tools.bench.kernels import LEAST_S, TIMES
from antiphon.tools.bench.report import Case, Finding
from antiphon.tools.bench.setup import Setup, Subject
from antiphon.tools.bench.static import StaticBatch

ROWS = (1, 8, 64)
# Position of the tokens of a step: the middle of a random target, and of a typical sentence.
_RANDOM_POSITION, _POSITION = 32, 8
_LEAST_RUNS, _LEAST_RUN_S = 5, 0.2


@dataclass(frozen=True, slots=True)
class Work:
    """Multiply-adds of all products for one token of the source or of the target, each with a weight of one byte."""

    source: int
    target: int

    @classmethod
    def of(cls, model: ModelConfig) -> Work:
        """Count the weights of an encoder-decoder with attention in every layer."""
        width = model.d_model
        attention = 4 * width * model.attention_width
        feed_forward = width * model.d_ff * (3 if model.gated else 2)
        cross_keys = 2 * width * model.attention_width  # and values of the source, at the end of the encoder
        return cls(
            source=model.encoder_layers * (attention + feed_forward) + model.decoder_layers * cross_keys,
            target=model.decoder_layers * (2 * attention - cross_keys + feed_forward) + width * model.vocab_size,
        )


def graphs(setup: Setup) -> list[Finding]:
    """Measure encoder-decoders in int8 at every number of rows. Other models, and portable kernels, have no bound."""
    name = active_kernels()
    subjects = [] if name == PORTABLE else [subject for subject in setup.subjects() if _has_bound(subject)]
    return [
        finding for subject in subjects for rows in setup.rows or ROWS for finding in _of(subject, rows, name, setup)
    ]


def _has_bound(subject: Subject) -> bool:
    model, precision = subject.bundle.manifest.model, subject.bundle.graph_set().precision
    is_regular = model.architecture == "encoder-decoder" and model.decoder_self == "attention"
    return is_regular and model.module_heads is None and precision == "int8"


def _of(subject: Subject, rows: int, kernels: str, setup: Setup) -> list[Finding]:
    runner, sources = setup.runner(subject, rows), subject.sources(rows)
    batch = StaticBatch(runner, sources, subject.max_new_tokens)
    position = _RANDOM_POSITION if subject.is_endless else _POSITION
    token_ids = np.full(rows, runner.facts.bos_id, np.int64)
    batch.encode()
    for earlier in range(position):
        batch.step(token_ids, earlier)
    step = batch.input(token_ids, position)
    work, num_tokens = Work.of(subject.bundle.manifest.model), sum(map(len, sources))
    runs: dict[str, tuple[Callable[[], object], int, int]] = {
        f"encoder, {num_tokens} tokens": (batch.encode, work.source, num_tokens),
        f"decoder step at {position}": (lambda: runner.decode(step), work.target, rows),
    }
    findings = []
    with bare_run(kernels) as bare:
        for part, (run, num_weights, tokens) in runs.items():
            with read_run(kernels, num_weights) as read:
                pairs = [
                    (_median_us(run), _bound_us(bare, read, num_weights, tokens) / setup.threads)
                    for _ in range(setup.repeat)
                ]
            case = Case(
                name="graphs", case=f"{subject.name}, {part}", rows=rows, against=f"bound, {setup.threads} threads"
            )
            findings.append(case.finding(pairs, "us"))
    return findings


def _bound_us(bare: KernelRun, read: KernelRun, num_weights: int, tokens: int) -> float:
    """Return the bound of a run on one thread."""
    multiply_s = num_weights * tokens / (bare.work / min(bare.seconds(LEAST_S) for _ in range(TIMES)))
    return 1e6 * max(multiply_s, min(read.seconds(LEAST_S) for _ in range(TIMES)))


def _median_us(run: Callable[[], object]) -> float:
    times: list[float] = []
    while len(times) < _LEAST_RUNS or sum(times) < _LEAST_RUN_S:
        started_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_s)
    return 1e6 * statistics.median(times)
