"""ONNX Runtime session for the explain graph of a bundle; it keeps no memory between runs.

The server and the check after an export use it. The caller chooses the number of threads and limits the lengths.
Imports no torch.

Axes: S source, T target, H heads, L encoder layers, Ld decoder layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from antiphon.model.bundle.graph import GraphError
from antiphon.model.bundle.session import explain_session

INPUTS = ["source_ids", "target_ids"]
OUTPUTS = ["encoder_self", "decoder_self", "cross"]

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Attention weights: encoder_self [L, H, S, S], decoder_self [Ld, H, T, T], cross [Ld, H, T, S] float32.

    The weights of one query sum to 1; masked keys have weight 0.
    """

    encoder_self: Floats
    decoder_self: Floats
    cross: Floats


class ExplainSession:
    """Session of one explain graph, with a pool of `threads` threads. Raises GraphError naming the file."""

    def __init__(self, path: Path, *, threads: int = 1) -> None:
        self._path = path
        try:
            self._session = explain_session(path, threads)
        except Exception as error:  # onnxruntime's exceptions share no narrower base
            raise GraphError(f"{path}: the explain graph cannot be loaded: {error}") from error

    def run(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> Explanation:
        """Return the attention weights for a source with its end token and a target with its begin token.

        Raises GraphError naming the file when the graph fails.
        """
        arrays = (np.array([ids], np.int64) for ids in (source_ids, target_ids))
        try:
            outputs = self._session.run(OUTPUTS, dict(zip(INPUTS, arrays, strict=True)))
        except Exception as error:  # onnxruntime's exceptions share no narrower base
            raise GraphError(f"{self._path}: the explain graph failed: {error}") from error
        encoder_self, decoder_self, cross = outputs
        return Explanation(encoder_self=encoder_self, decoder_self=decoder_self, cross=cross)
