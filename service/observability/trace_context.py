"""Which trace a call belongs to, as W3C Trace Context has it. Knows no exporter: logs and exemplars need it as well.

https://www.w3.org/TR/trace-context/#traceparent-header
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_TRACE_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A call's place in a trace, in lower-case hexadecimal.

    trace_id: 32 digits. parent_id: 16 digits of the client's span; None where the trace begins here.
    is_sampled: whether the trace is recorded, so that it will be found.
    """

    trace_id: str
    parent_id: str | None
    is_sampled: bool


def read_trace_parent(text: str | bytes | None) -> TraceContext | None:
    """What a client's traceparent says; None for one that is absent or malformed, which begins no trace."""
    match = _TRACE_PARENT.fullmatch(text) if isinstance(text, str) else None
    if match is None or (match[1] == "00" and match[5]):  # later versions may have more fields
        return None
    return TraceContext(match[2], match[3], bool(int(match[4], 16) & _SAMPLED))


class Sampler:
    """Begins traces for calls that come without one: a share of them, from 0 to 1."""

    def __init__(self, ratio: float, randomness: random.Random | None = None) -> None:
        self._ratio = ratio
        self._random = randomness or random.Random()

    def begin(self) -> TraceContext | None:
        """A new trace, or None for a call that is not to be recorded."""
        if self._ratio < 1 and self._random.random() >= self._ratio:
            return None
        return TraceContext(f"{self._random.getrandbits(128) or 1:032x}", None, is_sampled=True)
