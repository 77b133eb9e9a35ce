"""The native runner with an exported model, compared with the same model in PyTorch, which recomputes every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from antiphon.bundle.manifest import Bundle, MemoryFit, MemoryProfile, file_entry, load_bundle, write_manifest
from antiphon.engine.kv_cache import BlockPool
from antiphon.errors import BundleError, GraphError
from antiphon.ops.cache_geometry import blocks_for
from antiphon.ops.sampling import NONE_ALLOWED, Samples, SamplingArrays, sample
from antiphon.runtime.lanes import open_runner
from antiphon.runtime.native import NativeRunner
from antiphon.runtime.runner import DecodeBatch
from antiphon.runtime.warm_up import warm_up
from antiphon.transformer.random_model import random_transformer
from antiphon.transformer.transformer import Transformer
from tests.batches import SampleSettings, batch_of, sampling_of
from tests.parity.exports import VOCAB_SIZE

# float32 sums in another order than PyTorch's, over two layers of width 16.
TOLERANCE = 1e-5
# Keys and values rounded to 11 bits, relative to logits of a few units.
HALF_TOLERANCE = 5e-3
BLOCK = 16
ENCODER_FAILED, DECODER_FAILED = (
    rf"{part}\.native\.float32\.onnx: the {part} graph failed: .*" for part in ("encoder", "decoder")
)
SOURCES = ((5, 6, 7, 2), (*range(3, 22), 2), (8, 9, 10, 2))
TARGETS = ([1, 4, 9], [1], [1, *range(3, 23)])


@pytest.fixture(scope="module")
def model(bundle: Bundle) -> Transformer:
    """Return the model of the bundle: random weights of one seed."""
    return random_transformer(bundle.manifest.model)


@pytest.fixture
def runner(bundle: Bundle) -> NativeRunner:
    return NativeRunner(bundle, max_rows=4, threads=1)


class Tables:
    """Blocks of rows, taken from one pool in an order in which no block is next to another of its row."""

    def __init__(self, runner: NativeRunner, sources: Sequence[Sequence[int]]) -> None:
        pool = BlockPool(runner.facts.num_blocks, runner.facts.block_size)
        width = blocks_for(runner.facts.max_target_len, BLOCK)
        self.lens = [len(source) for source in sources]
        self.self_tables = [pool.allocate(1) for _ in sources]
        self.cross = [pool.allocate(blocks_for(length, BLOCK)) for length in self.lens]
        self.self_tables = [(*table, *pool.allocate(width - 1)) for table in self.self_tables]

    def batch(
        self,
        fed: Sequence[Sequence[int]],
        past_lens: Sequence[int],
        *,
        num_logprobs: int = -1,
        sampling: SamplingArrays | None = None,
    ) -> DecodeBatch:
        width = max(map(len, self.cross))
        cross = [table + (10**9,) * (width - len(table)) for table in self.cross]  # unused entries can have any value
        tables = (self.self_tables, cross)
        return batch_of(fed, past_lens, self.lens, tables=tables, num_logprobs=num_logprobs, sampling=sampling)


def encode(runner: NativeRunner, sources: Sequence[Sequence[int]] = SOURCES) -> Tables:
    tables = Tables(runner, sources)
    runner.encode(sources, tables.cross)
    return tables


def logits_of(model: Transformer, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
    """Return the logits [V] after a target."""
    with torch.no_grad():
        return np.asarray(model(torch.tensor([source]), torch.tensor([target]))[0, -1])


def scores_of(model: Transformer, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the log-probabilities [R, V] after the last target of each row."""
    pairs = zip(sources, targets, strict=True)
    logits = np.stack([logits_of(model, source, target) for source, target in pairs]).astype(np.float64)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def listed(drawn: Samples) -> np.ndarray:
    """Return the log-probabilities [R, V] of samples that list the whole vocabulary."""
    found = np.empty(drawn.top_ids.shape)
    np.put_along_axis(found, drawn.top_ids, drawn.top_logprobs, axis=1)
    return found


def test_native_runner_decodes_rows_of_different_lengths_like_the_recomputed_network(
    runner: NativeRunner, model: Transformer
) -> None:
    tables = encode(runner)
    drawn = runner.decode(tables.batch(TARGETS, [0] * 3, num_logprobs=VOCAB_SIZE))
    expected = scores_of(model, SOURCES, TARGETS)
    np.testing.assert_allclose(listed(drawn), expected, atol=TOLERANCE)
    np.testing.assert_array_equal(drawn.token_ids, expected.argmax(axis=1))
    np.testing.assert_array_equal(drawn.logprobs, drawn.top_logprobs[:, 0])


def test_native_runner_is_bit_identical_for_tokens_fed_together_and_one_by_one(runner: NativeRunner) -> None:
    tables = encode(runner)
    at_once = runner.decode(tables.batch(TARGETS, [0] * 3, num_logprobs=VOCAB_SIZE))
    tables = encode(runner)
    for row, target in enumerate(TARGETS):
        for position, token_id in enumerate(target):
            fed, past = [[1]] * 3, [0] * 3
            fed[row], past[row] = [token_id], position
            runner.decode(tables.batch(fed, past))
    last = runner.decode(
        tables.batch([t[-1:] for t in TARGETS], [len(t) - 1 for t in TARGETS], num_logprobs=VOCAB_SIZE)
    )
    np.testing.assert_array_equal(last.top_ids, at_once.top_ids)
    np.testing.assert_array_equal(last.top_logprobs, at_once.top_logprobs)


@pytest.mark.parametrize("threads", [1, 2])
def test_native_runner_row_is_bit_identical_alone_and_in_a_batch(bundle: Bundle, threads: int) -> None:
    runner = NativeRunner(bundle, max_rows=4, threads=threads)
    together = runner.decode(encode(runner).batch(TARGETS, [0] * 3, num_logprobs=0))
    token_ids, logprobs = together.token_ids.copy(), together.logprobs.copy()
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        alone = runner.decode(encode(runner, [source]).batch([target], [0], num_logprobs=0))
        assert (alone.token_ids[0], alone.logprobs[0]) == (token_ids[row], logprobs[row])


# Picks of every token of rows with different lengths, in another order, and of one token twice.
ENDS = ((2, 21), (0, 1), (1, 1), (0, 3), (2, 1), (2, 20), (0, 3))
KINDS = (
    SampleSettings(temperature=0.5),
    SampleSettings(temperature=2.0, top_k=5, num_logprobs=3),
    SampleSettings(temperature=1.0, top_p=0.7, min_p=0.05),
    SampleSettings(temperature=3.0, typical_p=0.6, is_normalized=True, num_logprobs=0),
    SampleSettings(
        num_logprobs=VOCAB_SIZE, is_normalized=True, edits=[(7, 9.0, 1.0, 0.0), (8, 0.0, 1.5, -2.0), (7, 0.0, 2.0, 1.0)]
    ),
    SampleSettings(restriction=1, temperature=1.0, num_logprobs=4, edits=[(3, 0.0, 1.0, 0.0), (9, 1.0, 0.5, 0.0)]),
    SampleSettings(forced_id=11, num_logprobs=2, edits=[(4, 0.0, 1.0, -np.inf)]),
    SampleSettings(restriction=1),
)


def expected_samples(model: Transformer, sampling: SamplingArrays, ends: Sequence[tuple[int, int]] = ENDS) -> Samples:
    """Return NumPy's samples after a pass of PyTorch; each end is a row and its number of targets."""
    logits = np.stack([logits_of(model, SOURCES[row], TARGETS[row][:end]) for row, end in ends])
    return sample(logits, sampling, np.array([end - 1 for _, end in ends], np.int32))


def assert_same(found: Samples, expected: Samples) -> None:
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    for name in ("logprobs", "top_logprobs", "top_scores"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=TOLERANCE)


def test_native_runner_samples_as_numpy_does_after_any_token(runner: NativeRunner, model: Transformer) -> None:
    tables, starts = encode(runner), np.cumsum([0, *map(len, TARGETS)])
    picks = [int(starts[row]) + end - 1 for row, end in ENDS]
    found = set()
    for seed in range(16):
        settings = [replace(KINDS[(seed + index) % len(KINDS)], seed=2**63 + seed) for index in range(len(ENDS))]
        sampling = sampling_of(picks, settings)
        drawn = runner.decode(tables.batch(TARGETS, [0] * 3, sampling=sampling))
        assert_same(drawn, expected_samples(model, sampling))
        found |= set(drawn.token_ids.tolist())
    assert len(found) > 8
    assert NONE_ALLOWED in found


def test_native_runner_uses_the_settings_of_each_step_when_steps_share_arrays(
    runner: NativeRunner, model: Transformer
) -> None:
    """Steps of single tokens reuse arrays and bindings after steps with other widths, logits processors and rows."""
    tables = encode(runner)
    many = [
        (token_id, 0.01 * token_id, 1.0, 0.0) for token_id in range(VOCAB_SIZE)
    ] * 2  # more than the initial capacity
    sets = [
        [SampleSettings()] * 3,
        list(KINDS[:3]),
        [SampleSettings(edits=many, num_logprobs=2), KINDS[4], SampleSettings(num_logprobs=-1)],
        [SampleSettings()] * 3,
        [SampleSettings(num_logprobs=1), SampleSettings(temperature=1.0, seed=4), KINDS[5]],
    ]
    batches = [tables.batch([[1]] * 3, [0] * 3, sampling=sampling_of(range(3), settings)) for settings in sets]
    ragged = tables.batch(TARGETS, [0] * 3, num_logprobs=1)
    for index in [0, 0, 1, 2, 0, 3, 4, 4, 1, 2, 2, 0]:
        for _ in range(2):
            drawn = runner.decode(batches[index])
            assert_same(drawn, expected_samples(model, batches[index].sampling, [(row, 1) for row in range(3)]))
        runner.decode(ragged)
    alone = batch_of([[1]], [0], tables.lens[:1], tables=(tables.self_tables[:1], tables.cross[:1]))
    assert runner.decode(alone).token_ids.shape == (1,)
    assert_same(runner.decode(batches[2]), expected_samples(model, batches[2].sampling, [(row, 1) for row in range(3)]))


def test_native_runner_rows_share_blocks_until_one_is_copied(runner: NativeRunner, model: Transformer) -> None:
    source, past = SOURCES[1], [1, *range(3, 21)]  # 19 tokens: a full block and three tokens of the next one
    runner.encode([source], [(0, 1)])
    first, second = (10, 11), (10, 12)
    runner.decode(batch_of([past], [0], [len(source)], tables=([first], [(0, 1)])))
    runner.copy_blocks(np.array([11], np.int32), np.array([12], np.int32))
    tables = ([first, second], [(0, 1)] * 2)
    drawn = runner.decode(
        batch_of([[5], [9]], [len(past)] * 2, [len(source)] * 2, tables=tables, num_logprobs=VOCAB_SIZE)
    )
    expected = scores_of(model, [source] * 2, [[*past, token_id] for token_id in (5, 9)])
    np.testing.assert_allclose(listed(drawn), expected, atol=TOLERANCE)


def test_native_runner_copies_exactly_the_given_blocks(runner: NativeRunner) -> None:
    generator = np.random.default_rng(0)
    runner.cache[:] = generator.random(runner.cache.shape)
    before = runner.cache.copy()
    runner.copy_blocks(np.array([3, 3, 0], np.int32), np.array([1, 5, 7], np.int32))
    before[[1, 5, 7]] = before[[3, 3, 0]]
    np.testing.assert_array_equal(runner.cache, before)
    for sources, targets in (([-1], [2]), ([2], [runner.facts.num_blocks])):
        with pytest.raises(ValueError, match=f"is not of this pool of {runner.facts.num_blocks}"):
            runner.copy_blocks(np.array(sources, np.int32), np.array(targets, np.int32))


def test_native_runner_returns_encoder_states_when_requested(bundle: Bundle, model: Transformer) -> None:
    sources = [*SOURCES, *[tuple(3 + (3 * row + place) % 20 for place in range(40)) for row in range(20)]]
    tables = [(3 * row, 3 * row + 1, 3 * row + 2)[: blocks_for(len(s), BLOCK)] for row, s in enumerate(sources)]
    roomy = NativeRunner(bundle, max_rows=32, threads=1)
    report = roomy.encode(sources, tables, keep_memory=True)
    assert report.memory is not None
    assert report.memory.dtype == np.float32
    with torch.no_grad():  # 828 tokens: two runs
        expected = np.concatenate([model.encode(torch.tensor([source]))[0] for source in sources])
    np.testing.assert_allclose(report.memory, expected, atol=TOLERANCE)
    assert roomy.encode(sources, tables).memory is None


def test_native_runner_returns_no_log_probabilities_when_none_are_requested(runner: NativeRunner) -> None:
    drawn = runner.decode(encode(runner).batch([[1]] * 3, [0] * 3))
    assert not drawn.logprobs.any()
    assert drawn.top_ids.shape == drawn.top_logprobs.shape == (3, 0)


def test_native_runner_float16_cache_agrees_within_its_rounding(own_bundle: Bundle, model: Transformer) -> None:
    bundle = own_bundle
    for part in ("encoder", "decoder"):
        graph = graph_of(bundle, part)
        (pool,) = (port for port in graph.graph.input if port.name == "cache")
        pool.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
        bundle = rewrite(bundle, part, graph)
    bundle = with_graphs(bundle, cache="float16")
    half = NativeRunner(bundle, max_rows=4, threads=1)
    assert half.cache.dtype == np.float16
    drawn = half.decode(encode(half).batch(TARGETS, [0] * 3, num_logprobs=VOCAB_SIZE))
    np.testing.assert_allclose(listed(drawn), scores_of(model, SOURCES, TARGETS), atol=HALF_TOLERANCE)


def test_native_runner_writes_only_the_blocks_it_is_given(runner: NativeRunner) -> None:
    runner.cache[:] = 7.0
    tables = encode(runner)
    runner.decode(tables.batch([[1], [1], [1] * 17], [0, 15, 0]))
    written = {block for block in range(runner.facts.num_blocks) if (runner.cache[block] != 7.0).any()}
    cross = {block for table in tables.cross for block in table}
    own = {table[0] for table in tables.self_tables} | {tables.self_tables[2][1]}
    assert written == cross | own


def test_native_runner_reports_measured_and_predicted_workspace(bundle: Bundle) -> None:
    fit = MemoryFit(a=100.0, b=10.0, c=0.0, residual=0.0, exponent=1.0, max_len=40, max_rows=2)
    memory = MemoryProfile(fits={"native-float32": fit}, machine="here")
    profiled = replace(bundle, manifest=bundle.manifest.model_copy(update={"memory": memory}))
    runner = NativeRunner(profiled, max_rows=4, threads=1)
    report = runner.encode(SOURCES, Tables(runner, SOURCES).cross)
    assert (report.rows, report.num_tokens, report.longest) == (3, 4 + 20 + 4, 20)
    assert report.predicted_fused_bytes == 100 + 10 * 28
    assert report.predicted_materialised_bytes == bundle.manifest.model.num_heads * 4 * (16 + 400 + 16)
    assert report.peak_workspace_bytes is not None
    assert 0 < report.peak_workspace_bytes < 1 << 20


def test_native_runner_uses_no_memory_for_blocks_that_were_never_written(bundle: Bundle) -> None:
    runner = NativeRunner(bundle, max_rows=4, threads=1, num_blocks=1 << 20)
    assert runner.cache.nbytes == runner.facts.num_blocks * runner.facts.block_size * runner.facts.cache_bytes_per_token
    before = resident_bytes()
    warm_up(runner)
    assert resident_bytes() - before < 32 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(
    ("sources", "tables", "message"),
    [
        ([], [], r"source lengths are \[\]; each must be 1 to 512"),
        ([[5] * 513], [range(33)], r"source lengths are \[513\]"),
        ([[5] * 17], [(0,)], r"sources of \[17\] tokens cannot fill tables of \[1\] blocks"),
        ([[5], [6]], [(0,)], r"cannot fill tables"),
    ],
)
def test_native_runner_refuses_sources_that_do_not_fit(
    runner: NativeRunner, sources: list[list[int]], tables: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        runner.encode(sources, tables)


def test_native_runner_names_graph_and_operator_when_a_batch_has_indices_out_of_range(runner: NativeRunner) -> None:
    with pytest.raises(GraphError, match=ENCODER_FAILED + "PagedWrite"):
        runner.encode([[5, 2]], [(runner.facts.num_blocks,)])
    with pytest.raises(GraphError, match=ENCODER_FAILED + "Embed"):
        runner.encode([[VOCAB_SIZE, 2]], [(0,)])
    tables = encode(runner)
    with pytest.raises(GraphError, match=DECODER_FAILED + "PagedSelfAttention"):
        runner.decode(tables.batch([[1]] * 3, [0, 0, 48]))
    with pytest.raises(GraphError, match=DECODER_FAILED + "PagedCrossAttention"):
        runner.decode(batch_of([[1]], [0], [0], tables=([tables.self_tables[0]], [tables.cross[0]])))
    with pytest.raises(ValueError, match="rows of the batch are 5; they must be 1 to 4"):
        runner.decode(batch_of([[1]] * 5, [0] * 5, [1] * 5, tables=([[0]] * 5, [[1]] * 5)))
    assert runner.decode(tables.batch([[1]] * 3, [0] * 3)).token_ids.min() >= 0


def graph_of(bundle: Bundle, part: str) -> onnx.ModelProto:
    return onnx.load(bundle.path / f"{part}.native.float32.onnx", load_external_data=False)


def rewrite(bundle: Bundle, part: str, graph: onnx.ModelProto) -> Bundle:
    """Replace a graph and update the manifest for it."""
    path = bundle.path / f"{part}.native.float32.onnx"
    path.write_bytes(graph.SerializeToString())
    files = {**bundle.manifest.files, path.name: file_entry(path)}
    write_manifest(bundle.path, bundle.manifest.model_copy(update={"files": files}))
    return load_bundle(bundle.path)


def with_graphs(bundle: Bundle, **changes: object) -> Bundle:
    """Return the bundle with changed entries of its graphs in the manifest."""
    graphs = tuple(graph_set.model_copy(update=changes) for graph_set in bundle.manifest.graphs)
    return replace(bundle, manifest=bundle.manifest.model_copy(update={"graphs": graphs}))


def test_native_runner_names_a_graph_that_onnx_runtime_refuses(own_bundle: Bundle) -> None:
    graph = graph_of(own_bundle, "decoder")
    graph.graph.node[-1].op_type = "NoSuchOperator"
    with pytest.raises(GraphError, match=r"decoder\.native\.float32\.onnx: the decoder graph cannot be loaded"):
        NativeRunner(rewrite(own_bundle, "decoder", graph), max_rows=1, threads=1)


def test_native_runner_names_the_missing_part_of_a_graph(own_bundle: Bundle) -> None:
    graph = graph_of(own_bundle, "decoder")
    graph.graph.output[0].name = graph.graph.node[-1].output[0] = "chosen"
    with pytest.raises(GraphError, match=r"outputs of the decoder graph differ .*: chosen, token_ids"):
        NativeRunner(rewrite(own_bundle, "decoder", graph), max_rows=1, threads=1)


def test_native_runner_survives_a_run_that_exceeds_the_workspace_limit(bundle: Bundle) -> None:
    runner = NativeRunner(bundle, max_rows=2, threads=1, workspace_limit_bytes=64 << 10)
    with pytest.raises(GraphError, match=ENCODER_FAILED + "workspace limit reached"):
        runner.encode([[5] * 512], [range(32)])
    assert runner.encode([[5] * 16], [[0]]).rows == 1


def test_open_runner_accepts_native_graphs_only(bundle: Bundle) -> None:
    assert isinstance(open_runner(bundle, max_rows=1, threads=1), NativeRunner)
    assert open_runner(bundle, max_rows=1, threads=1, num_blocks=9).facts.num_blocks == 9
    with pytest.raises(BundleError, match=r"manifest\.json: no native graphs; the bundle holds cuda-float32"):
        open_runner(with_graphs(bundle, lowering="cuda", cache=None), max_rows=1, threads=1)
    with pytest.raises(BundleError, match="no native graphs at precision int8; the bundle holds native-float32"):
        open_runner(bundle, max_rows=1, threads=1, precision="int8")


def test_native_runner_fills_the_same_caches_when_sources_take_several_runs(bundle: Bundle) -> None:
    """1,200 tokens are more than one run of the encoder takes."""
    sources = [tuple(3 + (3 * row + place) % 20 for place in range(40)) for row in range(30)]
    tables = [tuple(range(3 * row, 3 * row + 3)) for row in range(len(sources))]
    together, one_by_one = (NativeRunner(bundle, max_rows=1, threads=1, num_blocks=90) for _ in range(2))
    report = together.encode(sources, tables)
    for source, table in zip(sources, tables, strict=True):
        one_by_one.encode([source], [table])
    np.testing.assert_array_equal(together.cache, one_by_one.cache)
    assert together.cache[-1].any()
    assert (report.rows, report.num_tokens, report.longest) == (30, 1200, 40)
    assert report.peak_workspace_bytes == one_by_one.encode(sources[:19], tables[:19]).peak_workspace_bytes
