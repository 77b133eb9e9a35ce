"""Connections of an asynchronous client to one target."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import grpc.aio

from antiphon.client.async_many import Call, ended_call
from antiphon.client.connection import Connection
from antiphon.client.placement import Offer, Placement, offer_of
from antiphon.client.terms import Terms
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from antiphon.v1.inference_pb2_grpc import InferenceServiceAsyncStub


class Channels:
    """Connections as `Connection.connections` says. For one event loop.

    open_channel: opens a channel; with is_shared=False, one with a connection of its own.
    """

    def __init__(self, open_channel: Callable[..., grpc.aio.Channel], how: Connection, terms: Terms) -> None:
        self._open_channel = open_channel
        self._terms = terms
        self._is_spread = how.load_balancing != "pick_first"
        self._is_placed = how.connections is not None
        self._is_offered: bool | None = None
        self._asking = asyncio.Lock()
        num_opened = how.connections or 1
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[InferenceServiceAsyncStub] = []
        self._turns = itertools.count()
        for _ in range(num_opened):
            self._add(open_channel(is_shared=num_opened == 1))

    @property
    def stub(self) -> InferenceServiceAsyncStub:
        """Stub of the connection whose turn it is."""
        return self._stubs[next(self._turns) % len(self._stubs)]

    async def many_calls(self) -> list[Callable[[], Call]] | None:
        """Return functions that open GenerateMany calls, one for each connection; None for single calls.

        Single calls are for an older server, and for several addresses, among which calls are spread. The server is
        asked until it answers; if it cannot be reached, the requests will say so.
        """
        async with self._asking:
            if not self._is_spread and self._is_offered is None:
                await self._ask()
        if self._is_spread or self._is_offered is False:
            return None
        return [partial(self._open_many, stub) for stub in self._stubs]

    async def close(self) -> None:
        """Cancel running calls and close the connections."""
        for channel in self._channels:
            await channel.close()

    async def _ask(self) -> None:
        """Ask whether the server knows GenerateMany; if it has several processes, connect to each."""
        first = await self._offered(self._stubs[0])
        self._is_offered = first.is_known
        if self._is_placed or not first.is_known:
            return
        placement = Placement(first)
        while placement.wants_more():
            channel = self._open_channel(is_shared=False)
            if placement.keeps(await self._offered(InferenceServiceStub(channel))):
                self._add(channel)
            else:
                await channel.close()

    def _add(self, channel: grpc.aio.Channel) -> None:
        self._channels.append(channel)
        self._stubs.append(InferenceServiceStub(channel))

    async def _offered(self, stub: InferenceServiceAsyncStub) -> Offer:
        call = stub.GenerateMany(**self._terms.call())
        with ended_call():
            await call.done_writing()
        return offer_of(await call.code(), await call.trailing_metadata())

    def _open_many(self, stub: InferenceServiceAsyncStub) -> Call:
        return stub.GenerateMany(**self._terms.call(math.inf))
