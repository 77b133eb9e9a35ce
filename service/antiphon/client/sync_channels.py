"""Connections of a synchronous client to one target."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc

from antiphon.client.connection import Connection
from antiphon.client.placement import Offer, Placement, offer_of
from antiphon.client.sync_many import OpenCall
from antiphon.client.terms import Terms
from antiphon.v1 import inference_pb2
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub


class Channels:
    """Connections as `Connection.connections` says. Thread-safe.

    open_channel: opens a channel; with is_shared=False, one with a connection of its own.
    """

    def __init__(self, open_channel: Callable[..., grpc.Channel], how: Connection, terms: Terms) -> None:
        self._open_channel = open_channel
        self._terms = terms
        self._is_spread = how.load_balancing != "pick_first"
        self._is_placed = how.connections is not None
        self._is_offered: bool | None = None
        self._asking = threading.Lock()
        num_opened = how.connections or 1
        self._channels: list[grpc.Channel] = []
        self._stubs: list[InferenceServiceStub] = []
        self._turns = itertools.count()
        for _ in range(num_opened):
            self._add(open_channel(is_shared=num_opened == 1))

    @property
    def stub(self) -> InferenceServiceStub:
        """Stub of the connection whose turn it is."""
        return self._stubs[next(self._turns) % len(self._stubs)]

    def many_calls(self) -> list[OpenCall] | None:
        """Return functions that open GenerateMany calls, one for each connection; None for single calls.

        Single calls are for an older server, and for several addresses, among which calls are spread. The server is
        asked until it answers; if it cannot be reached, the requests will say so.
        """
        with self._asking:
            if not self._is_spread and self._is_offered is None:
                self._ask()
        if self._is_spread or self._is_offered is False:
            return None
        return [partial(self._open_many, stub) for stub in self._stubs]

    def close(self) -> None:
        """Cancel running calls and close the connections."""
        for channel in self._channels:
            channel.close()

    def _ask(self) -> None:
        """Ask whether the server knows GenerateMany; if it has several processes, connect to each."""
        first = self._offered(self._stubs[0])
        self._is_offered = first.is_known
        if self._is_placed or not first.is_known:
            return
        placement = Placement(first)
        while placement.wants_more():
            channel = self._open_channel(is_shared=False)
            if placement.keeps(self._offered(InferenceServiceStub(channel))):
                self._add(channel)
            else:
                channel.close()

    def _add(self, channel: grpc.Channel) -> None:
        self._channels.append(channel)
        self._stubs.append(InferenceServiceStub(channel))

    def _offered(self, stub: InferenceServiceStub) -> Offer:
        call: Any = stub.GenerateMany(iter(()), **self._terms.call())
        return offer_of(call.code(), call.trailing_metadata())

    def _open_many(self, stub: InferenceServiceStub, messages: Iterator[inference_pb2.GenerateManyRequest]) -> Any:
        return stub.GenerateMany(messages, **self._terms.call(math.inf))
