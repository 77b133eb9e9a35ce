"""Results from the encoder output: one vector, scores of labels, or tokens for masked positions.

The numbers of a request depend only on its own rows, so they are the same bits in every batch.

Axes: S tokens of a source, N of all sources, M width of the states, K states read, O outputs of a head, k proposals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.heads import Pooling as HeadPooling
from antiphon.architecture.heads import Task as HeadTask
from antiphon.domain.request import EncoderOutputs, Pooling, Request, Task
from antiphon.ops.readout import finished, normalized, pool, scores_of
from antiphon.runtime.runner import Runner

# Maximum number of a head's outputs in memory at once: a vocabulary is large, and a text may consist of masks only.
_MAX_OUTPUTS = 1 << 22

# The model's own pooling head has one output, that of the first token.
_POOLINGS: dict[Pooling, HeadPooling] = {
    Pooling.MEAN: "mean",
    Pooling.MAX: "max",
    Pooling.FIRST: "cls",
    Pooling.MODEL: "cls",
}

_Place = tuple[Request, int]
"""A request, and a row of the encoder output that its head reads."""


def read_out(requests: Sequence[Request], memory: NDArray[np.float32], runner: Runner) -> dict[str, EncoderOutputs]:
    """Return the results of requests without a target, by request id.

    memory [N, M]: the encoder output of every request's source, one after the other.
    Raises ValueError if a head's outputs are not finite, and the errors of the runner.
    """
    results: dict[str, EncoderOutputs] = {}
    places: dict[HeadTask, list[_Place]] = {}
    declared: list[tuple[Request, NDArray[np.float64]]] = []
    first = 0
    for request in requests:
        end = first + len(request.source_ids)
        if request.head is not None:
            places.setdefault(request.head, []).extend((request, first + pick) for pick in request.head_positions)
        elif request.pooling is Pooling.DECLARED and runner.facts.embedding is not None:
            declared.append((request, pool(memory[first:end], runner.facts.embedding.poolings)))
        elif request.task is Task.EMBED:
            results[request.request_id] = _vector(memory[first:end], request)
        first = end
    results |= _embed(declared, runner)
    for task, of_task in places.items():
        results |= _read_head(task, of_task, memory, runner)
    return results


def top_of(scores: NDArray[np.float64], count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return indices and scores [K, count] of each row's best, best first; of equal ones the lower index first."""
    count = min(count, scores.shape[1])
    ids = np.sort(np.argpartition(-scores, count - 1, axis=1)[:, :count], axis=1)
    order = np.argsort(-np.take_along_axis(scores, ids, axis=1), axis=1, kind="stable")
    ids = np.take_along_axis(ids, order, axis=1)
    return ids, np.take_along_axis(scores, ids, axis=1)


def _vector(states: NDArray[np.float32], request: Request) -> EncoderOutputs:
    """Return states [S, M] as the vectors that an Embed asks for: [M], or [S, M] without pooling."""
    pooling = _POOLINGS.get(request.pooling)
    values = states.astype(np.float64) if pooling is None else pool(states, (pooling,))
    return EncoderOutputs((normalized(values) if request.normalize else values).astype(np.float32))


def _embed(pooled: Sequence[tuple[Request, NDArray[np.float64]]], runner: Runner) -> dict[str, EncoderOutputs]:
    """Return the declared embeddings of requests, each given with the poolings of its states, by request id."""
    if not pooled or runner.facts.embedding is None:
        return {}
    vectors = np.stack([vector for _, vector in pooled])
    if "embed" in runner.facts.heads:
        vectors = _finite("embed", runner.run_head("embed", vectors.astype(np.float32))).astype(np.float64)
    results: dict[str, EncoderOutputs] = {}
    for (request, _), vector in zip(pooled, vectors, strict=True):
        values = finished(vector, runner.facts.embedding)
        results[request.request_id] = EncoderOutputs(
            (normalized(values) if request.normalize else values).astype(np.float32)
        )
    return results


def _finite(task: HeadTask, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the outputs of a head. Raises ValueError if one is not finite."""
    if not np.isfinite(outputs).all():
        raise ValueError(f"outputs of the {task} head are not finite")
    return outputs


def _read_head(
    task: HeadTask, places: Sequence[_Place], memory: NDArray[np.float32], runner: Runner
) -> dict[str, EncoderOutputs]:
    parts: dict[str, list[EncoderOutputs]] = {}
    for chosen in _passes(places, runner.facts.vocab_size):
        outputs = _finite(task, runner.run_head(task, memory[[row for _, row in chosen]]))
        for request, rows in _by_request(chosen):
            part = _reduced(request, outputs[rows], runner)
            parts.setdefault(request.request_id, []).append(part)
    return {request_id: _joined(of_request) for request_id, of_request in parts.items()}


def _passes(places: Sequence[_Place], width: int) -> Iterator[Sequence[_Place]]:
    """Yield the places of each forward pass of a head. The size of a pass is bounded."""
    count = max(1, _MAX_OUTPUTS // width)
    for start in range(0, len(places), count):
        yield places[start : start + count]


def _by_request(places: Sequence[_Place]) -> Iterator[tuple[Request, slice]]:
    """Yield each request with its rows of a pass's outputs. The rows of a request are consecutive."""
    first = 0
    for index, (request, _) in enumerate(places, 1):
        if index == len(places) or places[index][0] is not request:
            yield request, slice(first, index)
            first = index


def _reduced(request: Request, outputs: NDArray[np.float32], runner: Runner) -> EncoderOutputs:
    """Return one request's result from a head's outputs [K, O]."""
    assert request.head is not None
    if request.task is Task.EMBED:
        return _vector(outputs, request)
    scores = scores_of(outputs, runner.facts.heads[request.head].scores)
    if request.task is not Task.FILL_MASK:
        return EncoderOutputs(scores.astype(np.float32))
    ids, best = top_of(scores, request.num_fillings)
    return EncoderOutputs(best.astype(np.float32), ids)


def _joined(parts: Sequence[EncoderOutputs]) -> EncoderOutputs:
    if len(parts) == 1:
        return parts[0]
    ids = [part.token_ids for part in parts if part.token_ids is not None]
    values = np.concatenate([part.values for part in parts])
    return EncoderOutputs(values, np.concatenate(ids) if ids else None)
