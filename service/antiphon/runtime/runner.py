"""Interface of a model for the engine.

The protocol is the complete boundary. The engine knows rows, token ids, lengths and the ids of cache blocks; the runner
knows arrays, graphs and devices. `native.py` and `cuda/runner.py` implement the protocol with ONNX
Runtime, `tests/fakes.py` with arithmetic.

Axes: N new tokens of a step, R rows, K samples or states read, X and Y widths of the block tables,
M width of the encoder output, O outputs of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import EmbeddingConfig, HeadConfig
from antiphon.architecture.heads import Task as HeadTask
from antiphon.bundle.manifest import GraphSet, Lowering, Precision
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for, target_block_size
from antiphon.ops.sampling import NONE_ALLOWED, NOT_FINITE, Samples, SamplingArrays

__all__ = [
    "NONE_ALLOWED",
    "NOT_FINITE",
    "DecodeBatch",
    "EncodeReport",
    "ModelFacts",
    "Runner",
    "Samples",
    "SamplingArrays",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeReport:
    """Measured and predicted cost of encoding sources together."""

    rows: int
    """Number of sources."""
    num_tokens: int
    """Total of computed tokens."""
    longest: int
    """Tokens of the longest source."""
    peak_workspace_bytes: int | None
    """Measured peak of the allocator above its level before; None if not measured."""
    predicted_fused_bytes: float | None
    """Prediction of the bundle's fit for the fused graph; None if the bundle has no profile."""
    predicted_materialised_bytes: int
    """Bytes of the score matrices of one layer alone, the sum of H * S^2 * w."""
    memory: NDArray[np.float32] | None = None
    """[num_tokens, M]: encoder output, source after source; None if not requested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeBatch:
    """Packed batch of the new tokens of rows 0 .. R-1, and sampling parameters for the tokens after some of them."""

    token_ids: NDArray[np.int64]
    """[N]: target tokens to feed, rows one after the other."""
    positions: NDArray[np.int32]
    """[N]: their positions."""
    offsets: NDArray[np.int32]
    """[R+1]: row r feeds tokens offsets[r] .. offsets[r+1]-1, at least one."""
    self_tables: NDArray[np.int32]
    """[R, X]: block b of a row contains its positions target_block_size * b and following; entries beyond its
    length are ignored. Rows can share blocks, except a block that one of them writes in this step."""
    cross_tables: NDArray[np.int32]
    """[R, Y]: the same for the row's source."""
    source_lens: NDArray[np.int32]
    """[R]: tokens of each row's source."""
    sampling: SamplingArrays
    """If this object is that of the step before, none of its arrays has changed since, the edits included."""
    num_own: NDArray[np.int32] | None = None
    """[R]: leading entries of self_tables that each row holds, for later steps too; None: unknown. A beam may read
    blocks of other beams there."""
    max_num_logprobs: int = 0
    """The largest num_logprobs of sampling, at least 0: the width of the candidates in Samples."""
    num_due: int | None = None
    """Leading rows that must step now. The others have not decoded yet, and a runner may leave all of them to the next
    step: then Samples ends before them, and their numbers must be the same there. None: all rows are due."""

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, N."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        return len(self.source_lens)

    def part(self, start: int, stop: int) -> DecodeBatch:
        """Return rows start .. stop-1, as views, of a batch in which every row feeds and samples one token."""
        rows, sampling = slice(start, stop), self.sampling
        return DecodeBatch(
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            offsets=self.offsets[: stop - start + 1],
            self_tables=self.self_tables[rows],
            cross_tables=self.cross_tables[rows],
            source_lens=self.source_lens[rows],
            sampling=replace(
                sampling,
                picks=sampling.picks[: stop - start],
                float_params=sampling.float_params[rows],
                int_params=sampling.int_params[rows],
                edit_offsets=sampling.edit_offsets[start : stop + 1],
            ),
            num_own=None if self.num_own is None else self.num_own[rows],
            max_num_logprobs=self.max_num_logprobs,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Limits and properties of a model as its runner serves it."""

    max_rows: int
    """Maximum number of rows in a step."""
    vocab_size: int
    """Token ids of targets are below it."""
    source_vocab_size: int
    """Token ids of sources are below it."""
    max_source_len: int
    """Longest source in tokens, end token included; longest prompt for decoder-only models."""
    max_target_len: int
    """Maximum number of target positions that a row can cache, begin token or complete prompt included."""
    has_encoder: bool
    """There are sources to encode; otherwise `encode` is never called and cross tables are ignored."""
    has_decoder: bool
    """There are targets to decode; otherwise there are no blocks and `decode` is never called."""
    bos_id: int
    """Token that starts every target."""
    eos_id: int
    """Token that ends a target."""
    block_size: int = BLOCK_SIZE
    """Source tokens of a cache block."""
    target_block_size: int = BLOCK_SIZE
    """Target tokens of a cache block; max_target_len where a row has a state of constant size, in one block."""
    num_blocks: int
    """Number of cache blocks, for self and cross attention together; their ids are below it."""
    cache_bytes_per_token: int
    """Bytes of keys and values of one token, all layers; the same for self and cross attention. Every block
    has block_size times as many, a block with a state of constant size too."""
    heads: Mapping[HeadTask, HeadConfig] = field(default_factory=dict)
    """Heads that read the encoder output, by task."""
    embedding: EmbeddingConfig | None = None
    """Vector of a text that the model declares; None: it declares none."""
    lowering: Lowering = "native"
    """Kind of the graphs that run."""
    precision: Precision = "float32"
    """Precision of these graphs."""

    @property
    def blocks_of_longest(self) -> int:
        """Blocks of one sequence with the longest source and the longest target; 0 without a decoder."""
        if not self.has_decoder:
            return 0
        source_len = self.max_source_len if self.has_encoder else 0
        return blocks_for(source_len, self.block_size) + blocks_for(self.max_target_len, self.target_block_size)


def facts_of(
    model: ModelConfig, graphs: GraphSet, *, max_rows: int, num_blocks: int = 0, cache_bytes_per_token: int = 0
) -> ModelFacts:
    """Return the facts of a model with these graphs. An encoder-only model has no rows to decode and no cache blocks.

    Only encoder-only models have heads.
    """
    has_encoder, has_decoder = model.architecture != "decoder", model.architecture != "encoder"
    return ModelFacts(
        max_rows=max_rows,
        vocab_size=model.vocab_size,
        source_vocab_size=model.resolved_source_vocab_size,
        # A prompt leaves room for at least one token.
        max_source_len=model.max_source_len if has_encoder else model.max_target_len - 1,
        max_target_len=model.max_target_len if has_decoder else 0,
        has_encoder=has_encoder,
        has_decoder=has_decoder,
        bos_id=model.bos_id,
        eos_id=model.eos_id,
        target_block_size=target_block_size(model),
        num_blocks=num_blocks,
        cache_bytes_per_token=cache_bytes_per_token,
        heads={} if has_decoder else {head.task: head for head in model.heads},
        embedding=None if has_decoder else model.embedding,
        lowering=graphs.lowering,
        precision=graphs.precision,
    )


def head_widths(model: ModelConfig) -> dict[HeadTask, int]:
    """Return the number of outputs of each head: one for each label or token; the width of the transform otherwise."""
    return {head.task: _width_of(head, model.vocab_size) for head in model.heads}


def _width_of(head: HeadConfig, vocab_size: int) -> int:
    if head.task == "fill_mask":
        return vocab_size
    return len(head.labels) if head.labels else head.transform_width or 0


class Runner(Protocol):
    """A model whose running sequences are rows 0 .. R-1 of every step. Used from one thread only."""

    facts: ModelFacts

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


class PartialRunner:
    """Methods of Runner for a model that lacks heads, a decoder or a cache. The engine never calls them there."""

    facts: ModelFacts

    def run_head(self, task: HeadTask, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Raise NotImplementedError; only encoder-only models have heads."""
        raise NotImplementedError(f"this model has no {task} head")

    def decode(self, batch: DecodeBatch) -> Samples:
        """Raise NotImplementedError."""
        raise NotImplementedError("an encoder-only model decodes nothing")

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError("an encoder-only model has no cache blocks")

    def free_cache(self) -> None:
        """Do nothing: without a cache, or with one in the memory of a GPU, there is nothing to return."""
