"""Limits and facts of a model that every runner reports, and what a runner of one kind of model cannot do.

The protocol in runner.py describes the attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import EmbeddingConfig, HeadConfig
from antiphon.architecture.heads import Task as HeadTask
from antiphon.bundle.manifest import GraphSet
from antiphon.ops.cache_geometry import BLOCK_SIZE
from antiphon.runtime.runner import DecodeBatch, Samples


class _ModelLimits:
    """Facts that every kind of model has. lowering, precision: of the graphs that run."""

    block_size = BLOCK_SIZE

    def __init__(self, model: ModelConfig, graphs: GraphSet, max_rows: int) -> None:
        self.max_rows = max_rows
        self.vocab_size = model.vocab_size
        self.source_vocab_size = model.resolved_source_vocab_size
        self.bos_id = model.bos_id
        self.eos_id = model.eos_id
        self.lowering = graphs.lowering
        self.precision = graphs.precision

    def free_cache(self) -> None:
        """Do nothing: without a cache, or with one in the memory of a GPU, there is nothing to return."""


class DecodingModel(_ModelLimits):
    """Facts of an encoder-decoder or a decoder-only model. It has no heads."""

    has_decoder = True
    embedding: EmbeddingConfig | None = None
    heads: Mapping[HeadTask, HeadConfig] = MappingProxyType({})

    def __init__(self, model: ModelConfig, graphs: GraphSet, max_rows: int) -> None:
        super().__init__(model, graphs, max_rows)
        self.has_encoder = model.architecture != "decoder"
        # A prompt leaves room for at least one token.
        self.max_source_len = model.max_source_len if self.has_encoder else model.max_target_len - 1
        self.max_target_len = model.max_target_len

    def run_head(self, task: HeadTask, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Raise NotImplementedError; only encoder-only models have heads."""
        raise NotImplementedError(f"this model has no {task} head")


class EncodingModel(_ModelLimits):
    """Facts of an encoder-only model. It has no rows and no cache blocks."""

    has_encoder = True
    has_decoder = False
    num_blocks = 0
    cache_bytes_per_token = 0
    max_target_len = 0

    def __init__(self, model: ModelConfig, graphs: GraphSet, max_rows: int) -> None:
        super().__init__(model, graphs, max_rows)
        self.max_source_len = model.max_source_len
        self.heads: Mapping[HeadTask, HeadConfig] = {head.task: head for head in model.heads}
        self.embedding = model.embedding
        self._widths = {head.task: _width_of(head, model.vocab_size) for head in model.heads}

    def decode(self, batch: DecodeBatch) -> Samples:
        """Raise NotImplementedError; the engine never calls this without a decoder."""
        raise NotImplementedError("an encoder-only model decodes nothing")

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Raise NotImplementedError; the engine never calls this without blocks."""
        raise NotImplementedError("an encoder-only model has no cache blocks")


def _width_of(head: HeadConfig, vocab_size: int) -> int:
    """Return the number of outputs: one for each label or token; for pool and embed the width of the transform."""
    if head.task == "fill_mask":
        return vocab_size
    return len(head.labels) if head.labels else head.transform_width or 0
