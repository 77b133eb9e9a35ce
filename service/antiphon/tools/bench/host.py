"""Section `host`: CPU time that the engine itself takes, for each request and for each step.

The runner computes nothing. Runs with short and with long targets, and the same number of requests, differ in the
number of steps only: two equations give the time of a request and the time of a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.heads import Task as HeadTask
from antiphon.ops.cache_geometry import BLOCK_SIZE
from antiphon.runtime.runner import DecodeBatch, EncodeReport, ModelFacts, Samples
from antiphon.tools.bench.report import Finding
from antiphon.tools.bench.setup import Setup
from antiphon.tools.offline import Offline

ROWS = 64
BEAM_WIDTH = 4
_FIRST_WORD_ID = 4
_SOURCE = [*range(4, 13), 2]
_TARGET_LENS = (8, 40)
_REQUESTS_PER_ROW = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTime:
    """CPU seconds of the engine's thread, and of the event loop, in one run over `num_requests` requests."""

    num_requests: int
    num_steps: int
    engine_s: float
    loop_s: float


def host(setup: Setup) -> list[Finding]:
    """Measure greedy requests and beam searches, independent of any model."""
    findings = []
    for rows in setup.rows or (ROWS,):
        for width in (1, BEAM_WIDTH):
            if width <= rows:
                findings += _of(rows, width, setup.repeat)
    return findings


def _of(rows: int, beam_width: int, num_runs: int) -> list[Finding]:
    kind = "greedy" if beam_width == 1 else f"beams of {beam_width}"
    measure(rows, beam_width, _TARGET_LENS[0])  # not measured: the first run imports and allocates
    short_runs, long_runs = (
        [measure(rows, beam_width, target_len) for _ in range(num_runs)] for target_len in _TARGET_LENS
    )
    costs = [split(*pair) for pair in zip(short_runs, long_runs, strict=True)]
    loops = [1e6 * run.loop_s / run.num_requests for run in short_runs]
    figures = {
        "engine's thread, a request": [request for request, _ in costs],
        "engine's thread, a step": [step for _, step in costs],
        "event loop, a request": loops,
    }
    return [
        Finding(
            name="host",
            case=f"{kind}, {what}",
            rows=rows,
            antiphon=round(statistics.median(values), 1),
            unit="us of CPU",
        )
        for what, values in figures.items()
    ]


def split(short: HostTime, long: HostTime) -> tuple[float, float]:
    """Return microseconds of the engine's thread for each request, and for each step, from two runs.

    The runs have equally many requests and different numbers of steps.
    """
    step_s = (long.engine_s - short.engine_s) / (long.num_steps - short.num_steps)
    request_s = (short.engine_s - short.num_steps * step_s) / short.num_requests
    return 1e6 * request_s, 1e6 * step_s


def measure(rows: int, beam_width: int, target_len: int) -> HostTime:
    """Run requests of one kind through an engine whose runner computes nothing."""
    runner = NullRunner(rows, target_len)
    sources = [_SOURCE] * (_REQUESTS_PER_ROW * rows // beam_width)
    with Offline(runner, rows=rows) as offline:
        started_s = time.thread_time()
        offline.translate(sources, concurrency=2 * rows, max_new_tokens=target_len + 1, beam_width=beam_width)
        loop_s = time.thread_time() - started_s
    return HostTime(num_requests=len(sources), num_steps=runner.num_steps, engine_s=runner.thread_s, loop_s=loop_s)


class NullRunner:
    """Fulfils `runner.Runner` for an encoder-decoder whose every target has `target_len` tokens, end token included.

    num_steps: decoder steps so far. thread_s: CPU seconds of the thread that called `decode`, at the last call.
    """

    def __init__(self, max_rows: int, target_len: int) -> None:
        self.facts = ModelFacts(
            max_rows=max_rows,
            vocab_size=8000,
            source_vocab_size=8000,
            max_source_len=256,
            max_target_len=256,
            has_encoder=True,
            has_decoder=True,
            bos_id=1,
            eos_id=2,
            num_blocks=2 * max_rows * (256 + 256) // BLOCK_SIZE,
            cache_bytes_per_token=1,
        )
        self.num_steps = 0
        self.thread_s = 0.0
        self._last = target_len - 1

    def encode(
        self,
        sources: Sequence[Sequence[int]],
        block_tables: Sequence[Sequence[int]],
        *,
        type_ids: Sequence[Sequence[int]] = (),
        keep_memory: bool = False,
    ) -> EncodeReport:
        """Return a report without measurements."""
        lengths = [len(source) for source in sources]
        return EncodeReport(
            rows=len(sources),
            num_tokens=sum(lengths),
            longest=max(lengths),
            peak_workspace_bytes=None,
            predicted_fused_bytes=None,
            predicted_materialised_bytes=0,
        )

    def run_head(self, task: HeadTask, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Never called: there are no heads."""
        raise NotImplementedError

    def decode(self, batch: DecodeBatch) -> Samples:
        """Return the end token for rows at their last position, else the same word for every row.

        The candidates of a row are successive ids; the end token is the first one at the last position.
        """
        self.num_steps, self.thread_s = self.num_steps + 1, time.thread_time()
        is_last = batch.positions >= self._last
        width = batch.max_num_logprobs
        top_ids = np.tile(_FIRST_WORD_ID + np.arange(width), (batch.num_rows, 1))
        if width:
            top_ids[is_last, 0] = self.facts.eos_id
        scores = np.tile(-np.arange(1, width + 1, dtype=np.float32), (batch.num_rows, 1))
        token_ids = np.where(is_last, self.facts.eos_id, _FIRST_WORD_ID).astype(np.int64)
        return Samples(token_ids, np.zeros(batch.num_rows, np.float32), top_ids, scores, scores)

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Do nothing: blocks have no content."""

    def free_cache(self) -> None:
        """Do nothing: blocks have no content."""
