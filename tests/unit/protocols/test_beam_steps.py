"""Steps of a beam search over a real channel: in the last message of every kind of answer, and through the clients."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from antiphon.bundle.manifest import GenerationDefaults
from antiphon.client import AsyncClient, Beam, BeamStep, Client, Delta, Generation, Options, ServerError
from antiphon.v1 import inference_pb2 as pb
from tests.fakes import FakeRunner
from tests.serving import Serving, asking, asking_whole, details_of, refusal, serving, stub_of

BEAMS: dict[str, Any] = dict(beam_width=3, num_return_sequences=2, seed=3)


def reads_history(runner: FakeRunner) -> None:
    runner.reads_history = True


async def whole_answer(served: Serving) -> pb.GenerateUnaryResponse:
    request = asking_whole(**BEAMS)
    request.report_beam_steps = True
    return await stub_of(served).GenerateUnary(request)


async def many(served: Serving, *requests: pb.ManyRequest) -> list[pb.ManyAnswer]:
    """Return all answers of one call of many requests."""
    call: Any = stub_of(served).GenerateMany()
    await call.write(pb.GenerateManyRequest(requests=requests))
    await call.done_writing()
    return [answer async for response in call for answer in response.answers]


async def test_unary_answer_has_the_steps_that_lead_to_its_outputs() -> None:
    async with serving(prepare=reads_history) as served:
        answer = await whole_answer(served)
        plain = await stub_of(served).GenerateUnary(asking_whole(**BEAMS))
    assert (list(answer.outputs), answer.seed) == (list(plain.outputs), plain.seed)
    assert not plain.beam_steps
    assert [len(step.live) for step in answer.beam_steps[:-1]] == [3] * (len(answer.beam_steps) - 1)
    assert not any(beam.HasField("score") for step in answer.beam_steps for beam in step.live)
    scores = sorted((beam.score for step in answer.beam_steps for beam in step.finished), reverse=True)
    assert scores[:2] == [output.score for output in answer.outputs]


async def test_stream_has_the_steps_of_the_unary_answer_in_its_last_message() -> None:
    request = asking(**BEAMS)
    request.report_beam_steps = True
    async with serving(prepare=reads_history) as served:
        *others, last = [message async for message in stub_of(served).Generate(request)]
        whole = await whole_answer(served)
    assert not any(message.beam_steps for message in others)
    assert last.beam_steps == whole.beam_steps
    assert last.HasField("usage")


@pytest.mark.parametrize("is_whole", [False, True])
async def test_answer_of_many_has_the_steps_of_the_unary_answer(is_whole: bool) -> None:
    request = asking(**BEAMS)
    request.report_beam_steps = True
    async with serving(prepare=reads_history) as served:
        *others, last = await many(served, pb.ManyRequest(id=1, request=request, is_whole=is_whole))
        whole = await whole_answer(served)
    assert not any(answer.delta.beam_steps for answer in others)
    assert (last.whole if is_whole else last.delta).beam_steps == whole.beam_steps


@pytest.mark.parametrize("options", [{}, {"beam_width": 1}, {"temperature": 1.0, "num_return_sequences": 2}])
async def test_steps_of_a_request_without_beams_are_refused(options: dict[str, Any]) -> None:
    streamed, whole = asking(**options), asking_whole(**options)
    streamed.report_beam_steps = whole.report_beam_steps = True
    async with serving() as served:
        stub = stub_of(served)
        for error in (await refusal(stub.Generate(streamed)), await refusal(stub.GenerateUnary(whole))):
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert details_of(error).field == "report_beam_steps"
            assert "beam_width" in (error.details() or "")
        (answer,) = await many(served, pb.ManyRequest(id=1, request=streamed))
    assert answer.failure.field == "report_beam_steps"


async def test_steps_of_a_search_by_the_models_default_are_reported() -> None:
    request = asking_whole()
    request.report_beam_steps = True
    explicit = asking_whole(beam_width=3)
    explicit.report_beam_steps = True
    async with serving(prepare=reads_history, generation=GenerationDefaults(beam_width=3)) as served:
        stub = stub_of(served)
        answer, expected = await stub.GenerateUnary(request), await stub.GenerateUnary(explicit)
        for options in ({"beam_width": 1}, {"temperature": 1.0}):  # which replace the default
            request.options.CopyFrom(pb.GenerateOptions(**options))
            error = await refusal(stub.GenerateUnary(request))
            assert details_of(error).field == "report_beam_steps"
    assert len(answer.beam_steps[0].live) == 3
    assert answer.beam_steps == expected.beam_steps


def as_steps(steps: Any) -> tuple[BeamStep, ...]:
    """Return the client's form of reported steps."""

    def beams(messages: Any) -> tuple[Beam, ...]:
        return tuple(
            Beam(
                parent=one.parent,
                token_id=one.token_id,
                total_logprob=one.total_logprob,
                score=one.score if one.HasField("score") else None,
            )
            for one in messages
        )

    return tuple(BeamStep(live=beams(step.live), finished=beams(step.finished)) for step in steps)


async def test_clients_return_the_steps_and_the_blocks_of_a_search() -> None:
    options = Options(**BEAMS)

    def ask(target: str) -> tuple[list[Delta], list[Generation]]:
        with Client(target) as client:
            deltas = list(client.generate((9, 30, 31), options, report_beam_steps=True))
            return deltas, client.generate_outputs((9, 30, 31), options, report_beam_steps=True)

    async with serving(prepare=reads_history) as served, AsyncClient(served.target) as client:
        answer = await whole_answer(served)
        deltas = [delta async for delta in client.generate((9, 30, 31), options, report_beam_steps=True)]
        outputs = await client.generate_outputs((9, 30, 31), options, report_beam_steps=True)
        others = await asyncio.to_thread(ask, served.target)
        plain = await client.generate_outputs((9, 30, 31), options)
        with pytest.raises(ServerError, match="report_beam_steps is True"):
            await client.generate_outputs((9, 30, 31), report_beam_steps=True)
    expected = as_steps(answer.beam_steps)
    for found in (deltas, others[0]):
        assert [delta.beam_steps for delta in found] == [()] * (len(found) - 1) + [expected]
    for generations in (outputs, others[1]):
        assert [one.beam_steps for one in generations] == [expected] * 2
        assert generations[0].usage.cache_blocks == answer.usage.cache_blocks > 0
    assert [one.beam_steps for one in plain] == [(), ()]
