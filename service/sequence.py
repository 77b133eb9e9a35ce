"""One output being generated for a request: its state, the row and blocks it holds, and what it has cost so far.

Plain data, changed by the engine's thread only. What changes at every step (tokens, lengths) lies in `rows.py`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from antiphon.service.request import Request, Timing
from antiphon.service.stream import OutputStream


class SequenceState(enum.Enum):
    """Where a sequence is on its way; it only moves forward."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """Growing generation state of a request.

    max_new_tokens: most target tokens to produce, the end token included; never above what the model has room for.
    num_self_blocks, num_cross_blocks: to be reserved for the prefix and longest target, and for the source.
    row: index in the runner's batch while running.
    source_len: source tokens, end token included.
    num_generated: target tokens produced; up to date once finished (until then the rows count).
    """

    request: Request
    stream: OutputStream
    max_new_tokens: int
    num_self_blocks: int
    num_cross_blocks: int
    state: SequenceState = SequenceState.WAITING
    row: int | None = None
    self_block_table: tuple[int, ...] = ()
    cross_block_table: tuple[int, ...] = ()
    admitted_s: float | None = None
    first_token_s: float | None = None
    num_generated: int = 0
    source_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.source_len = len(self.request.source_ids)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def num_blocks(self) -> int:
        """Blocks it must have before it may run."""
        return self.num_self_blocks + self.num_cross_blocks

    @property
    def num_prefill_tokens(self) -> int:
        """Source and prefix tokens to compute before its first one is chosen."""
        return self.source_len + len(self.request.prefix_ids)

    def timing(self, now_s: float) -> Timing:
        """Seconds since its arrival at which things happened, the end being now."""
        arrival_s = self.request.arrival_s
        return Timing(
            queued_s=None if self.admitted_s is None else self.admitted_s - arrival_s,
            first_token_s=None if self.first_token_s is None else self.first_token_s - arrival_s,
            total_s=now_s - arrival_s,
        )
