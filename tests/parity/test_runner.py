"""The server's runner over exported models, compared with the PyTorch model and with other batches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from antiphon.bundle.manifest import Bundle, Precision
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.engine.kv_cache import BlockPool
from antiphon.export.verify import TOLERANCES, compare
from antiphon.ops.cache_geometry import blocks_for
from antiphon.ops.sampling import Samples
from antiphon.runtime import encoder
from antiphon.runtime.native import NativeRunner
from tests.batches import SampleSettings, Tables, batch_of, sampling_of

# float32 sums in another order, through two layers of width 64 and their norms.
MEMORY_TOLERANCE = 1e-5
SOURCE_LENS = (1, 5, 5, 9, 17, 17, 17, 48)
STEPS = 24
Logits = NDArray[np.float32]


def random_batch(vocab_size: int) -> tuple[list[list[int]], NDArray[np.int64]]:
    """Return sources, and tokens [B, STEPS] to feed."""
    generator = np.random.default_rng(7)
    sources = [[int(i) for i in generator.integers(4, vocab_size, length)] for length in SOURCE_LENS]
    tokens = generator.integers(4, vocab_size, (len(sources), STEPS))
    tokens[:, 0] = 1
    return sources, tokens


def encode_native(runner: NativeRunner, sources: list[list[int]]) -> tuple[list[int], tuple[Tables, Tables]]:
    """Encode sources. Return their lengths, and the self and cross tables of their rows."""
    pool = BlockPool(runner.facts.num_blocks, runner.facts.block_size)
    lens = [len(source) for source in sources]
    cross = [pool.allocate(blocks_for(length, runner.facts.block_size)) for length in lens]
    own = [pool.allocate(blocks_for(runner.facts.max_target_len, runner.facts.block_size)) for _ in sources]
    runner.encode(sources, cross)
    width = max(map(len, cross))
    return lens, (own, [(*table, *[0] * (width - len(table))) for table in cross])


def run_native(runner: NativeRunner, sources: list[list[int]], tokens: NDArray[np.int64]) -> Logits:
    """Return the native runner's log-probabilities [B, STEPS, V]."""
    lens, tables = encode_native(runner, sources)
    scores = np.empty((len(sources), STEPS, runner.facts.vocab_size), np.float32)
    for step in range(STEPS):
        fed, past = tokens[:, step : step + 1].tolist(), [step] * len(sources)
        drawn = runner.decode(batch_of(fed, past, lens, tables=tables, num_logprobs=runner.facts.vocab_size))
        np.put_along_axis(scores[:, step], drawn.top_ids, drawn.top_logprobs, axis=1)
    return scores


def test_passes_of_any_shapes_one_after_another_fill_the_cache_as_first_passes(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes share arrays, and bindings are kept by shape: here two of them at most."""
    monkeypatch.setattr(encoder, "_MAX_BOUND", 2)
    generator, runner = np.random.default_rng(3), NativeRunner(bundle, max_rows=8, threads=2)
    for lens in ((5,), (17, 5), (5,), (1, 1, 3), (5,), (20, 2), (17, 5)):
        sources = [[int(i) for i in generator.integers(4, runner.facts.vocab_size, length)] for length in lens]
        fresh = NativeRunner(bundle, max_rows=8, threads=1)
        for used in (runner, fresh):
            used.cache[:] = 0
            encode_native(used, sources)
        np.testing.assert_array_equal(runner.cache, fresh.cache)
        assert runner.cache.any()
        assert runner._encoder is not None
        assert len(runner._encoder._bound) <= 2


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


def test_native_runner_returns_the_encoder_states_of_pytorch(bundle: Bundle, checkpoint: Checkpoint) -> None:
    sources, _ = random_batch(checkpoint.config.vocab_size)
    runner = NativeRunner(bundle, max_rows=8, threads=1, precision="float32")
    tables = [(row, row + 8, row + 16)[: blocks_for(len(source), 16)] for row, source in enumerate(sources)]
    memory = runner.encode(sources, tables, keep_memory=True).memory
    with torch.no_grad():
        expected = torch.cat([checkpoint.model.encode(torch.tensor([source]))[0] for source in sources])
    assert memory is not None
    np.testing.assert_allclose(memory, expected.numpy(), atol=MEMORY_TOLERANCE)


MIXED = (
    SampleSettings(num_logprobs=5),
    SampleSettings(temperature=1.5, top_k=40, top_p=0.9, seed=1, num_logprobs=0),
    SampleSettings(is_normalized=True, num_logprobs=8, edits=[(9, 3.0, 1.2, 0.0), (2, 0.0, 1.0, -np.inf)]),
    SampleSettings(temperature=0.8, min_p=0.02, typical_p=0.7, seed=2),
    SampleSettings(forced_id=30, num_logprobs=3),
    SampleSettings(restriction=1, temperature=1.0, seed=3, edits=[(i, 0.0, 1.0, 0.0) for i in range(20, 60)]),
    SampleSettings(edits=[(i, 0.0, 1.3, -0.1) for i in range(100)]),
    SampleSettings(temperature=3.0, seed=4, num_logprobs=20),
)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_native_runner_mixed_choices_are_bit_identical_alone_and_in_a_crowd(
    bundle: Bundle, precision: Precision, threads: int
) -> None:
    sources, tokens = random_batch(bundle.manifest.model.vocab_size)
    runner = NativeRunner(bundle, max_rows=8, threads=threads, precision=precision)
    lens, tables = encode_native(runner, sources)
    sampling = sampling_of(range(8), MIXED)
    crowd = runner.decode(batch_of(tokens[:, :1].tolist(), [0] * 8, lens, tables=tables, sampling=sampling))
    together = {field.name: getattr(crowd, field.name).copy() for field in dataclasses.fields(Samples)}
    for row, choice in enumerate(MIXED):
        own = ([tables[0][row]], [tables[1][row]])
        batch = batch_of([[1]], [0], [lens[row]], tables=own, sampling=sampling_of([0], [choice]))
        alone, width = runner.decode(batch), batch.max_num_logprobs
        for name, array in together.items():
            expected = array[row, :width] if name.startswith("top") else array[row]
            np.testing.assert_array_equal(getattr(alone, name)[0], expected)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_native_runner_scores_a_target_in_one_step_as_token_by_token(bundle: Bundle, precision: Precision) -> None:
    sources, tokens = random_batch(bundle.manifest.model.vocab_size)
    runner = NativeRunner(bundle, max_rows=8, threads=1, precision=precision)
    lens, tables = encode_native(runner, sources)
    fed, given = tokens[:, :-1], tokens[:, 1:]
    scored = sampling_of(range(given.size), [SampleSettings(forced_id=int(i), num_logprobs=0) for i in given.ravel()])
    at_once = runner.decode(batch_of(fed.tolist(), [0] * 8, lens, tables=tables, sampling=scored)).logprobs.copy()
    for step in range(STEPS - 1):
        sampling = sampling_of(range(8), [SampleSettings(forced_id=int(i), num_logprobs=0) for i in given[:, step]])
        batch = batch_of(fed[:, step : step + 1].tolist(), [step] * 8, lens, tables=tables, sampling=sampling)
        np.testing.assert_array_equal(runner.decode(batch).logprobs, at_once.reshape(given.shape)[:, step])


def test_native_runner_workspace_does_not_depend_on_how_tokens_are_divided(bundle: Bundle) -> None:
    runner = NativeRunner(bundle, max_rows=8, threads=1)
    reports = [
        runner.encode([[5] * length] * (48 // length), [(row,) * blocks_for(length, 16) for row in range(48 // length)])
        for length in (6, 12, 48)
    ]
    peaks = [report.peak_workspace_bytes or 0 for report in reports]
    # Only the scratch memory of attention can differ: 64 bytes for each token of the longest source.
    assert min(peaks) > 0
    assert max(peaks) - min(peaks) <= 64 * 48
