"""Runner that computes nothing, so that what remains of a step is the engine's own work."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.heads import Task as HeadTask
from antiphon.ops.cache_geometry import BLOCK_SIZE
from antiphon.runtime.runner import DecodeBatch, EncodeReport, ModelFacts, Samples

_EOS_ID, _FIRST_WORD_ID = 2, 4


class NullRunner:
    """Fulfils `runner.Runner` for an encoder-decoder whose every target has `target_len` tokens, end token included.

    num_steps: decoder steps so far. thread_s: CPU seconds of the thread that called `decode`, at the last call.
    """

    def __init__(self, max_rows: int, target_len: int) -> None:
        self.facts = ModelFacts(
            max_rows=max_rows,
            vocab_size=8000,
            source_vocab_size=8000,
            max_source_len=256,
            max_target_len=256,
            has_encoder=True,
            has_decoder=True,
            bos_id=1,
            eos_id=_EOS_ID,
            num_blocks=2 * max_rows * (256 + 256) // BLOCK_SIZE,
            cache_bytes_per_token=1,
        )
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
            top_ids[is_last, 0] = _EOS_ID
        scores = np.tile(-np.arange(1, width + 1, dtype=np.float32), (batch.num_rows, 1))
        token_ids = np.where(is_last, _EOS_ID, _FIRST_WORD_ID).astype(np.int64)
        return Samples(token_ids, np.zeros(batch.num_rows, np.float32), top_ids, scores, scores)

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Do nothing: blocks have no content."""

    def free_cache(self) -> None:
        """Do nothing: blocks have no content."""
