"""Concurrent calls of a plain client without retries, and the result of each."""

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


# A balancer that loses a replica resets (INTERNAL_ERROR) only calls whose headers it has passed on, and answers others
# with a status (Envoy: Filter::onUpstreamAbort). If headers and reset arrive at once, gRPC drops the headers.
_RESET = "Received RST_STREAM with error code 2"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a call. has_begun: a part of its answer, at least the headers, was sent before its end."""

    code: grpc.StatusCode
    has_begun: bool
    is_stream: bool
    message: str = ""


@dataclass
class Traffic:
    """Running calls. Every answer is compared with that of a server asked directly."""

    expected: dict[str, str]
    outcomes: list[Outcome] = field(default_factory=list)
    _is_over: bool = False
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def broken_off(self) -> list[Outcome]:
        return [outcome for outcome in self._failed if outcome.has_begun]

    @property
    def lost(self) -> list[Outcome]:
        """Return the calls that failed before a part of the answer was sent."""
        return [outcome for outcome in self._failed if not outcome.has_begun]

    @property
    def _failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.code is not grpc.StatusCode.OK]

    async def come_to(self, count: int) -> None:
        """Return after a further number of calls has ended."""
        end = len(self.outcomes) + count
        while len(self.outcomes) < end:
            self._ended.clear()
            await self._ended.wait()

    def end(self) -> None:
        """Wait until every running call has ended, and start no more."""
        self._is_over = True

    async def ask(self, channel: grpc.aio.Channel, number: int) -> None:
        """Send one request after another; every second one is a stream."""
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
            message = str(error.details())
            has_begun = num_messages > 0 or bool(error.initial_metadata()) or _RESET in message
            return Outcome(code=error.code(), has_begun=has_begun, is_stream=True, message=message)
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
    """Return the answer to a text."""
    stub: Any = InferenceServiceStub(channel)
    answer = await stub.GenerateUnary(pb.GenerateUnaryRequest(text=text))
    return str(answer.outputs[0].text)


async def expected_answers(ports: Sequence[int]) -> dict[str, str]:
    """Return the answers to each text; every replica, asked directly, must give the same."""
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
    """Call through a balancer within the context, `at_once` at a time, over one channel.

    options: of the channels; None takes the balancer's own.
    """
    both = list(balancer.options if options is None else options)
    # Otherwise a lost connection is retried only after a second.
    both += [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(balancer.target, options=both) as channel:
        traffic = Traffic(expected)
        async with asyncio.TaskGroup() as group:  # a wrong answer ends the test there and then
            for number in range(at_once):
                group.create_task(traffic.ask(channel, number))
            yield traffic
            traffic.end()
