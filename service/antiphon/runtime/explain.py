"""Attention weights of a bundle's model, one call at a time, outside the engine.

Loads the explain graph at the first call and bounds the size of an answer. Knows token ids, not text.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from antiphon.bundle.explain_session import ExplainSession, Floats
from antiphon.bundle.manifest import Bundle, Precision
from antiphon.domain.errors import Unsupported

# Maximum number of attention weights of one answer: with 4 bytes each, in memory and on the wire, 64 MiB. The number
# grows with the square of the lengths; the shipped model's longest source and target have 5.2 million.
MAX_WEIGHTS = 1 << 24


class Explainer:
    """Runs the explain graph of a bundle. Calls may come from any thread; they wait for each other."""

    def __init__(self, bundle: Bundle, *, threads: int = 1, precision: Precision | None = None) -> None:
        """Load nothing yet. precision: of the other graphs; only int8 and float32 have explain graphs."""
        names = {graphs.precision: graphs.explain for graphs in bundle.manifest.graphs if graphs.explain is not None}
        choices: tuple[Precision, ...] = (precision,) if precision in ("int8", "float32") else ("int8", "float32")
        self._bundle = bundle
        self._name = next((names[choice] for choice in choices if choice in names), None)
        self._threads = threads
        self._session: ExplainSession | None = None
        self._lock = threading.Lock()

    @property
    def is_available(self) -> bool:
        """True when the bundle has an explain graph."""
        return self._name is not None

    def num_weights(self, source_len: int, target_len: int) -> int:
        """Return the number of attention weights for tokens that encoder and decoder read; 0 for a missing part."""
        model = self._bundle.manifest.model
        per_head = model.encoder_layers * source_len**2 + model.decoder_layers * target_len * (target_len + source_len)
        return model.num_heads * per_head

    def longest_target(self, source_len: int) -> int:
        """Return the largest number of decoder tokens whose weights, with a source's, are at most MAX_WEIGHTS."""
        model = self._bundle.manifest.model
        left = (MAX_WEIGHTS // model.num_heads - model.encoder_layers * source_len**2) // model.decoder_layers
        # The positive root of T^2 + source_len * T = left.
        return (math.isqrt(source_len**2 + 4 * left) - source_len) // 2 if left > 0 else 0

    def explain(
        self, source_ids: Sequence[int] = (), target_ids: Sequence[int] = (), type_ids: Sequence[int] = ()
    ) -> dict[str, Floats]:
        """Return the attention weights by name (explain_session.py) for the tokens that encoder and decoder read.

        source_ids: with end token; empty for a decoder-only model. target_ids: with begin token, or prompt; empty for
        an encoder-only model. type_ids: token types of the source; empty if all are 0.

        The caller has checked lengths and ids. Raises Unsupported if the bundle has no explain graph or the answer
        would exceed MAX_WEIGHTS, GraphError if the graph fails.
        """
        if self._name is None:
            raise Unsupported(
                f"bundle {self._bundle.manifest.name!r} holds no explain graph; antiphon export writes one"
            )
        num_weights = self.num_weights(len(source_ids), len(target_ids))
        if num_weights > MAX_WEIGHTS:
            raise Unsupported(
                f"{len(source_ids)} source and {len(target_ids)} target tokens have {num_weights} attention weights; "
                f"at most {MAX_WEIGHTS} are computed"
            )
        with self._lock:
            if self._session is None:
                self._session = ExplainSession(self._bundle.file(self._name), threads=self._threads)
            return self._session.run(source_ids, target_ids, type_ids)
