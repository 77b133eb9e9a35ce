"""Explainers with invented weights, for servers of a fake model."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NUM_LAYERS, NUM_HEADS = 2, 3
Weights = NDArray[np.float32]


class FakeExplainer:
    """Explainer with weights that depend on both texts. Records its calls."""

    def __init__(self, longest_target: int = 1000) -> None:
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.types: list[tuple[int, ...]] = []
        self._longest_target = longest_target

    def explain(
        self, source_ids: Sequence[int] = (), target_ids: Sequence[int] = (), type_ids: Sequence[int] = ()
    ) -> dict[str, Weights]:
        self.asked.append((tuple(source_ids), tuple(target_ids)))
        self.types.append(tuple(type_ids))
        num_source, num_target = len(source_ids), len(target_ids)
        shapes = {
            "encoder_self": (num_source,) * 2,
            "decoder_self": (num_target,) * 2,
            "cross": (num_target, num_source),
        }
        return {name: _weights(*shape) for name, shape in shapes.items() if min(shape) > 0}

    def longest_target(self, source_len: int) -> int:
        return self._longest_target


def _weights(rows: int, columns: int) -> Weights:
    """Return weights in which layer 0 attends to one token and layer 1 equally to all."""
    weights = np.zeros((NUM_LAYERS, NUM_HEADS, rows, columns), np.float32)
    weights[0, :, :, 0] = 1
    weights[1] = 1 / columns
    return weights


class HeldExplainer(FakeExplainer):
    """Explainer that blocks every call until released, and records the calling threads."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()
        self.release = threading.Event()
        self.threads: set[int] = set()

    def explain(
        self, source_ids: Sequence[int] = (), target_ids: Sequence[int] = (), type_ids: Sequence[int] = ()
    ) -> dict[str, Weights]:
        self.threads.add(threading.get_ident())
        self.came.set()
        if not self.release.wait(timeout=60):
            raise AssertionError("the test did not release the explainer")
        return super().explain(source_ids, target_ids, type_ids)
