"""The runner for GPUs, on the stand-in for CUDA, compared with the runner for processors.

Both run the same float32 weights. The unmodified CUDA provider of ONNX Runtime captures and replays the graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon.bundle.manifest import Bundle
from antiphon.bundle.session import cuda_session
from antiphon.errors import GraphError
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for
from antiphon.ops.cuda.driver import CudaDevice
from antiphon.ops.sampling import Samples, SamplingArrays
from antiphon.runtime.cuda.runner import CudaEncoderRunner, CudaRunner
from antiphon.runtime.native import EncoderRunner, NativeRunner
from antiphon.runtime.runner import Runner
from antiphon.runtime.warm_up import warm_up
from tests.batches import SampleSettings, batch_of, sampling_of
from tests.cuda.conftest import export_small
from tests.cuda.standin.device import StandIn

MAX_ROWS = 4
TABLE_WIDTH = 3  # blocks of the longest source and of the longest target
DECODER: dict[str, object] = dict(
    architecture="decoder", encoder_layers=0, positions="rope", norm="rmsnorm", gated=True, bias=False
)
ENCODER: dict[str, object] = dict(
    architecture="encoder",
    decoder_layers=0,
    token_types=2,
    heads=[{"task": "classify", "labels": ["no", "yes", "maybe"], "transform_width": 16, "activation": "tanh"}],
)
SOURCES = ([5, 6, 7], [8] * 20, [9, 10, 11, 12, 13])
EVERY_DECODER = pytest.mark.parametrize("bundle", ["attention", "ssru", "average"], indirect=True)


class Rows:
    """Rows of a runner, each with blocks of its own, and the tokens that it has been fed.

    num_own: blocks that each row holds already; None: not known to the runner.
    """

    num_own: list[int] | None = None

    def __init__(self, runner: Runner, sources: Sequence[Sequence[int]]) -> None:
        self.runner = runner
        self.source_lens = [len(source) for source in sources]
        own_width = blocks_for(runner.facts.max_target_len, runner.facts.target_block_size)
        blocks = np.random.default_rng(1).permutation(runner.facts.num_blocks).tolist()
        starts = range(0, len(sources) * (own_width + TABLE_WIDTH), own_width + TABLE_WIDTH)
        self.own = [blocks[start : start + own_width] for start in starts]
        self.cross = [blocks[start + own_width : start + own_width + TABLE_WIDTH] for start in starts]
        self.past_lens = [0] * len(sources)
        if runner.facts.has_encoder:
            used = [table[: -(-length // 16)] for table, length in zip(self.cross, self.source_lens, strict=True)]
            runner.encode(sources, used)

    def step(self, fed: Sequence[Sequence[int]], sampling: SamplingArrays, *, num_due: int | None = None) -> Samples:
        """Feed tokens to every row; to the first num_due only, if the runner leaves the others to the next step."""
        batch = batch_of(fed, self.past_lens, self.source_lens, tables=(self.own, self.cross), sampling=sampling)
        if self.num_own is not None:
            batch = replace(batch, num_own=np.array(self.num_own, np.int32))
        samples = self.runner.decode(replace(batch, num_due=num_due))
        for row, tokens in enumerate(fed[: len(samples.token_ids)]):
            self.past_lens[row] += len(tokens)
        return samples

    def generate(self, num_steps: int, settings: SampleSettings, first: int = 1) -> list[list[int]]:
        """Return the tokens of each step, fed back each time; the parameters are one object, as in the engine."""
        sampling = sampling_of(range(len(self.past_lens)), [settings] * len(self.past_lens))
        fed, tokens = [[first]] * len(self.past_lens), []
        for _ in range(num_steps):
            tokens.append(self.step(fed, sampling).token_ids.tolist())
            fed = [[token] for token in tokens[-1]]
        return tokens

    @property
    def by_row(self) -> tuple[list[Any], ...]:
        """Every list with one entry for each row."""
        return (self.source_lens, self.own, self.cross, self.past_lens)

    def remove(self, row: int) -> None:
        """Let a row leave; the last row takes its place."""
        for values in self.by_row:
            last = values.pop()
            if row < len(values):
                values[row] = last


@pytest.fixture(scope="module")
def native(bundle: Bundle) -> NativeRunner:
    return NativeRunner(bundle, max_rows=MAX_ROWS, threads=1, precision="float32")


@pytest.fixture(scope="module")
def cuda(bundle: Bundle, device: CudaDevice) -> CudaRunner:
    return CudaRunner(bundle, device, max_rows=MAX_ROWS, precision="float32")


def assert_equal(actual: Samples, expected: Samples) -> None:
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert actual.top_ids.tolist() == expected.top_ids.tolist()
    for name in ("logprobs", "top_logprobs", "top_scores"):
        np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), atol=1e-5)


@EVERY_DECODER
def test_steps_equal_those_of_the_processor_while_rows_join_and_leave(cuda: CudaRunner, native: NativeRunner) -> None:
    settings = [
        SampleSettings(num_logprobs=3),
        SampleSettings(temperature=0.8, top_k=20, top_p=0.9, seed=11, num_logprobs=0),
        SampleSettings(edits=[(7, 0.0, 1.5, 0.0), (7, 0.5, 1.0, 0.0), (9, 0.0, 1.0, -np.inf)], is_normalized=True),
    ]
    ours, reference = Rows(cuda, SOURCES), Rows(native, SOURCES)
    first = sampling_of([1, 2, 5], settings)  # after prefixes of 2, 1 and 3 tokens
    prefixes = [[1, 6], [1], [1, 8, 9]]
    assert_equal(ours.step(prefixes, first), reference.step(prefixes, first))
    for _ in range(2):
        following, fed = sampling_of(range(3), settings), [[20], [21], [22]]
        assert_equal(ours.step(fed, following), reference.step(fed, following))
    for rows in (ours, reference):
        rows.remove(0)
    following, fed = sampling_of(range(2), [settings[2], settings[1]]), [[23], [24]]
    assert_equal(ours.step(fed, following), reference.step(fed, following))


@EVERY_DECODER
def test_scored_tokens_equal_those_of_the_processor(cuda: CudaRunner, native: NativeRunner) -> None:
    scored = [SampleSettings(forced_id=token, num_logprobs=1) for token in (30, 31, 32)]
    sampling = sampling_of([0, 1, 2], scored)
    results = [Rows(runner, SOURCES[:1]).step([[1, 30, 31]], sampling) for runner in (cuda, native)]
    assert_equal(*results)


def test_sources_of_several_passes_and_states_equal_those_of_the_processor(
    cuda: CudaRunner, native: NativeRunner
) -> None:
    tables = [[0], [1, 2], [3]]
    ours, reference = (runner.encode(SOURCES, tables, keep_memory=True).memory for runner in (cuda, native))
    assert ours is not None
    assert reference is not None
    np.testing.assert_allclose(ours, reference, atol=1e-5)


@EVERY_DECODER
def test_blocks_are_copied_on_the_device(cuda: CudaRunner, native: NativeRunner) -> None:
    """A row whose first block was copied goes on as the row that it was copied from."""
    results = []
    for runner in (cuda, native):
        rows = Rows(runner, SOURCES[:2])
        sampling = sampling_of(range(2), [SampleSettings(num_logprobs=2)] * 2)
        rows.step([[1, 5, 6], [1, 8, 9]], sampling_of([2, 5]))
        copied = np.array([rows.own[0][0]], np.int32)
        runner.copy_blocks(copied, np.array([rows.own[1][0]], np.int32))
        rows.cross[1], rows.source_lens[1] = rows.cross[0], rows.source_lens[0]
        results.append(rows.step([[7], [7]], sampling))
    assert_equal(*results)
    assert results[0].logprobs[0] == results[0].logprobs[1]
    with pytest.raises(ValueError, match="not of this pool"):
        cuda.copy_blocks(np.array([cuda.facts.num_blocks], np.int32), np.array([0], np.int32))


@EVERY_DECODER
def test_preempted_rows_feed_their_tokens_again(cuda: CudaRunner, native: NativeRunner) -> None:
    """They get each other's blocks, of which they must read nothing, and go on as rows that were not preempted."""
    sampling = [SampleSettings(num_logprobs=2)] * 2
    preempted, kept = Rows(cuda, SOURCES[:2]), Rows(native, SOURCES[:2])
    tokens = preempted.generate(4, SampleSettings())
    preempted.own.reverse()
    preempted.past_lens = [0, 0]
    actual = preempted.step([[1, *row] for row in zip(*tokens, strict=True)], sampling_of([4, 9], sampling))
    assert kept.generate(4, SampleSettings()) == tokens
    assert_equal(actual, kept.step([[token] for token in tokens[-1]], sampling_of(range(2), sampling)))


@EVERY_DECODER
def test_a_step_ahead_gives_the_same_tokens_and_is_used_while_rows_stay(
    bundle: Bundle, device: CudaDevice, native: NativeRunner
) -> None:
    settings = SampleSettings(temperature=1.0, seed=3)
    ahead = CudaRunner(bundle, device, max_rows=2, precision="float32")
    tokens = Rows(ahead, SOURCES[:2]).generate(10, settings)
    assert tokens == Rows(native, SOURCES[:2]).generate(10, settings)
    assert ahead.num_ahead == 7  # all but the first, and those before the rows are known to stay


def test_steps_ahead_enter_blocks_that_the_rows_hold(bundle: Bundle, device: CudaDevice, native: NativeRunner) -> None:
    runner = CudaRunner(bundle, device, max_rows=2, precision="float32")
    rows = Rows(runner, SOURCES[:2])
    rows.num_own = [3, 3]
    num_steps = 2 * BLOCK_SIZE + 2
    assert rows.generate(num_steps, SampleSettings()) == Rows(native, SOURCES[:2]).generate(num_steps, SampleSettings())
    assert runner.num_ahead == num_steps - 3  # as above


@pytest.mark.parametrize("num_own", [None, [1, 3]])
def test_a_step_ahead_writes_to_no_block_that_a_row_does_not_have_yet(
    bundle: Bundle, device: CudaDevice, native: NativeRunner, num_own: list[int] | None
) -> None:
    """The engine gives a row its second block before position 16; until then the table's entry is any number."""
    runner = CudaRunner(bundle, device, max_rows=2, precision="float32")
    results = []
    for each in (runner, native):
        rows = Rows(each, SOURCES[:2])
        rows.num_own = num_own
        second_block, rows.own[0][1] = rows.own[0][1], rows.own[1][0]
        rows.generate(16, SampleSettings())
        rows.own[0][1] = second_block
        results.append(rows.step([[4], [5]], sampling_of(range(2), [SampleSettings(num_logprobs=2)] * 2)))
    assert runner.num_ahead > 0
    assert_equal(*results)


@EVERY_DECODER
def test_a_step_ahead_keeps_the_rows_that_stay_when_others_leave(
    bundle: Bundle, device: CudaDevice, native: NativeRunner
) -> None:
    runner = CudaRunner(bundle, device, max_rows=MAX_ROWS, precision="float32")
    num_steps, results = 10, []
    for each in (runner, native):
        rows, fed = Rows(each, SOURCES), [[1]] * len(SOURCES)
        settings = [SampleSettings(temperature=1.0, seed=seed, num_logprobs=seed) for seed in range(len(SOURCES))]
        for step in range(num_steps):
            if step in (4, 7):
                rows.remove(0)
                fed = [fed[-1], *fed[1:-1]]
                settings = [settings[-1], *settings[1:-1]]
            samples = rows.step(fed, sampling_of(range(len(fed)), settings))
            fed = [[token] for token in samples.token_ids.tolist()]
            results.append((each, deepcopy(samples)))  # its arrays are valid until the next step
    assert runner.num_ahead == num_steps - 3  # all but the first, and those before the rows are known to stay
    ours, reference = ([samples for ran, samples in results if ran is each] for each in (runner, native))
    for one, other in zip(ours, reference, strict=True):
        assert_equal(one, other)


JOINING = {
    "sampled": SampleSettings(temperature=1.0, seed=5, num_logprobs=1),
    "edited": SampleSettings(edits=[(7, 0.0, 1.5, 0.0)], num_logprobs=1),
    "forced": SampleSettings(forced_id=9, num_logprobs=1),
    "prefix": SampleSettings(temperature=1.0, seed=5, num_logprobs=1),
    "candidates": SampleSettings(num_logprobs=2),
}


@EVERY_DECODER
@pytest.mark.parametrize("kind", JOINING)
def test_rows_that_join_a_step_ahead_step_after_it_unless_they_need_the_host(
    bundle: Bundle, device: CudaDevice, native: NativeRunner, kind: str
) -> None:
    """They take the place of a row that left, and leave again, as in the engine."""
    runner = CudaRunner(bundle, device, max_rows=MAX_ROWS, precision="float32")
    warm_up(runner)
    before, lengths = runner.num_ahead, []
    tokens: dict[tuple[Runner, str], list[tuple[int, int, float]]] = {}
    for each in (runner, native):
        rows = Rows(each, SOURCES)
        rows.remove(1)
        others = Rows(each, SOURCES)  # encodes the same sources into the same blocks, and one more
        names, settings = ["a", "c"], [SampleSettings(temperature=1.0, seed=seed, num_logprobs=0) for seed in range(2)]
        fed, num_due = [[1], [1]], None
        for step in range(12):
            if step == 5:
                for of_row, of_joining in zip(
                    rows.by_row, (len(SOURCES[1]), others.own[1], others.cross[1], 0), strict=True
                ):
                    of_row.append(of_joining)
                names, settings, num_due = [*names, "b"], [*settings, JOINING[kind]], 2
                fed = [*fed, [1, 6, 7] if kind == "prefix" else [1]]
            if step == 8:
                rows.remove(0)
                names, settings, fed = [names[-1], *names[1:-1]], [settings[-1], *settings[1:-1]], [fed[-1], *fed[1:-1]]
            ends = np.cumsum([len(row) for row in fed]) - 1
            samples = rows.step(fed, sampling_of(ends.tolist(), settings), num_due=num_due)
            lengths.append(len(samples.token_ids))
            for row, token_id in enumerate(samples.token_ids.tolist()):
                best = int(samples.top_ids[row, 0]) if settings[row].num_logprobs > 0 else 0
                tokens.setdefault((each, names[row]), []).append((token_id, best, float(samples.logprobs[row])))
                fed[row] = [token_id]
                if settings[row].forced_id >= 0:
                    settings[row] = SampleSettings(num_logprobs=1)
            num_due = None
    waits = kind in ("sampled", "forced")
    assert lengths[5] == (2 if waits else 3)
    for name in "abc":
        ours, reference = np.array(tokens[runner, name]), np.array(tokens[native, name])
        assert len(ours) == len(reference) - (name == "b" and waits)
        np.testing.assert_array_equal(ours[:, :2], reference[: len(ours), :2])
        np.testing.assert_allclose(ours[:, 2], reference[: len(ours), 2], atol=1e-5)
    if waits:
        assert runner.num_ahead - before == 12 - 3  # as above: no step ahead was of no use


@EVERY_DECODER
def test_a_step_ahead_is_dropped_when_a_row_joins(bundle: Bundle, device: CudaDevice, native: NativeRunner) -> None:
    runner = CudaRunner(bundle, device, max_rows=MAX_ROWS, precision="float32")
    results = []
    for each in (runner, native):
        rows = Rows(each, SOURCES[:2])
        tokens = rows.generate(5, SampleSettings())
        both = Rows(each, SOURCES)  # encodes the same sources into the same blocks, and one more
        both.past_lens[:2] = rows.past_lens
        fed = [[token] for token in (*tokens[-1], 1)]
        results.append(both.step(fed, sampling_of(range(3), [SampleSettings(num_logprobs=2)] * 3)))
    assert runner.num_ahead == 2
    assert_equal(*results)


def test_a_step_ahead_is_dropped_when_another_token_is_fed(
    bundle: Bundle, device: CudaDevice, native: NativeRunner
) -> None:
    runner = CudaRunner(bundle, device, max_rows=2, precision="float32")
    results = []
    for each in (runner, native):
        rows = Rows(each, SOURCES[:2])
        sampling = sampling_of(range(2), [SampleSettings(num_logprobs=2)] * 2)
        for token in (1, 50, 51, 52, 53):  # never those that the steps before sampled
            result = rows.step([[token]] * 2, sampling)
        results.append(result)
    assert runner.num_ahead == 0
    assert_equal(*results)


@EVERY_DECODER
def test_replayed_steps_allocate_nothing_and_run_no_kernel_but_ours(cuda: CudaRunner, standin: StandIn) -> None:
    settings = SampleSettings(num_logprobs=1)
    Rows(cuda, SOURCES).generate(3, settings)
    rows = Rows(cuda, SOURCES)
    before = (standin.num_allocations, standin.num_foreign_launches, standin.num_missing_calls)
    standin.launched.clear()
    rows.generate(4, settings)
    assert (standin.num_allocations, standin.num_foreign_launches, standin.num_missing_calls) == before
    num_steps = standin.launched.count("sample.float32")  # the last one may be ahead
    assert num_steps >= 4
    assert len(standin.launched) % num_steps == 0  # each step launches the same kernels
    assert {name.split(".")[0] for name in standin.launched} >= {"embed", "paged_attention", "sample"}


@EVERY_DECODER
def test_programs_in_any_order_give_the_same_tokens(cuda: CudaRunner, standin: StandIn) -> None:
    expected = Rows(cuda, SOURCES).generate(3, SampleSettings())
    standin.order = lambda programs: programs[::-1]
    try:
        assert Rows(cuda, SOURCES).generate(3, SampleSettings()) == expected
    finally:
        standin.order = lambda programs: programs


@EVERY_DECODER
def test_a_row_has_the_same_bits_alone_and_beside_others_of_one_bucket(cuda: CudaRunner) -> None:
    settings = [SampleSettings(num_logprobs=3)]
    three = Rows(cuda, SOURCES).step([[1]] * 3, sampling_of(range(3), settings * 3))
    logprobs = three.top_logprobs[0].copy()
    other = Rows(cuda, [SOURCES[0], SOURCES[2], SOURCES[1], SOURCES[1]])
    four = other.step([[1]] * 4, sampling_of(range(4), settings * 4))
    assert four.top_logprobs[0].tolist() == logprobs.tolist()


def test_a_failing_driver_is_an_error_of_the_step_and_the_next_one_works(
    bundle: Bundle, device: CudaDevice, native: NativeRunner, standin: StandIn
) -> None:
    runner = CudaRunner(bundle, device, max_rows=2, precision="float32")
    rows = Rows(runner, SOURCES[:1])
    sampling = sampling_of([0], [SampleSettings(num_logprobs=1)])
    rows.step([[1]], sampling)
    standin.fail_after(1)
    with pytest.raises(GraphError, match="on the GPU: cuMemcpyHtoDAsync_v2: CUDA_ERROR"):
        rows.step([[5]], sampling)
    standin.fail_after(0)
    expected = Rows(native, SOURCES[:1])
    expected.step([[1]], sampling)
    assert_equal(rows.step([[5]], sampling), expected.step([[5]], sampling))


def test_a_model_is_loaded_in_one_thread_and_run_in_another(
    bundle: Bundle, device: CudaDevice, native: NativeRunner
) -> None:
    with ThreadPoolExecutor(1) as loading, ThreadPoolExecutor(1) as running:
        runner = loading.submit(CudaRunner, bundle, device, max_rows=2, precision="float32").result()
        rows = loading.submit(Rows, runner, SOURCES[:1]).result()
        tokens = running.submit(rows.generate, 2, SampleSettings()).result()
    assert tokens == Rows(native, SOURCES[:1]).generate(2, SampleSettings())


def test_a_batch_with_a_wrong_block_is_refused(cuda: CudaRunner) -> None:
    rows = Rows(cuda, SOURCES[:1])
    rows.own[0][0] = cuda.facts.num_blocks
    with pytest.raises(ValueError, match="self_tables are"):
        rows.step([[1]], sampling_of([0]))


@EVERY_DECODER
def test_bfloat16_is_near_float32(bundle: Bundle, device: CudaDevice, native: NativeRunner) -> None:
    runner = CudaRunner(bundle, device, max_rows=2, precision="bfloat16")
    warm_up(runner)
    sampling = sampling_of([0], [SampleSettings(forced_id=30, num_logprobs=0)])
    results = [Rows(each, SOURCES[:1]).step([[1]], sampling) for each in (runner, native)]
    np.testing.assert_allclose(results[0].logprobs, results[1].logprobs, atol=0.1)


def test_products_of_float32_graphs_keep_float32(bundle: Bundle, device: CudaDevice) -> None:
    """By default the provider multiplies float32 matrices in TF32 on cards that have it."""
    path = bundle.file(str(bundle.graph_set("float32", "cuda").decoder))
    session = cuda_session(path, device.stream, ordinal=device.ordinal, captures=False, memory_limit_bytes=None)
    assert session.get_provider_options()["CUDAExecutionProvider"]["use_tf32"] == "0"


def test_the_pool_is_as_large_as_the_free_memory_allows(bundle: Bundle, device: CudaDevice) -> None:
    assert CudaRunner(bundle, device, max_rows=2, precision="float32").facts.num_blocks == 2 * 2 * TABLE_WIDTH
    held = device.allocate(device.description().free_bytes - (8 << 20))
    fewer = CudaRunner(bundle, device, max_rows=400, precision="float32")
    assert 2 * TABLE_WIDTH <= fewer.facts.num_blocks < 400 * 2 * TABLE_WIDTH
    del held


def test_a_decoder_only_model_runs(tmp_path: Path, device: CudaDevice) -> None:
    bundle = export_small(tmp_path, DECODER)
    ours = CudaRunner(bundle, device, max_rows=2, precision="float32", num_blocks=12)
    reference = NativeRunner(bundle, max_rows=2, threads=1, precision="float32", num_blocks=12)
    results = []
    for runner in (ours, reference):
        rows = Rows(runner, [[], []])
        sampling = sampling_of([2, 4], [SampleSettings(num_logprobs=3)] * 2)
        results.append(rows.step([[1, 5, 6], [1, 7]], sampling))
    assert_equal(*results)


def test_an_encoder_only_model_and_its_heads_run(tmp_path: Path, device: CudaDevice) -> None:
    bundle = export_small(tmp_path, ENCODER)
    ours = CudaEncoderRunner(bundle, device, max_rows=2, precision="float32")
    reference = EncoderRunner(bundle, max_rows=2, threads=1, precision="float32")
    states = [runner.encode(SOURCES, ()).memory for runner in (ours, reference)]
    assert states[0] is not None
    assert states[1] is not None
    np.testing.assert_allclose(states[0], states[1], atol=1e-5)
    for task in reference.facts.heads:
        expected = reference.run_head(task, states[1][:3])
        np.testing.assert_allclose(ours.run_head(task, states[1][:3]), expected, atol=1e-5)
