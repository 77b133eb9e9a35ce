"""Random logits, and their distributions after transformers' logits warpers."""

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.ops.logits_warpers import Warp

Logits = NDArray[np.float32]


def logits_of(rows: int, vocab_size: int, *, seed: int = 0, scale: float = 3.0) -> Logits:
    generator = np.random.default_rng(seed)
    return (scale * generator.standard_normal((rows, vocab_size))).astype(np.float32)


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def reference_probabilities(logits: Logits, warp: Warp) -> NDArray[np.float64]:
    """Return the distribution that transformers samples from, in float64."""
    torch = pytest.importorskip("torch")
    warpers = pytest.importorskip("transformers.generation.logits_process")
    chain = warpers.LogitsProcessorList([warpers.TemperatureLogitsWarper(warp.temperature)])
    if warp.top_k:
        chain.append(warpers.TopKLogitsWarper(warp.top_k))
    if warp.top_p < 1.0:
        chain.append(warpers.TopPLogitsWarper(warp.top_p))
    if warp.min_p > 0.0:
        chain.append(warpers.MinPLogitsWarper(warp.min_p))
    if warp.typical_p < 1.0:
        chain.append(warpers.TypicalLogitsWarper(warp.typical_p))
    scores = chain(None, torch.from_numpy(logits.astype(np.float64))[None])
    kept: NDArray[np.float64] = torch.softmax(scores, dim=-1)[0].numpy()
    return kept
