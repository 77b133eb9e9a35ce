"""Memory of a model compared with the bytes that its runner reserves, and arithmetic of the budget."""

import asyncio
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from antiphon.bundle.manifest import Bundle, MemoryFit, MemoryProfile, load_bundle
from antiphon.domain.errors import InvalidArgument, OverBudget, Unavailable
from antiphon.domain.limits import EngineLimits
from antiphon.engine.stream import OutputStream
from antiphon.observability.metrics import MetricFamilies
from antiphon.ops.cache_geometry import blocks_for
from antiphon.rpc.v1.streaming import Pacing
from antiphon.runtime.encoder import RUN_TOKENS
from antiphon.runtime.native import NativeRunner
from antiphon.server.models.loading import SharedResources, StartupError, load
from antiphon.server.models.memory import (
    DEFAULT_WORKSPACE_BYTES,
    MemoryBudget,
    ModelMemory,
    Need,
    encode_budget,
    need_of,
)
from antiphon.server.settings import SHIPPED_BUNDLE, ModelPlan, ModelSettings, ServerConfig
from tests.fakes import request_of


def limits(**changes: Any) -> EngineLimits:
    return EngineLimits(**{"max_num_seqs": 5} | changes)


def shipped_plan(**changes: Any) -> ModelPlan:
    return ServerConfig(threads=1, max_num_seqs=5, **changes).plan("one", ModelSettings(path=SHIPPED_BUNDLE))


@pytest.fixture(scope="module")
def shipped() -> Bundle:
    return load_bundle(SHIPPED_BUNDLE)


@pytest.mark.parametrize("num_blocks", [None, 40])
def test_need_counts_the_pool_that_the_native_runner_reserves(shipped: Bundle, num_blocks: int | None) -> None:
    need = need_of(shipped, shipped.graph_set(), limits(kv_cache_blocks=num_blocks))
    runner = NativeRunner(shipped, max_rows=5, threads=1, num_blocks=num_blocks)
    assert (need.memory.cache_bytes, need.num_blocks) == (runner.cache.nbytes, runner.facts.num_blocks)
    assert need.block_bytes == runner.cache[0].nbytes


def test_need_counts_graphs_and_counts_shared_weights_once(shipped: Bundle) -> None:
    files = ("encoder.native.int8.onnx", "decoder.native.int8.onnx", "explain.int8.onnx", "weights.native.int8.bin")
    need = need_of(shipped, shipped.graph_set(), limits())
    assert need.memory.weight_bytes == sum((SHIPPED_BUNDLE / name).stat().st_size for name in files)


def test_need_uses_the_workspace_of_the_limit_the_profile_or_the_default(shipped: Bundle) -> None:
    fit = MemoryFit(a=1000, b=10, c=0, residual=0, exponent=1, max_len=40, max_rows=4)
    profile = MemoryProfile(fits={"native-int8": fit}, machine="none")
    plain, measured = (
        replace(shipped, manifest=shipped.manifest.model_copy(update={"memory": memory})) for memory in (None, profile)
    )
    longest = shipped.manifest.model.max_source_len

    def workspace(of: Bundle, **changes: int) -> int:
        return need_of(of, shipped.graph_set(), limits(**changes)).memory.workspace_bytes

    assert workspace(plain) == DEFAULT_WORKSPACE_BYTES
    assert workspace(measured, max_num_batched_tokens=2 * longest) == 1000 + 20 * longest
    assert workspace(measured, max_num_batched_tokens=1) == 1000 + 10 * longest  # the longest source counts in any case
    assert workspace(measured, workspace_limit_bytes=77) == 77


@pytest.mark.parametrize("limit_bytes", [None, 3_000_000])
def test_encode_budget_predicts_the_values_that_the_runner_reports(shipped: Bundle, limit_bytes: int | None) -> None:
    """The longest batch and the longest source that are predicted to fit run within the limit."""
    budget = encode_budget(shipped, shipped.graph_set(), limits(workspace_limit_bytes=limit_bytes))
    assert budget is not None
    runner = NativeRunner(shipped, max_rows=64, threads=1, workspace_limit_bytes=limit_bytes)
    longest = budget.longest_source(runner.facts.max_source_len)
    fewest = [length for length in (1, 8, 30, longest) if length <= longest]
    for length in fewest:
        count = max(n for n in range(1, 1 + 1024 // length) if budget.fits(n * length, length))
        blocks = iter(range(runner.facts.num_blocks))
        tables = [[next(blocks) for _ in range(blocks_for(length, runner.facts.block_size))] for _ in range(count)]
        report = runner.encode([[5] * length] * count, tables)
        predicted = report.predicted_fused_bytes
        assert predicted is not None
        assert predicted <= budget.predict(count * length, length) <= budget.max_bytes
        if count * length <= RUN_TOKENS:
            assert predicted == budget.predict(count * length, length)


def test_workspace_is_refused_at_start_when_it_is_too_small_for_any_source() -> None:
    shared = SharedResources(
        families=MetricFamilies(CollectorRegistry()), pacing=Pacing(1.0), budget=MemoryBudget(None)
    )
    with pytest.raises(StartupError, match="workspace_limit_bytes is 1000; it must be at least"):
        load(shipped_plan(workspace_limit_bytes=1000), shared)


def test_description_contains_the_longest_source_that_fits_the_workspace() -> None:
    shared = SharedResources(
        families=MetricFamilies(CollectorRegistry()), pacing=Pacing(1.0), budget=MemoryBudget(None)
    )
    served = load(shipped_plan(workspace_limit_bytes=1_000_000), shared)
    longest = served.description.limits.max_source_len
    assert 1 < longest < load_bundle(SHIPPED_BUNDLE).manifest.model.max_source_len
    with closing(asyncio.new_event_loop()) as loop:
        for length, refusal in ((longest, Unavailable), (longest + 1, InvalidArgument)):  # the engine is not started
            with pytest.raises(refusal):
                served.engine.submit(request_of("a", (5,) * length), OutputStream("a", loop=loop))


def need(weights: int, cache_blocks: int, workspace: int, block_bytes: int = 10) -> Need:
    memory = ModelMemory(weight_bytes=weights, cache_bytes=cache_blocks * block_bytes, workspace_bytes=workspace)
    return Need(memory=memory, num_blocks=cache_blocks, block_bytes=block_bytes, fewest_blocks=4)


def test_budget_refusal_lists_every_part_and_the_number_of_blocks_that_would_fit() -> None:
    budget = MemoryBudget(1000)
    budget.reserve("first", need(100, 20, 50))
    with pytest.raises(OverBudget) as caught:
        budget.reserve("second", need(200, 70, 30))
    message = str(caught.value)
    assert "model 'second' needs 930 bytes: 200 bytes of weights, 700 of cache" in message
    assert "lower kv_cache_blocks from 70: 42 would fit" in message  # 1000 - 350 - 230 = 420
    assert "30 of workspace (lower or set workspace_limit_bytes)" in message
    assert "650 of memory_limit_bytes, 1000, are free" in message
    budget.reserve("second", need(200, 42, 30))
    assert sum(memory.total_bytes for memory in budget.reserved.values()) == 1000


def test_budget_refusal_suggests_no_cache_when_none_would_fit() -> None:
    budget = MemoryBudget(269)
    with pytest.raises(OverBudget, match="kv_cache_blocks from 70, though 4, the fewest, would not fit either"):
        budget.reserve("one", need(200, 70, 30))
    with pytest.raises(OverBudget) as caught:
        budget.reserve("one", need(300, 0, 30))
    assert "cache" not in str(caught.value)
    assert budget.reserved == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 400)), max_size=20))
def test_budget_never_admits_more_than_its_limit(steps: list[tuple[str, bool, int]]) -> None:
    budget, held = MemoryBudget(1000), dict[str, int]()
    for name, is_taken, size in steps:
        if not is_taken:
            budget.release(name)
            held.pop(name, None)
        elif name not in held:
            fits = sum(held.values()) + size <= 1000
            try:
                budget.reserve(name, need(size, 0, 0))
            except OverBudget:
                assert not fits
            else:
                assert fits
                held[name] = size
    assert {name: memory.total_bytes for name, memory in budget.reserved.items()} == held


def test_absent_budget_refuses_nothing() -> None:
    budget = MemoryBudget(None)
    budget.reserve("one", need(1 << 60, 0, 0))
    assert set(budget.reserved) == {"one"}
