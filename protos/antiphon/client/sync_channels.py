"""Connections of a synchronous client to one target."""

from __future__ import annotations

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
        self.opened = [open_channel(is_shared=num_opened == 1) for _ in range(num_opened)]
        self._for_many = list(self.opened)

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
        return [partial(self._open_many, channel) for channel in self._for_many]

    def close(self) -> None:
        """Cancel running calls and close the connections."""
        for channel in {*self.opened, *self._for_many}:
            channel.close()

    def _ask(self) -> None:
        """Ask whether the server knows GenerateMany; if it has several processes, connect to each."""
        first = self._offered(self.opened[0])
        self._is_offered = first.is_known
        if self._is_placed or not first.is_known:
            return
        placement = Placement(first)
        while placement.wants_more():
            channel = self._open_channel(is_shared=False)
            if placement.keeps(self._offered(channel)):
                self._for_many.append(channel)
            else:
                channel.close()

    def _offered(self, channel: grpc.Channel) -> Offer:
        call: Any = InferenceServiceStub(channel).GenerateMany(iter(()), **self._terms.call())
        return offer_of(call.code(), call.trailing_metadata())

    def _open_many(self, channel: grpc.Channel, messages: Iterator[inference_pb2.GenerateManyRequest]) -> Any:
        return InferenceServiceStub(channel).GenerateMany(messages, **self._terms.call(math.inf))
