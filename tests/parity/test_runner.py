"""The server's runner over real exports, against the PyTorch model and against itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from antiphon.model.bundle import Bundle, GraphSet, Precision
from antiphon.model.checkpoint import Checkpoint
from antiphon.model.verify import TOLERANCES, compare
from antiphon.service.kv_cache import BlockPool, blocks_for
from antiphon.service.model_runner import ModelRunner
from antiphon.service.native_runner import NativeRunner
from tests.batches import batch_of

SOURCE_LENS = (1, 5, 5, 9, 17, 17, 17, 48)
STEPS = 24
Logits = NDArray[np.float32]


def random_batch(vocab_size: int) -> tuple[list[list[int]], NDArray[np.int64]]:
    """Sources, and [B, STEPS] tokens to feed."""
    generator = np.random.default_rng(7)
    sources = [[int(i) for i in generator.integers(4, vocab_size, length)] for length in SOURCE_LENS]
    tokens = generator.integers(4, vocab_size, (len(sources), STEPS))
    tokens[:, 0] = 1
    return sources, tokens


def run_batch(runner: ModelRunner, sources: list[list[int]], tokens: NDArray[np.int64]) -> Logits:
    """Logits [B, STEPS, V] of sources that decode together."""
    runner.encode(sources, 0)
    source_lens = [len(source) for source in sources]
    steps = [
        runner.logits(batch_of(tokens[:, step : step + 1].tolist(), [step] * len(sources), source_lens)).copy()
        for step in range(STEPS)
    ]
    return np.stack(steps, axis=1)


def run_native(runner: NativeRunner, sources: list[list[int]], tokens: NDArray[np.int64]) -> Logits:
    """Log-probabilities [B, STEPS, V] of the same by the native runner."""
    pool = BlockPool(runner.num_blocks, runner.block_size)
    lens = [len(source) for source in sources]
    cross = [pool.allocate(blocks_for(length, runner.block_size)) for length in lens]
    own = [pool.allocate(blocks_for(runner.max_target_len, runner.block_size)) for _ in sources]
    runner.encode(sources, 0, cross)
    width = max(map(len, cross))
    tables = (own, [(*table, *[0] * (width - len(table))) for table in cross])
    scores = np.empty((len(sources), STEPS, runner.vocab_size), np.float32)
    for step in range(STEPS):
        fed, past = tokens[:, step : step + 1].tolist(), [step] * len(sources)
        drawn = runner.decode(batch_of(fed, past, lens, tables=tables, num_logprobs=runner.vocab_size))
        np.put_along_axis(scores[:, step], drawn.top_ids, drawn.top_logprobs, axis=1)
    return scores


def graph_sets(bundle: Bundle, precision: Precision) -> list[GraphSet]:
    return [
        graphs for graphs in bundle.manifest.graphs if graphs.precision == precision and graphs.lowering != "native"
    ]


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_runner_agrees_with_pytorch(bundle: Bundle, checkpoint: Checkpoint, precision: Precision) -> None:
    sources, tokens = random_batch(checkpoint.config.vocab_size)
    with torch.no_grad():
        pairs = zip(sources, tokens, strict=True)
        expected = [checkpoint.model(torch.tensor([s]), torch.from_numpy(t[None]))[0].numpy() for s, t in pairs]
    for graphs in graph_sets(bundle, precision):
        runner = ModelRunner(bundle, max_rows=8, threads=1, precision=precision, lowering=graphs.lowering)
        found = run_batch(runner, sources, tokens)
        flat = found.reshape(-1, found.shape[-1])
        assert compare(flat, np.concatenate(expected)).excess(TOLERANCES[precision]) is None


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_native_runner_agrees_with_pytorch(bundle: Bundle, checkpoint: Checkpoint, precision: Precision) -> None:
    sources, tokens = random_batch(checkpoint.config.vocab_size)
    with torch.no_grad():
        pairs = zip(sources, tokens, strict=True)
        logits = [checkpoint.model(torch.tensor([s]), torch.from_numpy(t[None]))[0] for s, t in pairs]
    expected = torch.log_softmax(torch.cat(logits), dim=-1).numpy()
    runner = NativeRunner(bundle, max_rows=8, threads=1, precision=precision)
    found = run_native(runner, sources, tokens)
    assert compare(found.reshape(expected.shape), expected).excess(TOLERANCES[precision]) is None


def test_native_runner_workspace_does_not_depend_on_how_tokens_are_divided(bundle: Bundle) -> None:
    runner = NativeRunner(bundle, max_rows=8, threads=1)
    reports = [
        runner.encode(
            [[5] * length] * (48 // length), 0, [(row,) * blocks_for(length, 16) for row in range(48 // length)]
        )
        for length in (6, 12, 48)
    ]
    peaks = [report.peak_workspace_bytes or 0 for report in reports]
    # Attention's scratch, 64 bytes a token of the longest source, is all that may differ.
    assert min(peaks) > 0
    assert max(peaks) - min(peaks) <= 64 * 48


@pytest.mark.parametrize("threads", [1, 2])
def test_runner_gives_int8_rows_the_same_bits_alone_and_in_a_crowd(bundle: Bundle, threads: int) -> None:
    sources, tokens = random_batch(bundle.manifest.model.vocab_size)
    together = run_batch(ModelRunner(bundle, max_rows=8, threads=threads, precision="int8"), sources, tokens)
    alone = ModelRunner(bundle, max_rows=1, threads=threads, precision="int8")
    for row, source in enumerate(sources):
        np.testing.assert_array_equal(run_batch(alone, [source], tokens[row : row + 1])[0], together[row])


def test_runner_gives_float32_rows_the_same_logits_alone_and_in_a_crowd(bundle: Bundle) -> None:
    sources, tokens = random_batch(bundle.manifest.model.vocab_size)
    together = run_batch(ModelRunner(bundle, max_rows=8, threads=1, precision="float32"), sources, tokens)
    alone = ModelRunner(bundle, max_rows=1, threads=1, precision="float32")
    for row, source in enumerate(sources):
        # ONNX Runtime's float32 product may choose another kernel, and so another order of sums, for one row.
        np.testing.assert_allclose(run_batch(alone, [source], tokens[row : row + 1])[0], together[row], atol=1e-5)


def test_runner_serves_every_kind_of_positions(variant: Bundle) -> None:
    sources, tokens = random_batch(variant.manifest.model.vocab_size)
    together = run_batch(ModelRunner(variant, max_rows=8, threads=1), sources, tokens)
    alone = ModelRunner(variant, max_rows=1, threads=1)
    np.testing.assert_array_equal(run_batch(alone, sources[3:4], tokens[3:4])[0], together[3])


def test_runner_workspace_grows_linearly_fused_and_by_score_matrices_eager(bundle: Bundle) -> None:
    bends = {}
    for graphs in graph_sets(bundle, "float32"):
        runner = ModelRunner(bundle, max_rows=1, threads=1, precision="float32", lowering=graphs.lowering)
        short, middle, long = (runner.encode([[5] * n], 0).peak_workspace_bytes or 0 for n in (16, 32, 48))
        bends[graphs.lowering] = long - 2 * middle + short
    assert bends["contrib"] == 0
    score_matrix = bundle.manifest.model.num_heads * 4
    assert bends["eager"] >= score_matrix * (48**2 - 2 * 32**2 + 16**2)
