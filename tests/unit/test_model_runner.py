from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from antiphon.model.bundle.exact_products import has_vnni
from antiphon.model.bundle.graph import GraphError
from antiphon.model.bundle.manifest import (
    Bundle,
    BundleError,
    MemoryFit,
    MemoryProfile,
    file_entry,
    load_bundle,
    write_manifest,
)
from antiphon.model.ops.choices import choose
from antiphon.service.domain.request import SamplingParams
from antiphon.service.runtime.model_runner import ModelRunner
from antiphon.service.runtime.warm_up import warm_up
from tests.batches import Choice, batch_of, choice_of, choices_of
from tests.unit.tiny_graphs import TinyModel, tiny_config, tiny_model, write_bundle

# float32 sums in another order than NumPy's, over products of width 16.
TOLERANCE = 1e-5
SOURCES = ((5, 6, 7, 2), (3, 4, 5, 6, 7, 8, 2), (8, 9, 10, 2))


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model(tiny_config())


@pytest.fixture(scope="module")
def bundle(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("bundle") / "tiny", model, ("contrib", "eager"))


@pytest.fixture
def runner(bundle: Bundle) -> ModelRunner:
    return ModelRunner(bundle, max_rows=4, threads=1)


def encode_all(runner: ModelRunner) -> list[int]:
    runner.encode(SOURCES, 0)
    return [len(source) for source in SOURCES]


def feed(runner: ModelRunner, rows: list[list[int]], past_lens: list[int], source_lens: list[int]) -> np.ndarray:
    """Feed the tokens of each row after its past; returns the logits after its last one."""
    return runner.logits(batch_of(rows, past_lens, source_lens)).copy()


def test_runner_decodes_ragged_rows_like_the_network_recomputed(runner: ModelRunner, model: TinyModel) -> None:
    source_lens = encode_all(runner)
    targets = [[1, 4, 9], [1], [1, 11]]
    logits = feed(runner, targets, [0] * 3, source_lens)
    for row, target in enumerate(targets):
        np.testing.assert_allclose(logits[row], model.logits(SOURCES[row], target), atol=TOLERANCE)


def test_runner_eager_graphs_agree_with_contrib(runner: ModelRunner, bundle: Bundle) -> None:
    eager = ModelRunner(bundle, max_rows=4, threads=1, lowering="eager")
    lens = encode_all(runner)
    encode_all(eager)
    tokens = [[1, 4], [1, 5], [1, 6]]
    np.testing.assert_allclose(feed(runner, tokens, [0] * 3, lens), feed(eager, tokens, [0] * 3, lens), atol=TOLERANCE)


def test_runner_appends_in_place_and_nowhere_else(runner: ModelRunner) -> None:
    lens = encode_all(runner)
    self_before, cross_before = runner.self_kv.copy(), runner.cross_kv.copy()
    past_lens = [3, 0, 23]
    feed(runner, [[4], [5], [6]], past_lens, lens)
    changed = (runner.self_kv != self_before).any(axis=(0, 2, 4))  # [rows, C]
    expected = np.zeros_like(changed)
    expected[np.arange(3), past_lens] = True
    np.testing.assert_array_equal(changed, expected)
    np.testing.assert_array_equal(runner.cross_kv, cross_before)


def test_runner_encode_writes_only_its_rows_and_tokens(runner: ModelRunner) -> None:
    runner.cross_kv[:] = 7.0
    runner.encode(SOURCES[:2], 1)
    written = (runner.cross_kv != 7.0).any(axis=(0, 2, 4))
    expected = np.zeros_like(written)
    expected[1, : len(SOURCES[0])] = expected[2, : len(SOURCES[1])] = True
    np.testing.assert_array_equal(written, expected)


def test_runner_row_does_not_depend_on_its_neighbours(runner: ModelRunner, bundle: Bundle) -> None:
    lens = encode_all(runner)
    tokens = [[1, 4, 5], [1, 9, 9], [1, 7, 2]]
    together = feed(runner, tokens, [0] * 3, lens)
    alone = ModelRunner(bundle, max_rows=1, threads=1)
    for row, source in enumerate(SOURCES):
        alone.encode([source], 0)
        np.testing.assert_allclose(feed(alone, [tokens[row]], [0], [lens[row]])[0], together[row], atol=TOLERANCE)


def test_runner_moved_row_continues_as_if_it_had_stayed(runner: ModelRunner, model: TinyModel) -> None:
    lens = encode_all(runner)
    feed(runner, [[1, 4], [1, 5], [1, 6]], [0] * 3, lens)
    runner.move_row(2, 0, self_len=2, source_len=lens[2])
    logits = feed(runner, [[8], [9]], [2, 2], [lens[2], lens[1]])
    np.testing.assert_allclose(logits[0], model.logits(SOURCES[2], [1, 6, 8]), atol=TOLERANCE)
    np.testing.assert_allclose(logits[1], model.logits(SOURCES[1], [1, 5, 9]), atol=TOLERANCE)


def test_runner_move_row_copies_live_tokens_only(runner: ModelRunner) -> None:
    for cache in (runner.self_kv, runner.cross_kv):
        cache[:, 0], cache[:, 3] = 0.0, 1.0
    runner.move_row(3, 0, self_len=5, source_len=2)
    for cache, live in ((runner.self_kv, 5), (runner.cross_kv, 2)):
        assert (cache[:, 0, :, :live] == 1).all()
        assert (cache[:, 0, :, live:] == 0).all()


def test_runner_chooses_what_the_batch_asks(runner: ModelRunner, model: TinyModel) -> None:
    """Every token of ragged rows is looked at, some twice, and in an order of its own."""
    lens, targets = encode_all(runner), [[1, 4], [1], [1, 5, 6]]
    ends = [(row, end) for row in range(3) for end in range(1, len(targets[row]) + 1)]
    picks = [5, 0, 2, 3, 1, 4, 2]
    settings = [
        Choice(num_logprobs=3),
        choice_of(SamplingParams(temperature=2.0, seed=5, min_p=0.1)),
        Choice(temperature=1.0, typical_p=0.5, seed=9, num_logprobs=0),
        Choice(edits=[(7, 50.0, 1.0, 0.0)], num_logprobs=1),
        Choice(given_id=3, num_logprobs=2, is_normalized=True),
        Choice(is_exclusive=True),
        Choice(temperature=1.0, top_k=1),
    ]
    choices = choices_of(picks, settings)
    drawn = runner.decode(batch_of(targets, [0] * 3, lens, choices=choices))
    logits = np.stack([model.logits(SOURCES[ends[pick][0]], targets[ends[pick][0]][: ends[pick][1]]) for pick in picks])
    expected = choose(logits, choices, np.array([ends[pick][1] - 1 for pick in picks], np.int32))
    for name in ("token_ids", "top_ids"):
        np.testing.assert_array_equal(getattr(drawn, name), getattr(expected, name))
    for name in ("logprobs", "top_logprobs", "top_scores"):
        np.testing.assert_allclose(getattr(drawn, name), getattr(expected, name), atol=TOLERANCE)
    assert drawn.token_ids[3:6].tolist() == [7, 3, -2]


def test_runner_picks_rows_in_any_order_where_each_feeds_one_token(runner: ModelRunner, model: TinyModel) -> None:
    lens = encode_all(runner)
    logits = runner.logits(batch_of([[1]] * 3, [0] * 3, lens, choices=choices_of([2, 0])))
    expected = np.stack([model.logits(SOURCES[row], [1]) for row in (2, 0)])
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)


def test_runner_says_what_it_cannot_do(runner: ModelRunner) -> None:
    assert not runner.can_share_blocks
    assert not runner.can_embed
    with pytest.raises(ValueError, match="encoder's states"):
        runner.encode(SOURCES, 0, keep_memory=True)
    with pytest.raises(NotImplementedError):
        runner.copy_blocks(np.array([0], np.int32), np.array([1], np.int32))


def test_runner_feeds_several_tokens_as_it_would_one_by_one(runner: ModelRunner) -> None:
    lens = encode_all(runner)
    at_once = feed(runner, [[1, 4, 9], [1], [1, 11]], [0] * 3, lens)
    encode_all(runner)
    feed(runner, [[1], [1], [1]], [0] * 3, lens)
    feed(runner, [[4], [1], [11]], [1, 0, 1], lens)
    one_by_one = feed(runner, [[9], [1], [11]], [2, 0, 1], lens)
    np.testing.assert_array_equal(at_once, one_by_one)


def test_runner_decode_reuses_one_logits_buffer(runner: ModelRunner) -> None:
    lens = encode_all(runner)
    first = runner.logits(batch_of([[1]] * 3, [0] * 3, lens))
    second = runner.logits(batch_of([[1]] * 2, [1] * 2, lens[:2]))
    assert first.shape == (3, 24)
    assert second.shape == (2, 24)
    assert np.shares_memory(first, second)


def test_runner_keeps_pages_it_never_wrote_out_of_memory(tmp_path: Path) -> None:
    config = tiny_config(max_len=16384)
    runner = ModelRunner(write_bundle(tmp_path / "long", tiny_model(config)), max_rows=512, threads=1)
    assert runner.self_kv.nbytes + runner.cross_kv.nbytes == 2 * 512 * 16384 * runner.cache_bytes_per_token
    before = resident_bytes()
    runner.encode([[5, 2]] * 512, 0)
    runner.decode(batch_of([[1]] * 512, [0] * 512, [2] * 512))
    # A page for each layer, key or value, row and head, in both caches.
    assert resident_bytes() - before < 2 * 4 * 512 * 2 * 4096 + (32 << 20)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_runner_reports_measurement_beside_predictions(bundle: Bundle, tmp_path: Path, model: TinyModel) -> None:
    profiled = write_bundle(tmp_path / "profiled", model)
    fit = MemoryFit(a=100.0, b=10.0, c=1.0, residual=0.0, exponent=1.0, max_len=8, max_rows=2)
    memory = MemoryProfile(fits={"contrib-float32": fit}, machine="here")
    write_manifest(profiled.path, profiled.manifest.model_copy(update={"memory": memory}))
    report = ModelRunner(load_bundle(profiled.path), max_rows=4, threads=1).encode(SOURCES, 0)
    assert (report.rows, report.num_tokens, report.longest) == (3, 4 + 7 + 4, 7)
    assert report.predicted_fused_bytes == 100 + max(2 * (10 * 4 + 16), 10 * 7 + 49)
    assert report.predicted_materialised_bytes == 2 * 4 * (4 * 4 + 7 * 7 + 4 * 4)
    outputs = 2 * 4 * 16 * 4 * 4  # rows x length x width x float32 x (2 layers, key and value)
    assert report.peak_workspace_bytes is not None
    assert report.peak_workspace_bytes >= outputs
    assert ModelRunner(bundle, max_rows=4, threads=1).encode(SOURCES[:2], 0).predicted_fused_bytes is None


def test_runner_measures_the_same_peak_every_time(runner: ModelRunner) -> None:
    peaks = [runner.encode(SOURCES[first:last], 0).peak_workspace_bytes for first, last in ((0, 1), (1, 2)) * 3]
    assert peaks[:2] * 3 == peaks


def test_runner_survives_a_run_that_exceeds_the_workspace_limit(tmp_path: Path) -> None:
    config = tiny_config(max_len=2048)
    bundle = write_bundle(tmp_path / "long", tiny_model(config), ("contrib", "eager"))
    runner = ModelRunner(bundle, max_rows=2, threads=1, lowering="eager", workspace_limit_bytes=8 << 20)
    with pytest.raises(GraphError, match=r"encoder\.eager\.onnx: the encoder graph failed: .*workspace limit reached"):
        runner.encode([[5] * 2048], 0)
    assert runner.encode([[5] * 16], 0).rows == 1
    runner.decode(batch_of([[1]], [0], [16]))


def test_warm_up_writes_one_token_of_every_row(runner: ModelRunner) -> None:
    warm_up(runner)
    for cache in (runner.self_kv, runner.cross_kv):
        written = np.asarray(cache.any(axis=(0, 2, 4)))
        assert written[:, 0].all()
    assert np.asarray(runner.self_kv.any(axis=(0, 2, 4))).sum() == runner.max_rows


@pytest.mark.parametrize(
    ("past_lens", "source_lens", "message"),
    [
        ([24], [1], r"positions are \[24\]; each must be 0 to 23"),
        ([-1], [1], r"positions are \[-1\]"),
        ([0], [0], r"source_lens is \[0\]; each must be 1 to 24"),
        ([0], [25], r"source_lens is \[25\]"),
        ([0] * 5, [1] * 5, r"decode of 5 rows; it must be 1 to 4"),
        ([], [], r"decode of 0 rows"),
    ],
)
def test_runner_refuses_a_step_outside_its_caches(
    runner: ModelRunner, past_lens: list[int], source_lens: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        runner.decode(batch_of([[1]] * len(past_lens), past_lens, source_lens))


@pytest.mark.parametrize(
    ("sources", "first_row", "message"),
    [
        ([], 0, r"source lengths are \[\]; each must be 1 to 24"),
        ([[5] * 25], 0, r"source lengths are \[25\]"),
        ([[5, 2], []], 0, r"source lengths are \[2, 0\]"),
        ([[5, 2]] * 2, 3, "rows 3 to 4 do not fit max_rows=4"),
        ([[5, 2]], -1, "rows -1 to -1"),
    ],
)
def test_runner_refuses_sources_outside_its_caches(
    runner: ModelRunner, sources: list[list[int]], first_row: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        runner.encode(sources, first_row)


def test_runner_names_the_graph_when_a_token_is_outside_the_vocabulary(runner: ModelRunner) -> None:
    with pytest.raises(GraphError, match=r"encoder\.contrib\.onnx: the encoder graph failed: .*Gather"):
        runner.encode([[24, 2]], 0)
    assert runner.encode([[5, 2]], 0).rows == 1


def rewrite(bundle: Bundle, name: str, content: bytes) -> Bundle:
    """Replace a file and list it as if it belonged."""
    (bundle.path / name).write_bytes(content)
    files = {**bundle.manifest.files, name: file_entry(bundle.path / name)}
    write_manifest(bundle.path, bundle.manifest.model_copy(update={"files": files}))
    return load_bundle(bundle.path)


def test_runner_names_a_graph_that_onnx_runtime_refuses(tmp_path: Path, model: TinyModel) -> None:
    bundle = write_bundle(tmp_path / "b", model)
    graph = onnx.load(bundle.path / "decoder.onnx")
    graph.graph.node[-1].op_type = "NoSuchOperator"
    bundle = rewrite(bundle, "decoder.onnx", graph.SerializeToString())
    with pytest.raises(GraphError, match=r"decoder\.onnx: the decoder graph cannot be loaded"):
        ModelRunner(bundle, max_rows=1, threads=1)


def test_runner_names_what_a_graph_lacks(tmp_path: Path, model: TinyModel) -> None:
    bundle = write_bundle(tmp_path / "b", model)
    graph = onnx.load(bundle.path / "decoder.onnx")
    graph.graph.output[0].name = "scores"
    graph.graph.node[-1].output[0] = "scores"
    bundle = rewrite(bundle, "decoder.onnx", graph.SerializeToString())
    with pytest.raises(GraphError, match=r"outputs of the decoder graph differ .*: logits, scores"):
        ModelRunner(bundle, max_rows=1, threads=1)


def test_runner_refuses_a_precision_the_bundle_lacks(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="no contrib graphs at precision int8"):
        ModelRunner(bundle, max_rows=1, threads=1, precision="int8")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fma avx2 avx512_vnni", True), ("avx2 avx_vnni", True), ("amx_int8", True), ("avx2 avx512f", False), ("", False)],
)
def test_has_vnni_reads_the_processors_flags(flags: str, expected: bool) -> None:
    assert has_vnni(f"processor\t: 0\nvendor_id\t: x\nflags\t\t: fpu {flags}\nbugs\t: avx512_vnni\n") is expected
