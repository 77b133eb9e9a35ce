"""Native graphs of an encoder-only model in plain ONNX Runtime: sources to states, and states to outputs of a head.

For verification and tests. native_stepper.py is the same for models with a decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import Task
from antiphon.bundle.manifest import GraphSet
from antiphon.bundle.native_stepper import run_native
from antiphon.bundle.session import native_session

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class NativeEncoder:
    """Encoder and heads of a native graph set, with a pool of `threads` threads in each session."""

    def __init__(self, directory: Path, graphs: GraphSet, config: ModelConfig, *, threads: int = 1) -> None:
        self._has_types = config.token_types > 0
        self._encoder = native_session(directory / graphs.encoder_file, threads)
        self._heads = {task: native_session(directory / name, threads) for task, name in graphs.heads.items()}

    def encode(self, sources: Sequence[Ids], types: Sequence[Ids] | None = None) -> list[Floats]:
        """Return float32 states [S, M] of each source [S] int64, all encoded in one packed batch.

        types: token types [S] int64 of each source; None: type 0 for all tokens.
        """
        lens = [len(source) for source in sources]
        offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.concatenate(sources),
            "positions": np.concatenate([np.arange(length, dtype=np.int32) for length in lens]),
            "offsets": offsets,
        }
        if self._has_types:
            inputs["type_ids"] = np.zeros(offsets[-1], np.int64) if types is None else np.concatenate(types)
        (memory,) = run_native(self._encoder, inputs)
        return np.split(memory, offsets[1:-1])

    def read_out(self, task: Task, hidden: Floats) -> Floats:
        """Return the outputs [K, O] of a task's head for states [K, M], float32."""
        (outputs,) = run_native(self._heads[task], {"hidden": hidden})
        return outputs
