"""The stepper with contrib and eager graphs built by hand, compared with the same network recomputed in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.bundle.manifest import Bundle, Lowering
from antiphon.bundle.stepper import GraphStepper
from tests.unit.graphs.tiny_graphs import TinyModel, tiny_config, tiny_model, write_bundle

# float32 sums in another order than NumPy's, over products of width 16.
TOLERANCE = 1e-5
SOURCES = [np.array(ids, np.int64) for ids in ((5, 6, 7, 2), (3, 4, 5, 6, 7, 8, 2), (8, 9, 10, 2))]
TARGETS = np.array([(1, 4, 9), (1, 5, 3), (1, 11, 6)], np.int64)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model(tiny_config())


@pytest.fixture(scope="module")
def bundle(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("bundle") / "tiny", model, ("contrib", "eager"))


@pytest.mark.parametrize("lowering", ["contrib", "eager"])
def test_stepper_decodes_rows_of_different_lengths_like_the_recomputed_network(
    bundle: Bundle, model: TinyModel, lowering: Lowering
) -> None:
    stepper = GraphStepper(bundle.path, bundle.graph_set("float32", lowering), model.config)
    # Graphs built by hand state the capacity of their caches, which is the model's limits.
    source_lens = np.array([len(source) for source in SOURCES], np.int32)
    cross_kv = stepper.fill_cross(SOURCES, model.config.max_source_len)
    self_kv = stepper.caches("decoder", len(SOURCES), model.config.max_target_len)
    for position, token_ids in enumerate(TARGETS.T):
        past_lens = np.full(len(SOURCES), position, np.int32)
        logits = stepper.step(token_ids, past_lens, source_lens, self_kv, cross_kv)
        for row, source in enumerate(SOURCES):
            expected = model.logits(source.tolist(), TARGETS[row, : position + 1].tolist())
            np.testing.assert_allclose(logits[row], expected, atol=TOLERANCE)
