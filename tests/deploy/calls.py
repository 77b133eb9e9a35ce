"""Calls of a plain client, without retries of its own, one after another from many sides, and what became of each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.deploy.balancers import Balancer, Option

TEXTS = ("How are you?", "The weather is nice today.", "My sister reads a book in the garden.", "I don't know.")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a call. has_begun: something of its answer had come, if only the headers, before it ended."""

    code: grpc.StatusCode
    has_begun: bool
    is_stream: bool
    message: str = ""


@dataclass
class Traffic:
    """Calls under way; every answer is held to that of a server asked directly."""

    expected: dict[str, str]
    outcomes: list[Outcome] = field(default_factory=list)
    _is_over: bool = False
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def broken_off(self) -> list[Outcome]:
        """Streams that ended in the middle."""
        return [outcome for outcome in self._failed if outcome.has_begun]

    @property
    def lost(self) -> list[Outcome]:
        """Calls that failed before anything had come back."""
        return [outcome for outcome in self._failed if not outcome.has_begun]

    @property
    def _failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.code is not grpc.StatusCode.OK]

    async def come_to(self, count: int) -> None:
        """Return when so many calls more have ended."""
        end = len(self.outcomes) + count
        while len(self.outcomes) < end:
            self._ended.clear()
            await self._ended.wait()

    def end(self) -> None:
        """Let every call under way end, and make no more."""
        self._is_over = True

    async def ask(self, channel: grpc.aio.Channel, number: int) -> None:
        """Ask one thing after another, every other time for a stream."""
        while not self._is_over:
            text, is_stream = TEXTS[number % len(TEXTS)], number // len(TEXTS) % 2 == 0
            self.outcomes.append(await (self._stream if is_stream else self._whole)(channel, text))
            self._ended.set()
            number += 1

    async def _stream(self, channel: grpc.aio.Channel, text: str) -> Outcome:
        stub: Any = InferenceServiceStub(channel)
        said, num_messages = "", 0
        try:
            async for message in stub.Generate(pb.GenerateRequest(text=text)):
                said += message.text_delta
                num_messages += 1
        except grpc.aio.AioRpcError as error:
            assert self.expected[text].startswith(said)
            has_begun = num_messages > 0 or bool(error.initial_metadata())
            return Outcome(code=error.code(), has_begun=has_begun, is_stream=True, message=str(error.details()))
        assert said == self.expected[text]
        return Outcome(code=grpc.StatusCode.OK, has_begun=True, is_stream=True)

    async def _whole(self, channel: grpc.aio.Channel, text: str) -> Outcome:
        try:
            said = await whole(channel, text)
        except grpc.aio.AioRpcError as error:
            return Outcome(code=error.code(), has_begun=False, is_stream=False, message=str(error.details()))
        assert said == self.expected[text]
        return Outcome(code=grpc.StatusCode.OK, has_begun=True, is_stream=False)


async def whole(channel: grpc.aio.Channel, text: str) -> str:
    """The answer to a text."""
    stub: Any = InferenceServiceStub(channel)
    answer = await stub.GenerateUnary(pb.GenerateUnaryRequest(text=text))
    return str(answer.outputs[0].text)


async def expected_answers(ports: Sequence[int]) -> dict[str, str]:
    """What every replica, asked directly, answers to each text: the same."""
    answers = []
    for port in ports:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            answers.append({text: await whole(channel, text) for text in TEXTS})
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@contextlib.asynccontextmanager
async def traffic_through(
    balancer: Balancer, expected: dict[str, str], at_once: int, options: Sequence[Option] | None = None
) -> AsyncIterator[Traffic]:
    """Call through a balancer while entered, `at_once` at a time, over one channel.

    options: of the channels; None takes the balancer's own.
    """
    both = list(balancer.options if options is None else options)
    # Else a connection that was lost is tried again after a second at the earliest.
    both += [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(balancer.target, options=both) as channel:
        traffic = Traffic(expected)
        async with asyncio.TaskGroup() as group:  # a wrong answer ends the test there and then
            for number in range(at_once):
                group.create_task(traffic.ask(channel, number))
            yield traffic
            traffic.end()
