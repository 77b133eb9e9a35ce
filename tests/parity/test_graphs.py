"""Exported graphs compared with PyTorch, and with other batches.

Tolerances: float32 graphs add in another order than PyTorch, and 1e-4 on logits is many times the difference. int8
has the tolerance of the check after the export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.bundle.graph import Graph
from antiphon.bundle.manifest import Bundle, Precision
from antiphon.export.bundle_model import Ids, NativeStepper
from antiphon.export.export import write_graphs
from antiphon.export.profile import measure_peak
from antiphon.export.verify import TOLERANCES, compare, step_through, verify
from antiphon.ops.cache_geometry import pool_axes
from antiphon.ops.workspace import Workspace
from antiphon.transformer.random_model import random_transformer
from tests.parity.exports import native_stepper

STEPS = 6


def draw(bundle: Bundle, lens: list[int], seed: int = 1) -> tuple[list[Ids], Ids]:
    random = np.random.default_rng(seed)
    vocab = bundle.manifest.model.vocab_size
    return [random.integers(4, vocab, length) for length in lens], random.integers(4, vocab, (len(lens), STEPS))


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_graphs_agree_with_pytorch_in_every_variant(variant: Bundle, precision: Precision) -> None:
    verify(variant.path, variant.graph_set(precision), random_transformer(variant.manifest.model), seed=7)


def test_int8_is_close_to_float32(bundle: Bundle) -> None:
    sources, target = draw(bundle, [4, 7, 30, 12, 12, 12, 1, 40])
    exact = step_through(native_stepper(bundle, "float32"), sources, target)
    coarse = step_through(native_stepper(bundle, "int8"), sources, target)
    comparison = compare(*(logits.reshape(-1, logits.shape[-1]) for logits in (coarse, exact)))
    assert comparison.excess(TOLERANCES["int8"]) is None


def test_float16_cache_changes_logits_less_than_int8_weights(bundle: Bundle, tmp_path: Path) -> None:
    """Rounding of keys to float16 moves a few activations to another int8 level."""
    sources, target = draw(bundle, [3, 9, 17, 40])
    config = bundle.manifest.model
    (coarse_set,) = write_graphs(random_transformer(config), tmp_path, ("int8",), ("native",), "float32")
    runners = (
        native_stepper(bundle, "int8"),
        native_stepper(bundle, "float32"),
        NativeStepper(tmp_path, coarse_set, config),
    )
    rounded, exact, coarse = (
        step_through(runner, sources, target).reshape(-1, config.vocab_size) for runner in runners
    )
    assert compare(rounded, exact).rms_error < 1.2 * compare(coarse, exact).rms_error


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_native_rows_are_bit_identical_alone_and_in_any_batch(bundle: Bundle, precision: Precision) -> None:
    """Packed batches of sources, rows at different positions, one thread and two threads."""
    random = np.random.default_rng(3)
    sources, target = draw(bundle, random.integers(1, 45, 9).tolist())
    runner = native_stepper(bundle, precision)
    single = np.concatenate([step_through(runner, [source], target[[row]]) for row, source in enumerate(sources)])
    for threads in (1, 2):
        runner = native_stepper(bundle, precision, threads=threads)
        for _ in range(3):
            rows = random.permutation(len(sources))[: random.integers(2, len(sources) + 1)]
            crowd = step_through(runner, [sources[row] for row in rows], target[rows])
            np.testing.assert_array_equal(crowd, single[rows])


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_native_prefixes_fed_at_once_equal_tokens_fed_one_by_one(bundle: Bundle, precision: Precision) -> None:
    """Prefixes of several lengths are bit-identical, also beside decoding rows; repeating a token has no effect."""
    sources, target = draw(bundle, [5, 30, 1, 12])
    runner = native_stepper(bundle, precision)
    single = step_through(runner, sources, target)
    sequences, starts = runner.encode(sources, STEPS), np.zeros(4, np.int32)
    for counts in ((3, 1, 6, 2), (1, 1, 1, 4), (2, 4, 1, 1)):
        starts = np.minimum(starts, STEPS - np.array(counts)).astype(np.int32)
        ends = starts + np.array(counts, np.int32)
        pieces = [row[start:end] for row, start, end in zip(target, starts, ends, strict=True)]
        found = runner.step(sequences, pieces, starts)
        np.testing.assert_array_equal(found, single[np.arange(4), ends - 1])
        starts = ends


@pytest.mark.parametrize("lens", [(40,), (1, 48, 30, 17)])
def test_native_encoder_workspace_is_that_of_its_largest_operator(bundle: Bundle, lens: tuple[int, ...]) -> None:
    """The peak is in an attention sublayer or in a feed-forward one, for any layers and lengths.

    Both hold their input, the residual stream (the same tensor if norms come after sums) and their result, and then q,
    k, v and the attention's result, or the inner states.
    """
    config, graphs, workspace = bundle.manifest.model, bundle.graph_set("float32", "native"), Workspace()
    encoder = Graph(bundle.file(graphs.encoder_file), "encoder", workspace)
    tables = np.arange(4 * len(lens), dtype=np.int32).reshape(len(lens), 4)
    inputs: dict[str, NDArray[Any]] = {
        "input_ids": np.full(sum(lens), 5),
        "positions": np.concatenate([np.arange(length, dtype=np.int32) for length in lens]),
        "offsets": np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
        "block_tables": tables,
        "cache": np.zeros((tables.size, *pool_axes(config)), np.float32),
    }
    num_states = 3 if config.norm_placement == "pre" else 2
    widest = num_states * config.d_model + max(4 * config.d_model, config.d_ff)
    peak = measure_peak(encoder, workspace, inputs)
    scratch = 16 * 4 * (max(lens) + 16 + config.resolved_head_dim) + 256  # a tile of scores and one of queries
    assert 4 * widest * sum(lens) <= peak <= 4 * widest * sum(lens) + scratch
