"""What the engine asks of a model, and nothing of how it is run.

The protocol is the whole boundary: on this side rows, token ids and lengths; on the other arrays, graphs and devices.
`model_runner.py` implements it with ONNX Runtime, `tests/fakes.py` with arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeReport:
    """What one encoder run cost, beside what it was predicted to cost.

    rows, length: shape of the run, in sources and tokens of each.
    peak_workspace_bytes: measured peak of the allocator above its level before the run; None where not measured.
    predicted_fused_bytes: the bundle's fit for the fused graph; None where the bundle carries no profile.
    predicted_materialised_bytes: what the score matrices alone would cost, B * H * T^2 * w of one layer.
    """

    rows: int
    length: int
    peak_workspace_bytes: int | None
    predicted_fused_bytes: float | None
    predicted_materialised_bytes: int


class Runner(Protocol):
    """A model whose running sequences occupy rows 0 .. B-1 of its caches. Used from one thread only."""

    @property
    def max_rows(self) -> int:
        """Rows the caches hold."""

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits; token ids are below it."""

    @property
    def max_source_len(self) -> int:
        """Longest source in tokens, end token included."""

    @property
    def max_target_len(self) -> int:
        """Most target positions a row can cache, the begin token's included."""

    @property
    def bos_id(self) -> int:
        """Token that starts every target."""

    @property
    def eos_id(self) -> int:
        """Token that ends a target."""

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values one token takes, all layers; the same for self and cross attention."""

    def encode(self, sources: Sequence[Sequence[int]], first_row: int) -> EncodeReport:
        """Encode sources of one common length; their cross caches land in rows from `first_row` on."""

    def decode(
        self, token_ids: NDArray[np.int64], past_lens: NDArray[np.int32], source_lens: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Feed one token to each of rows 0 .. B-1 and return their logits.

        token_ids, past_lens, source_lens: [B]; row b caches past_lens[b] target tokens already.
        Returns [B, V], valid until the next decode.
        """

    def move_row(self, source: int, target: int, self_len: int, source_len: int) -> None:
        """Copy the caches of row `source` over those of row `target`: that many target and source tokens."""
