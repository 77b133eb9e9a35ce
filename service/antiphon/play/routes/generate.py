"""Targets of a source as they are generated: tokens with their probabilities, alternatives, and steps of the search."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing

from antiphon.client import BeamStep, Delta, Timing, TokenLogprob, Usage
from antiphon.client.messages import Beam
from antiphon.play.bodies import GenerateBody, options_of
from antiphon.play.model_server import ModelServer
from antiphon.play.pieces import Pieces
from antiphon.play.serve_json import Json


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
                "id": one.token_id,
                "piece": named[one.token_id],
                "logprob": one.logprob if delta.logprobs else None,
                "alternatives": [
                    {"id": other, "piece": named[other], "logprob": logprob} for other, logprob in one.alternatives
                ],
            }
            for one in logprobs
        ],
        "finish_reason": delta.finish_reason,
        "score": delta.score,
    }


def _ids(logprobs: Iterable[TokenLogprob]) -> Iterable[int]:
    for one in logprobs:
        yield one.token_id
        yield from (other for other, _ in one.alternatives)


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
        {"live": [entry(one) for one in step.live], "finished": [entry(one) for one in step.finished]} for step in steps
    ]
