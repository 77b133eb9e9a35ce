"""Stubs over several connections to one target, which take calls in turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

C = TypeVar("C")


def spread(channels: Sequence[C]) -> C:
    """Return a channel whose calls go to these channels in turn. It can be used by stubs only."""
    return channels[0] if len(channels) == 1 else cast("C", _Spread(channels))


class _Spread:
    """Channel for a stub: each call goes to the next one of several channels."""

    def __init__(self, channels: Sequence[Any]) -> None:
        self._channels = channels

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Return the method of all channels, as grpc.Channel does."""
        return self._method("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Return the method of all channels, as grpc.Channel does."""
        return self._method("unary_stream", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Return the method of all channels, as grpc.Channel does."""
        return self._method("stream_stream", args, kwargs)

    def _method(self, kind: str, args: Any, kwargs: Any) -> Any:
        return _InTurn([getattr(channel, kind)(*args, **kwargs) for channel in self._channels])


class _InTurn:
    """Method of several channels. Thread-safe."""

    def __init__(self, methods: Sequence[Callable[..., Any]]) -> None:
        self._methods = itertools.cycle(methods)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return next(self._methods)(*args, **kwargs)

    def future(self, *args: Any, **kwargs: Any) -> Any:
        method: Any = next(self._methods)
        return method.future(*args, **kwargs)
