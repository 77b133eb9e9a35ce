"""ONNX Runtime session for the explain graph of a bundle; it keeps no memory between runs.

The server and the check after an export use it. The caller chooses the number of threads and limits the lengths.
Imports no torch.

    source_ids, type_ids  [1, S] int64     of models with an encoder; types of models with token types
    target_ids            [1, T] int64     of models with a decoder: all tokens that it reads, the prompt included
    encoder_self          [L, H, S, S]     attention weights, float32
    decoder_self          [Ld, H, T, T]    of models whose decoder has self-attention
    cross                 [Ld, H, T, S]    of models with both parts

Axes: S source, T target, H heads, L encoder layers, Ld decoder layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.session import seldom_session
from antiphon.errors import GraphError

Floats = NDArray[np.float32]


def explain_inputs(config: ModelConfig) -> list[str]:
    """Return the names of the graph's inputs."""
    wanted = {
        "source_ids": config.encoder_layers > 0,
        "type_ids": config.token_types > 0,
        "target_ids": config.decoder_layers > 0,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


class ExplainSession:
    """Session of one explain graph, with a pool of `threads` threads. Raises GraphError naming the file."""

    def __init__(self, path: Path, *, threads: int = 1) -> None:
        self._path = path
        try:
            self._session = seldom_session(path, threads)
        except Exception as error:  # onnxruntime's exceptions share no narrower base
            raise GraphError(f"{path}: the explain graph cannot be loaded: {error}") from error
        self._inputs = [port.name for port in self._session.get_inputs()]
        self._outputs = [port.name for port in self._session.get_outputs()]

    def run(
        self, source_ids: Sequence[int] = (), target_ids: Sequence[int] = (), type_ids: Sequence[int] = ()
    ) -> dict[str, Floats]:
        """Return the attention weights by name for the tokens that the encoder and the decoder read.

        The weights of one query sum to 1; masked keys have weight 0. An attention that the model lacks has no entry.
        source_ids: with end token. target_ids: with begin token or prompt. type_ids: token types of the source; empty
        if all are 0. Raises GraphError naming the file when the graph fails.
        """
        types = type_ids or [0] * len(source_ids)
        ids = {"source_ids": source_ids, "type_ids": types, "target_ids": target_ids}
        try:
            inputs = {name: np.array([ids[name]], np.int64) for name in self._inputs}
            return dict(zip(self._outputs, self._session.run(self._outputs, inputs), strict=True))
        except Exception as error:  # onnxruntime's exceptions share no narrower base
            raise GraphError(f"{self._path}: the explain graph failed: {error}") from error
