"""Runner that computes nothing, so that what remains of a step is the engine's own work."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.heads import EmbeddingConfig, HeadConfig
from antiphon.architecture.heads import Task as HeadTask
from antiphon.runtime.runner import DecodeBatch, EncodeReport, Samples

_FIRST_WORD_ID = 4


class NullRunner:
    """Fulfils `runner.Runner` for an encoder-decoder whose every target has `target_len` tokens, end token included.

    num_steps: decoder steps so far. thread_s: CPU seconds of the thread that called `decode`, at the last call.
    """

    vocab_size = source_vocab_size = 8000
    max_source_len = max_target_len = 256
    has_encoder = has_decoder = True
    bos_id, eos_id = 1, 2
    block_size = 16
    cache_bytes_per_token = 1
    heads: Mapping[HeadTask, HeadConfig] = {}
    embedding: EmbeddingConfig | None = None

    def __init__(self, max_rows: int, target_len: int) -> None:
        self.max_rows = max_rows
        self.num_blocks = 2 * max_rows * (self.max_source_len + self.max_target_len) // self.block_size
        self.num_steps = 0
        self.thread_s = 0.0
        self._last = target_len - 1

    def encode(
        self,
        sources: Sequence[Sequence[int]],
        block_tables: Sequence[Sequence[int]],
        *,
        type_ids: Sequence[Sequence[int]] = (),
        keep_memory: bool = False,
    ) -> EncodeReport:
        """Return a report without measurements."""
        lengths = [len(source) for source in sources]
        return EncodeReport(
            rows=len(sources),
            num_tokens=sum(lengths),
            longest=max(lengths),
            peak_workspace_bytes=None,
            predicted_fused_bytes=None,
            predicted_materialised_bytes=0,
        )

    def run_head(self, task: HeadTask, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Never called: there are no heads."""
        raise NotImplementedError

    def decode(self, batch: DecodeBatch) -> Samples:
        """Return the end token for rows at their last position, else the same word for every row.

        The candidates of a row are successive ids; the end token is the first one at the last position.
        """
        self.num_steps, self.thread_s = self.num_steps + 1, time.thread_time()
        is_last = batch.positions >= self._last
        width = batch.max_num_logprobs
        top_ids = np.tile(_FIRST_WORD_ID + np.arange(width), (batch.num_rows, 1))
        if width:
            top_ids[is_last, 0] = self.eos_id
        scores = np.tile(-np.arange(1, width + 1, dtype=np.float32), (batch.num_rows, 1))
        token_ids = np.where(is_last, self.eos_id, _FIRST_WORD_ID).astype(np.int64)
        return Samples(token_ids, np.zeros(batch.num_rows, np.float32), top_ids, scores, scores)

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Do nothing: blocks have no content."""

    def free_cache(self) -> None:
        """Do nothing: blocks have no content."""
