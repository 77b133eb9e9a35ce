"""Honest clients during an attack: every answer is compared with its reference, and every latency is measured."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from antiphon.client import AsyncClient, Connection, ServerError
from antiphon.client.messages import Languages, unary_request
from antiphon.v1 import inference_pb2_grpc
from tests.abuse.calls import SERVICE
from tests.reliability.asking import Texts, ask, references, streamed, whole

# Requests of 2 to 21 tokens, each of which takes milliseconds alone.
NUMBERS = range(20)
PAUSE_S = 0.02
KEPT = 20
"""Complaints that are kept in words."""


@dataclass(kw_only=True, slots=True)
class Record:
    """Results of honest calls. sent: by method. errors: by status. latencies_s: of the answered calls."""

    sent: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """Return a message for wrong answers and for calls without answer."""
        return [*self.wrong, *(f"{number} honest calls ended {error}" for error, number in self.errors.items())]


@dataclass(kw_only=True, slots=True)
class Honest:
    """A few clients with one connection each, and new clients that open a connection for every call.

    expected: answer to each number. deadline_s: of each call. has_newcomers: off if no new connection is possible.
    connected: set when every client has been answered on its connection.
    """

    target: str
    expected: dict[int, Texts]
    connection: Connection = field(default_factory=Connection)
    num_clients: int = 2
    deadline_s: float = 10.0
    has_newcomers: bool = True
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    record: Record = field(default_factory=Record)
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    _num_connected: int = 0

    async def ask_beside(self, attack: Awaitable[object]) -> None:
        """Send requests during an attack, and one or more for every client after it. Raises errors of the attack."""
        under_attack = asyncio.ensure_future(attack)
        roles = [self._client(under_attack) for _ in range(self.num_clients)]
        if self.has_newcomers:
            roles.append(self._newcomers(under_attack))
        await asyncio.gather(under_attack, *roles)

    async def _client(self, attack: asyncio.Future[object]) -> None:
        """Make unary calls and streams in turn over one connection."""
        async with AsyncClient(self.target, connection=self.connection) as client:
            await self._either(client, self.rng.choice(NUMBERS))
            self._num_connected += 1
            if self._num_connected == self.num_clients:
                self.connected.set()
            await self._repeat(attack, lambda number: self._either(client, number))

    async def _newcomers(self, attack: asyncio.Future[object]) -> None:
        await self._repeat(attack, self._newcomer)

    async def _repeat(self, attack: asyncio.Future[object], call: Callable[[int], Awaitable[None]]) -> None:
        is_last = False
        while not is_last:
            is_last = attack.done()
            await call(self.rng.choice(NUMBERS))
            await asyncio.sleep(PAUSE_S)

    async def _either(self, client: AsyncClient, number: int) -> None:
        if self.rng.random() < 0.5:
            await self._measure("Generate", number, streamed(client, number, timeout_s=self.deadline_s))
        else:
            await self._measure("GenerateUnary", number, whole(client, number, timeout_s=self.deadline_s))

    async def _newcomer(self, number: int) -> None:
        """Make one call over a separate plain channel."""
        async with self.connection.open_async(self.target, SERVICE, is_shared=False) as channel:
            await self._measure("GenerateUnary", number, self._plain(channel, number))

    async def _plain(self, channel: grpc.aio.Channel, number: int) -> Texts:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        asked = ask(number)
        request = unary_request("", asked.text, asked.options, Languages())
        response = await stub.GenerateUnary(request, timeout=self.deadline_s)
        return tuple(output.text for output in response.outputs)

    async def _measure(self, method: str, number: int, call: Awaitable[Texts]) -> None:
        self.record.sent[f"{SERVICE}/{method}"] += 1
        begin_s = time.monotonic()
        try:
            found = await call
        except (ServerError, grpc.aio.AioRpcError) as error:
            code = error.code if isinstance(error, ServerError) else error.code()
            self.record.errors[f"{code.name}: {error if isinstance(error, ServerError) else error.details()}"] += 1
            return
        self.record.latencies_s.append(time.monotonic() - begin_s)
        self.record.answered[f"{SERVICE}/{method}"] += 1
        if found != self.expected[number] and len(self.record.wrong) < KEPT:
            self.record.wrong.append(f"{number} was answered {found}, not {self.expected[number]}")


async def expected_answers(target: str, connection: Connection | None = None) -> dict[int, Texts]:
    """Request the answer to each number alone, before any attack."""
    async with AsyncClient(target, connection=connection) as client:
        return await references(client, NUMBERS)
