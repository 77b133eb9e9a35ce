"""Views of the page: models, targets as they are generated, the next token, and results of encoder heads."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from antiphon.client import Beam, BeamStep, Delta, Timing, TokenLogprob, Usage
from antiphon.play.messages import ClassifyBody, FillMaskBody, GenerateBody, Json, ModelBody, NextTokenBody, options_of
from antiphon.play.model_server import ModelServer, Pieces
from antiphon.v1 import inference_pb2


async def models(server: ModelServer) -> Json:
    """Return the models, the default first, and the server's address. Raises ServerError."""
    return {"target": server.addresses.target, "models": [described(model) for model in await server.models()]}


def described(model: inference_pb2.Model) -> dict[str, Any]:
    """Return the fields of a model that the page shows."""
    return {
        "name": model.name,
        "architecture": _word(inference_pb2.Architecture, model.architecture, "ARCHITECTURE_").replace("_", "-"),
        "precision": _word(inference_pb2.Precision, model.precision, "PRECISION_"),
        "device": _word(inference_pb2.Device, model.device, "DEVICE_"),
        "vocabulary_size": model.vocabulary_size,
        "max_source_len": model.limits.max_source_len,
        "max_target_len": model.limits.max_target_len,
        "max_text_bytes": model.limits.max_text_bytes,
        "tasks": [
            {"task": _word(inference_pb2.Task, task.task, "TASK_"), "labels": list(task.labels)} for task in model.tasks
        ],
        "languages": list(model.languages),
        "mask_token": model.mask_token,
        "licence": model.provenance.licence,
        "attribution": model.provenance.attribution,
        "cache": _cache(model),
    }


def _cache(model: inference_pb2.Model) -> dict[str, int] | None:
    if not model.HasField("cache"):
        return None
    cache = model.cache
    return {
        "block_tokens": cache.block_tokens,
        "target_block_tokens": cache.target_block_tokens or cache.block_tokens,  # older servers send no field for it
        "block_bytes": cache.block_bytes,
        "num_blocks": cache.num_blocks,
    }


def _word(enum: Any, number: int, prefix: str) -> str:
    """Return the name of an enum's number in lower case, without the enum's own name."""
    name: str = enum.Name(number) if number in enum.values() else "unknown"
    return name.removeprefix(prefix).lower()


async def generate(server: ModelServer, body: GenerateBody) -> AsyncIterator[Json]:
    """Yield new tokens of the outputs, then one end with counts and times. Leaving cancels the request.

    Raises ServerError, BadBody, and ValueError for an option that does not fit its field.
    """
    pieces = server.pieces(body.model)
    deltas = server.client(body).generate(body.text, options_of(body.options), report_beam_steps=body.report_beam_steps)
    async with aclosing(deltas):
        async for delta in deltas:
            yield await _tokens(delta, pieces)
            if delta.usage is not None:
                yield {
                    "type": "end",
                    "usage": _usage(delta.usage),
                    "timing": _timing(delta.timing),
                    "seed": None if delta.seed is None else str(delta.seed),
                    "beam_steps": await _steps(delta.beam_steps, pieces),
                }


async def _tokens(delta: Delta, pieces: Pieces) -> Json:
    logprobs = delta.logprobs or tuple(TokenLogprob(token_id, float("nan")) for token_id in delta.token_ids)
    named = await pieces.of(_ids(logprobs))
    return {
        "type": "tokens",
        "output": delta.output_index,
        "text": delta.text,
        "num_tokens": len(delta.token_ids),
        "tokens": [
            {
                "id": token.token_id,
                "piece": named[token.token_id],
                "logprob": token.logprob if delta.logprobs else None,
                "alternatives": [
                    {"id": token_id, "piece": named[token_id], "logprob": logprob}
                    for token_id, logprob in token.alternatives
                ],
            }
            for token in logprobs
        ],
        "finish_reason": delta.finish_reason,
        "score": delta.score,
    }


def _ids(logprobs: Iterable[TokenLogprob]) -> Iterable[int]:
    for token in logprobs:
        yield token.token_id
        yield from (token_id for token_id, _ in token.alternatives)


def _usage(usage: Usage) -> Json:
    return {
        "source_tokens": usage.source_tokens,
        "generated_tokens": usage.generated_tokens,
        "cache_blocks": usage.cache_blocks,
    }


def _timing(timing: Timing | None) -> Json | None:
    if timing is None:
        return None
    return {
        "queued_s": timing.queued_s,
        "time_to_first_token_s": timing.time_to_first_token_s,
        "total_s": timing.total_s,
    }


async def _steps(steps: Iterable[BeamStep], pieces: Pieces) -> list[Json]:
    steps = list(steps)
    named = await pieces.of(beam.token_id for step in steps for beam in (*step.live, *step.finished))

    def entry(beam: Beam) -> Json:
        return {
            "parent": beam.parent,
            "id": beam.token_id,
            "piece": named[beam.token_id],
            "total_logprob": beam.total_logprob,
            "score": beam.score,
        }

    return [
        {"live": [entry(beam) for beam in step.live], "finished": [entry(beam) for beam in step.finished]}
        for step in steps
    ]


async def next_token(server: ModelServer, body: NextTokenBody) -> Json:
    """Return tokens, and their log-probability after each stage; null for dropped ones. Raises ServerError, BadBody."""
    distribution = await server.client(body).next_token(
        body.text, options_of(body.options), generated_ids=body.generated_ids, num_tokens=body.num_tokens
    )
    tokens = [
        {"id": token_id, "piece": piece}
        for token_id, piece in zip(distribution.token_ids, distribution.pieces, strict=True)
    ]
    stages = [
        {
            "name": stage.name,
            "logprobs": [value if math.isfinite(value) else None for value in stage.logprobs],
            "num_kept": stage.num_kept,
            "entropy": stage.entropy,
        }
        for stage in distribution.stages
    ]
    return {"tokens": tokens, "stages": stages}


async def classify(server: ModelServer, body: ClassifyBody) -> Json:
    """Return labels with their probabilities, best first. Raises ServerError."""
    client = server.client_of(body.model)
    return asdict(await client.classify(body.text, pair=body.pair, next_sentence=body.next_sentence))


async def tag(server: ModelServer, body: ModelBody) -> Json:
    """Return tokens and spans with their labels, by code points of the text. Raises ServerError."""
    return asdict(await server.client_of(body.model).tag(body.text))


async def fill_mask(server: ModelServer, body: FillMaskBody) -> Json:
    """Return the most likely tokens of each masked place. Raises ServerError."""
    return asdict(await server.client_of(body.model).fill_mask(body.text, top_k=body.top_k))
