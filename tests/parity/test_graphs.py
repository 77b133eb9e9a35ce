"""Exported graphs compared with PyTorch, with each other, and with other batches.

Tolerances: float32 graphs add in another order than PyTorch, and 1e-4 on logits is many times the difference. int8
has the tolerance of the check after the export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from antiphon.bundle.graph import Graph
from antiphon.bundle.manifest import Bundle, Lowering, Precision
from antiphon.bundle.native_stepper import NativeStepper
from antiphon.bundle.stepper import Floats, GraphStepper, Ids
from antiphon.export.export import write_graphs
from antiphon.export.profile import measure_peak
from antiphon.export.verification.verify import TOLERANCES, compare, step_through, verify
from antiphon.ops.cache_geometry import pool_axes
from antiphon.ops.workspace import Workspace
from antiphon.transformer.random_model import random_transformer
from tests.parity.exports import native_stepper, stepper

STEPS = 6


def draw(bundle: Bundle, lens: list[int], seed: int = 1) -> tuple[list[Ids], Ids]:
    random = np.random.default_rng(seed)
    vocab = bundle.manifest.model.vocab_size
    return [random.integers(4, vocab, length) for length in lens], random.integers(4, vocab, (len(lens), STEPS))


def alone(runner: GraphStepper, sources: list[Ids], target: Ids) -> Floats:
    return np.concatenate([step_through(runner, [source], target[[row]]) for row, source in enumerate(sources)])


@pytest.mark.parametrize("lowering", ["native", "contrib"])
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_graphs_agree_with_pytorch_in_every_variant(variant: Bundle, precision: Precision, lowering: Lowering) -> None:
    graphs = variant.graph_set(precision, lowering)
    verify(variant.path, graphs, random_transformer(variant.manifest.model), seed=7)


@pytest.mark.parametrize("lowering", ["contrib", "eager"])
def test_graphs_agree_with_pytorch_decoding_whole_targets(bundle: Bundle, lowering: Lowering) -> None:
    sources, target = draw(bundle, [5, 11, 1])
    model = random_transformer(bundle.manifest.model)
    found = step_through(stepper(bundle, "float32", lowering), sources, target)
    for row, source in enumerate(sources):
        with torch.no_grad():
            expected = model(torch.from_numpy(source)[None], torch.from_numpy(target[[row]]))[0].numpy()
        np.testing.assert_allclose(found[row], expected, atol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_eager_graphs_equal_contrib_graphs(bundle: Bundle, precision: Precision) -> None:
    sources, target = draw(bundle, [3, 9, 9, 20])
    fused = step_through(stepper(bundle, precision, "contrib"), sources, target)
    plain = step_through(stepper(bundle, precision, "eager"), sources, target)
    comparison = compare(*(logits.reshape(-1, logits.shape[-1]) for logits in (fused, plain)))
    # An int8 activation between two levels can be rounded either way. This is rare and changes one level of many.
    assert comparison.rms_error < (1e-5 if precision == "float32" else 5e-3)


def test_int8_is_close_to_float32(bundle: Bundle) -> None:
    sources, target = draw(bundle, [4, 7, 30, 12, 12, 12, 1, 40])
    exact = step_through(stepper(bundle, "float32"), sources, target)
    coarse = step_through(stepper(bundle, "int8"), sources, target)
    comparison = compare(*(logits.reshape(-1, logits.shape[-1]) for logits in (coarse, exact)))
    assert comparison.excess(TOLERANCES["int8"]) is None


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_rows_are_bit_identical_alone_and_in_any_batch(bundle: Bundle, precision: Precision) -> None:
    """int8 products are exact. float32 is equal because ONNX Runtime uses one kernel for packed constant weights.

    With session.disable_prepacking a product of a single row uses another kernel and differs in the last bits.
    """
    random = np.random.default_rng(3)
    lens = random.integers(1, 45, 9).tolist()
    lens[4:7] = [lens[3]] * 3  # some rows are encoded together
    sources, target = draw(bundle, lens)
    single = alone(stepper(bundle, precision, threads=1), sources, target)
    for threads in (1, 2):
        runner = stepper(bundle, precision, threads=threads)
        for _ in range(3):
            rows = random.permutation(len(lens))[: random.integers(2, len(lens) + 1)]
            crowd = step_through(runner, [sources[row] for row in rows], target[rows])
            np.testing.assert_array_equal(crowd, single[rows])


def log_softmax(logits: Floats) -> Floats:
    found: Floats = torch.from_numpy(logits).log_softmax(dim=-1).numpy()
    return found


def test_native_graphs_equal_contrib_graphs_at_either_precision(bundle: Bundle, tmp_path: Path) -> None:
    """Both quantise in the same way, so with a float32 cache int8 graphs differ no more than float32 graphs."""
    sources, target = draw(bundle, [3, 9, 17, 40])
    config = bundle.manifest.model
    for graphs in write_graphs(random_transformer(config), tmp_path, ("float32", "int8"), ("native",), "float32"):
        found = step_through(NativeStepper(tmp_path, graphs, config), sources, target)
        expected = log_softmax(step_through(stepper(bundle, graphs.precision, "contrib"), sources, target))
        assert compare(*(values.reshape(-1, config.vocab_size) for values in (found, expected))).rms_error < 1e-5


def test_float16_cache_changes_logits_less_than_int8_weights(bundle: Bundle) -> None:
    """Rounding of keys to float16 moves a few activations to another int8 level."""
    sources, target = draw(bundle, [3, 9, 17, 40])
    found, exact, coarse = (
        log_softmax(step_through(runner, sources, target)).reshape(-1, bundle.manifest.model.vocab_size)
        for runner in (native_stepper(bundle, "int8"), stepper(bundle, "float32"), stepper(bundle, "int8"))
    )
    assert compare(found, exact).rms_error < 1.2 * compare(coarse, exact).rms_error


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


def test_cross_cache_beyond_the_length_of_a_row_has_no_effect(bundle: Bundle) -> None:
    sources, target = draw(bundle, [6])
    runner = stepper(bundle, "int8")
    lens = np.array([6], np.int32)
    found = []
    for capacity in (6, 33):
        cross_kv, self_kv = runner.fill_cross(sources, capacity), runner.caches("decoder", 1, capacity)
        found.append(runner.step(target[:, 0], np.zeros(1, np.int32), lens, self_kv, cross_kv))
    np.testing.assert_array_equal(found[0], found[1])


def test_self_cache_is_written_only_at_the_new_position(bundle: Bundle) -> None:
    sources, target = draw(bundle, [6, 4])
    runner = stepper(bundle, "float32")
    cross_kv, self_kv = runner.fill_cross(sources, 6), runner.caches("decoder", 2, 8)
    before = {name: cache.copy() for name, cache in self_kv.items()}
    runner.step(target[:, 0], np.array([2, 5], np.int32), np.array([6, 4], np.int32), self_kv, cross_kv)
    for name, cache in self_kv.items():
        changed = (cache != before[name]).any(axis=(1, 3))
        np.testing.assert_array_equal(np.argwhere(changed), [[0, 2], [1, 5]])


@pytest.mark.parametrize("lens", [(40,), (1, 48, 30, 17)])
def test_native_encoder_workspace_is_that_of_its_largest_operator(bundle: Bundle, lens: tuple[int, ...]) -> None:
    """The peak is in an attention sublayer or in a feed-forward one, for any layers and lengths.

    Both hold their input, the residual stream (the same tensor if norms come after sums) and their result, and then q,
    k, v and the attention's result, or the inner states.
    """
    config, graphs, workspace = bundle.manifest.model, bundle.graph_set("float32", "native"), Workspace()
    encoder = Graph(bundle.file(graphs.encoder_file), "encoder", 1, workspace)
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


def test_workspace_grows_linearly_when_fused_and_with_score_matrices_when_eager(bundle: Bundle) -> None:
    bends, workspace = {}, Workspace(is_own=True)
    lowerings: tuple[Lowering, ...] = ("contrib", "eager")
    for lowering in lowerings:
        file = bundle.file(bundle.graph_set("float32", lowering).encoder_file)
        encoder = Graph(file, "encoder", 1, workspace)
        short, middle, long = (
            measure_peak(encoder, workspace, {"input_ids": np.full((1, length), 5, np.int64)})
            for length in (16, 32, 48)
        )
        bends[lowering] = long - 2 * middle + short
    assert bends["contrib"] == 0
    score_matrix = bundle.manifest.model.num_heads * 4
    assert bends["eager"] >= score_matrix * (48**2 - 2 * 32**2 + 16**2)
