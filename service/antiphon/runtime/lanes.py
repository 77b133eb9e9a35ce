"""Opens the runners that serve a bundle: one for each lane, by the architecture of the model and by the device.

The lanes of a model share cache blocks and mapped weights, and each has threads of its own. The number of lanes is a
setting, or the one that decodes the most tokens in a short measurement on the model's own graphs. With one thread each,
lanes need no fork and join between operators; with several, a large model reads its weights less often.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import numpy as np

from antiphon.bundle.manifest import Bundle, Precision
from antiphon.ops.cuda.driver import CudaDevice
from antiphon.ops.sampling import greedy_sampling
from antiphon.runtime.cuda.runner import CudaEncoderRunner, CudaRunner
from antiphon.runtime.native import EncoderRunner, NativeRunner
from antiphon.runtime.runner import DecodeBatch, Runner
from antiphon.runtime.warm_up import warm_up

AnyRunner = NativeRunner | EncoderRunner | CudaRunner | CudaEncoderRunner


# Steps of one measurement, and measurements of which the best counts.
_NUM_STEPS = 12
_NUM_TRIES = 3
# More lanes must be faster by this factor: each one costs memory.
_LEAST_GAIN = 1.05
# More lanes than this would take turns at the interpreter, and each one costs memory.
_MOST_LANES = 8


def open_runner(
    bundle: Bundle,
    *,
    max_rows: int,
    threads: int,
    precision: Precision | None = None,
    num_blocks: int | None = None,
    workspace_limit_bytes: int | None = None,
    first: AnyRunner | None = None,
) -> AnyRunner:
    """Load the native graphs of a precision; None takes the precision that `Bundle.graph_set` prefers.

    max_rows: sequences that run together. threads: cores that one run may use. num_blocks: cache blocks; None is enough
    for max_rows of the longest sequences; encoder-only models have none. workspace_limit_bytes: maximum memory of ONNX
    Runtime besides weights. first: runner of the first lane of the same bundle, whose cache blocks this one shares.
    Raises GraphError, BundleError (no native graphs of this precision) or WorkspaceError.
    """
    if bundle.manifest.model.architecture == "encoder":
        return EncoderRunner(
            bundle,
            max_rows=max_rows,
            threads=threads,
            precision=precision,
            workspace_limit_bytes=workspace_limit_bytes,
        )
    return NativeRunner(
        bundle,
        max_rows=max_rows,
        threads=threads,
        precision=precision,
        num_blocks=num_blocks,
        workspace_limit_bytes=workspace_limit_bytes,
        cache=first.cache if isinstance(first, NativeRunner) else None,
    )


def open_cuda_runner(
    bundle: Bundle,
    device: CudaDevice,
    *,
    max_rows: int,
    precision: Precision | None = None,
    num_blocks: int | None = None,
    memory_limit_bytes: int | None = None,
) -> AnyRunner:
    """Load the cuda graphs of a precision on a device; None takes the precision that `Bundle.graph_set` prefers.

    num_blocks: None is enough for max_rows of the longest sequences, as far as the device has memory.
    memory_limit_bytes: maximum memory of ONNX Runtime for each graph, weights and workspace together. Other arguments
    as for `open_runner`.
    Raises GraphError, BundleError (no cuda graphs of this precision) or CudaError.
    """
    if bundle.manifest.model.architecture == "encoder":
        return CudaEncoderRunner(
            bundle, device, max_rows=max_rows, precision=precision, memory_limit_bytes=memory_limit_bytes
        )
    return CudaRunner(
        bundle,
        device,
        max_rows=max_rows,
        precision=precision,
        num_blocks=num_blocks,
        memory_limit_bytes=memory_limit_bytes,
    )


log = logging.getLogger(__name__)


def open_lanes(
    bundle: Bundle,
    *,
    num_lanes: int,
    max_rows: int,
    threads: int,
    precision: Precision | None = None,
    num_blocks: int | None = None,
    workspace_limit_bytes: int | None = None,
) -> tuple[AnyRunner, ...]:
    """Open one runner for each lane; threads and the limit of the workspace are divided among them.

    Every lane has rows for max_rows sequences, because a beam search may need all of them. Raises what open_runner
    raises, and ValueError if num_lanes is not from 1 to threads.
    """
    if not 1 <= num_lanes <= threads:
        raise ValueError(f"lanes is {num_lanes}; it must be 1 to {threads}, the number of threads")
    runners: list[AnyRunner] = []
    for lane in range(num_lanes):
        runners.append(
            open_runner(
                bundle,
                max_rows=max_rows,
                threads=threads // num_lanes + (lane < threads % num_lanes),
                precision=precision,
                num_blocks=num_blocks,
                workspace_limit_bytes=None if workspace_limit_bytes is None else workspace_limit_bytes // num_lanes,
                first=runners[0] if runners else None,
            )
        )
    return tuple(runners)


def possible_lanes(bundle: Bundle, threads: int) -> list[int]:
    """Return the numbers of lanes that divide the threads; an encoder-only model has one lane."""
    most = 1 if bundle.manifest.model.architecture == "encoder" else min(threads, _MOST_LANES)
    return [count for count in range(1, most + 1) if threads % count == 0]


def fastest_num_lanes(
    bundle: Bundle, candidates: Sequence[int], *, max_rows: int, threads: int, precision: Precision | None = None
) -> int:
    """Return the number of lanes that decodes max_rows rows fastest. Takes a second or two, unless there is no choice.

    candidates: rising.
    """
    if len(candidates) == 1:
        return candidates[0]
    best, best_rate = candidates[0], 0.0
    for num_lanes in candidates:
        runners = open_lanes(bundle, num_lanes=num_lanes, max_rows=max_rows, threads=threads, precision=precision)
        for runner in runners:
            warm_up(runner)
        rate = max(_rows_per_s(runners, max_rows) for _ in range(_NUM_TRIES))
        log.info("%d lanes of %d threads decode %.0f rows per second", num_lanes, threads // num_lanes, rate)
        if rate > best_rate * (_LEAST_GAIN if best_rate else 1.0):
            best, best_rate = num_lanes, rate
    return best


def _rows_per_s(runners: Sequence[Runner], num_rows: int) -> float:
    """Return the rows per second of all lanes together, each with its part of num_rows rows."""
    num_rows = max(len(runners), min(num_rows, runners[0].facts.num_blocks // 2))
    parts = np.array_split(np.arange(num_rows), len(runners))
    batches = [_batch(runner, part.astype(np.int32)) for runner, part in zip(runners, parts, strict=True)]
    start = threading.Barrier(len(runners) + 1)

    def decode(runner: Runner, batch: DecodeBatch) -> None:
        start.wait()
        for _ in range(_NUM_STEPS):
            runner.decode(batch)

    threads = [threading.Thread(target=decode, args=arguments) for arguments in zip(runners, batches, strict=True)]
    for thread in threads:
        thread.start()
    start.wait()
    begun_s = time.perf_counter()
    for thread in threads:
        thread.join()
    return num_rows * _NUM_STEPS / (time.perf_counter() - begun_s)


def _batch(runner: Runner, rows: np.ndarray[tuple[int], np.dtype[np.int32]]) -> DecodeBatch:
    """Return one step of rows that attend to a source of one token and to themselves, each in blocks of its own."""
    num_rows, samples = len(rows), np.arange(len(rows), dtype=np.int32)
    return DecodeBatch(
        token_ids=np.full(num_rows, runner.facts.bos_id, np.int64),
        positions=np.zeros(num_rows, np.int32),
        offsets=np.arange(num_rows + 1, dtype=np.int32),
        self_tables=2 * rows[:, None] + 1,
        cross_tables=2 * rows[:, None],
        source_lens=np.full(num_rows, int(runner.facts.has_encoder), np.int32),
        sampling=greedy_sampling(samples),
    )
