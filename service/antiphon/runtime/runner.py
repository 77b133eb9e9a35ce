"""Interface of a model for the engine.

The protocol is the complete boundary. The engine knows rows, token ids, lengths and the ids of cache blocks; the runner
knows arrays, graphs and devices. `native_runner.py` and `encoder_runner.py` implement the protocol with ONNX Runtime,
`tests/fakes.py` with arithmetic.

Axes: N new tokens of a step, R rows, K samples or states read, X and Y widths of the block tables,
M width of the encoder output, O outputs of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.heads import EmbeddingConfig, HeadConfig
from antiphon.architecture.heads import Task as HeadTask
from antiphon.ops.sampling import NONE_ALLOWED, NOT_FINITE, Samples, SamplingArrays

__all__ = ["NONE_ALLOWED", "NOT_FINITE", "DecodeBatch", "EncodeReport", "Runner", "Samples", "SamplingArrays"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeReport:
    """Measured and predicted cost of encoding sources together.

    rows, num_tokens, longest: number of sources, total of computed tokens, and tokens of the longest source.
    peak_workspace_bytes: measured peak of the allocator above its level before; None if not measured.
    predicted_fused_bytes: prediction of the bundle's fit for the fused graph; None if the bundle has no profile.
    predicted_materialised_bytes: bytes of the score matrices of one layer alone, the sum of H * S^2 * w.
    memory [num_tokens, M] float32: encoder output, source after source; None if not requested.
    """

    rows: int
    num_tokens: int
    longest: int
    peak_workspace_bytes: int | None
    predicted_fused_bytes: float | None
    predicted_materialised_bytes: int
    memory: NDArray[np.float32] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeBatch:
    """Packed batch of the new tokens of rows 0 .. R-1, and sampling parameters for the tokens after some of them.

    token_ids [N] int64, positions [N] int32: target tokens to feed and their positions, rows one after the other.
    offsets [R+1] int32: row r feeds tokens offsets[r] .. offsets[r+1]-1, at least one.
    self_tables [R, X], cross_tables [R, Y] int32: block b of a row contains its positions block_size * b and following;
        entries beyond its length are ignored. Rows can share blocks, except a block that one of them writes in this
        step.
    source_lens [R] int32: tokens of each row's source.
    sampling: where it is the same object as in the step before, its arrays, edits included, are the same too.
    max_num_logprobs: the largest num_logprobs of sampling, at least 0: the width of the candidates in Samples.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int32]
    offsets: NDArray[np.int32]
    self_tables: NDArray[np.int32]
    cross_tables: NDArray[np.int32]
    source_lens: NDArray[np.int32]
    sampling: SamplingArrays
    max_num_logprobs: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, N."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        return len(self.source_lens)


class Runner(Protocol):
    """A model whose running sequences are rows 0 .. R-1 of every step. Used from one thread only."""

    @property
    def max_rows(self) -> int:
        """Maximum number of rows in a step."""

    @property
    def vocab_size(self) -> int:
        """Token ids of targets are below it."""

    @property
    def source_vocab_size(self) -> int:
        """Token ids of sources are below it."""

    @property
    def max_source_len(self) -> int:
        """Longest source in tokens, end token included; longest prompt for decoder-only models."""

    @property
    def max_target_len(self) -> int:
        """Maximum number of target positions that a row can cache, begin token or complete prompt included."""

    @property
    def has_encoder(self) -> bool:
        """True when there are sources to encode; otherwise `encode` is never called and cross tables are ignored."""

    @property
    def has_decoder(self) -> bool:
        """True when there are targets to decode; otherwise there are no blocks and `decode` is never called."""

    @property
    def bos_id(self) -> int:
        """Token that starts every target."""

    @property
    def eos_id(self) -> int:
        """Token that ends a target."""

    @property
    def block_size(self) -> int:
        """Tokens of a cache block."""

    @property
    def num_blocks(self) -> int:
        """Number of cache blocks, for self and cross attention together; their ids are below it."""

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, all layers; the same for self and cross attention."""

    @property
    def heads(self) -> Mapping[HeadTask, HeadConfig]:
        """Heads that read the encoder output, by task."""

    @property
    def embedding(self) -> EmbeddingConfig | None:
        """Vector of a text that the model declares; None: it declares none."""

    def encode(
        self,
        sources: Sequence[Sequence[int]],
        block_tables: Sequence[Sequence[int]],
        *,
        type_ids: Sequence[Sequence[int]] = (),
        keep_memory: bool = False,
    ) -> EncodeReport:
        """Encode sources of any lengths; source i fills the cross blocks block_tables[i].

        type_ids: token types of each source; empty if all are 0. keep_memory: report the encoder's states too.
        A source that is encoded again gives the same bits. Encoder-only models have no blocks.
        """

    def run_head(self, task: HeadTask, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return outputs [K, O] of a head for rows [K, M] of the encoder output; each row is computed independently.

        The rows of the head for embed are poolings.
        """

    def decode(self, batch: DecodeBatch) -> Samples:
        """Feed every row its new tokens and sample. Positions may be fed again, with the same bits.

        Several rows may read the same blocks.
        """

    def free_cache(self) -> None:
        """Return memory of the cache to the system, if that is possible. The content of all blocks is lost."""

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copy the content of block sources[i] to block targets[i], for all layers. No block is in both lists."""
