"""Loading and unloading models of a running server, their published states, and GetCache."""

import asyncio
import ctypes
import dataclasses
import shutil
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse
from prometheus_client import CollectorRegistry, generate_latest

from antiphon.architecture.heads import HeadConfig
from antiphon.bundle.manifest import MANIFEST_NAME
from antiphon.domain.errors import BadBundle, LastModel, ModelExists, ModelNotFound, OverBudget, Unavailable
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.engine import Engine
from antiphon.engine.stream import OutputStream
from antiphon.observability.metrics import MetricFamilies
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for
from antiphon.ops.workspace import _NativeStats
from antiphon.rpc.v1.models import LoadedModel, Models
from antiphon.rpc.v1.streaming import Pacing
from antiphon.server.admin import AdminServicer
from antiphon.server.models.control import Control
from antiphon.server.models.loading import SharedResources, load
from antiphon.server.models.memory import MemoryBudget
from antiphon.server.settings import SHIPPED_BUNDLE, ModelPlan, ModelSettings, ServerConfig
from antiphon.v1 import admin_pb2 as pb
from tests.fakes import FakeRunner, request_of
from tests.serving import MODEL_NAME, SOURCE, Gate, Serving, asking_whole, serving, stub_of

NOT_SERVING = HealthCheckResponse.NOT_SERVING
CONFIG = ServerConfig(threads=1, max_num_seqs=2)


def plan(name: str, path: Path = SHIPPED_BUNDLE, **own: Any) -> ModelPlan:
    return CONFIG.plan(name, ModelSettings(path=path, **own))


@dataclasses.dataclass
class Host:
    """Control with one model, "first", that records all announcements."""

    registry: CollectorRegistry
    shared: SharedResources
    control: Control
    health: dict[str, int]
    has_left: asyncio.Event

    @property
    def names(self) -> list[str]:
        return [served.name for served in self.control.models]

    def state(self) -> Any:
        """Return the state that a failed change must not alter."""
        return self.names, self.shared.budget.reserved, dict(self.health), generate_latest(self.registry)


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    registry, health, has_left = CollectorRegistry(), dict[str, int](), asyncio.Event()
    shared = SharedResources(families=MetricFamilies(registry), pacing=Pacing(1e6), budget=MemoryBudget(60 << 20))

    async def announce(name: str, status: int) -> None:
        health[name] = status
        if status == NOT_SERVING:
            has_left.set()

    control = Control(Models(), shared, announce)
    await control.publish(load(plan("first"), shared))
    yield Host(registry, shared, control, health, has_left)
    await control.drain(5)


def ask(served: LoadedModel, max_new_tokens: int = 3) -> OutputStream:
    """Return greedy parameters that ignore the end token."""
    stream = OutputStream("a", coalesce_s=0.0)
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    engine = served.engine
    engine.submit(request_of("a", (5, 6, 2), params=params, arrival_s=engine.clock()), stream)
    return stream


async def test_unload_frees_the_runner_its_pool_and_its_workspace_round_after_round(host: Host) -> None:
    before = host.state()
    for _ in range(3):
        served = await host.control.load(plan("second"))
        await ask(served).collect()
        assert isinstance(served.engine, Engine)
        stepper = served.engine._lanes[0].stepper
        assert stepper is not None
        runner: Any = stepper._runner
        native = (runner.workspace._stats, runner.workspace._handle)
        gone = [weakref.ref(runner), weakref.ref(runner.cache), weakref.ref(runner.workspace)]
        del runner, stepper
        assert await host.control.unload("second", 5)
        # `served` is still referred to, as by calls that write their last answers; no garbage was collected.
        assert [reference() for reference in gone] == [None, None, None]
        assert _in_use(*native) == 0
    names, held, health, metrics = host.state()
    assert (names, held, metrics) == (before[0], before[1], before[3])
    assert health["second"] == NOT_SERVING


def _in_use(stats: Any, handle: int) -> int:
    """Return the bytes that an allocator still has after its Python object was deleted."""
    native = _NativeStats()
    stats(handle, ctypes.byref(native))
    return int(native.reserved_bytes)


async def test_unload_lets_a_running_request_finish_and_refuses_new_ones(host: Host) -> None:
    served = await host.control.load(plan("second"))
    stream = ask(served, max_new_tokens=100)
    first = await anext(stream)
    unloading = asyncio.ensure_future(host.control.unload("second", 60))
    await host.has_left.wait()
    with pytest.raises(ModelNotFound, match="'second' is not served here; 'first' is"):
        host.control.models.find("second")
    events = [first, *[event async for event in stream]]
    assert sum(len(event.token_ids) for event in events) == 100
    assert await unloading


async def test_unload_ends_requests_that_run_longer_than_its_grace(host: Host) -> None:
    served = await host.control.load(plan("second"))
    stream = ask(served, max_new_tokens=200)
    await anext(stream)
    assert not await host.control.unload("second", 0)
    events = [event async for event in stream]
    assert isinstance(events[-1].error, Unavailable)


async def test_description_of_a_model_has_the_size_of_its_cache(host: Host) -> None:
    (served,) = host.control.models
    cache = served.description.cache
    assert cache.block_tokens == cache.target_block_tokens == BLOCK_SIZE
    assert cache.num_blocks == served.engine.num_blocks
    assert cache.num_blocks * cache.block_bytes == host.shared.budget.reserved["first"].cache_bytes


async def test_failed_load_leaves_no_state(host: Host, tmp_path: Path) -> None:
    shutil.copytree(SHIPPED_BUNDLE, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").unlink()
    (tmp_path / "other").mkdir()
    before = host.state()
    for error, message, wanted in (
        (BadBundle, f"tokenizer.json is missing|{MANIFEST_NAME}", plan("second", tmp_path / "broken")),
        (BadBundle, f"{MANIFEST_NAME} is missing", plan("second", tmp_path / "other")),
        (BadBundle, "kv_cache_blocks is 3", plan("second", kv_cache_blocks=3)),
        (BadBundle, "no native graphs at precision float32", plan("second", precision="float32")),
        (OverBudget, "lower kv_cache_blocks from 16384", plan("second", max_num_seqs=512)),
        (ModelExists, "'first' is served already", plan("first")),
    ):
        with pytest.raises(error, match=message):
            await host.control.load(wanted)
        assert host.state() == before
    with pytest.raises(LastModel):
        await host.control.unload("first", 0)
    for name in ("", "second"):
        with pytest.raises(ModelNotFound):
            await host.control.unload(name, 0)
    assert host.state() == before


async def test_load_is_finished_when_its_caller_has_left(host: Host) -> None:
    loading = asyncio.ensure_future(host.control.load(plan("second")))
    await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert await host.control.unload("first", 5)  # waits for its turn
    assert host.names == ["second"]
    assert host.control.models.find("").name == "second"


async def test_loads_of_one_name_run_one_after_the_other(host: Host) -> None:
    results = await asyncio.gather(*(host.control.load(plan("second")) for _ in range(3)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["LoadedModel", "ModelExists", "ModelExists"]


async def test_drain_waits_for_every_engine_within_one_grace_and_refuses_loads(host: Host) -> None:
    await host.control.load(plan("second"))
    streams = [ask(served, max_new_tokens=60) for served in host.control.models]
    assert await host.control.drain(60)
    for stream in streams:
        assert sum(len(event.token_ids) for event in await stream.collect()) == 60
    with pytest.raises(Unavailable):
        await host.control.load(plan("third"))


async def test_control_notices_a_lost_engine_of_any_model(host: Host) -> None:
    second = await host.control.load(plan("second"))
    assert not host.control.has_lost_engine
    second.engine.stop()
    assert host.control.has_lost_engine


def admin_of(served: Serving) -> AdminServicer:
    async def announce(name: str, status: int) -> None:
        raise AssertionError("no model changes")

    budget = MemoryBudget(None)
    shared = SharedResources(families=MetricFamilies(CollectorRegistry()), pacing=Pacing(1e6), budget=budget)
    return AdminServicer(Control(served.calls.models, shared, announce), budget, ServerConfig())


async def test_get_cache_lists_the_blocks_of_running_requests() -> None:
    gates: list[Gate] = []

    def prepare(runner: FakeRunner) -> None:
        runner.reads_history = True
        gates.append(Gate(runner))

    async with serving(prepare=prepare) as served:
        admin, (gate,) = admin_of(served), gates
        search = stub_of(served).GenerateUnary(asking_whole(beam_width=3))
        assert await asyncio.to_thread(gate.reached.wait, 60)
        (cache,) = (await admin.get_cache(pb.GetCacheRequest())).caches
        named = await admin.get_cache(pb.GetCacheRequest(model=MODEL_NAME))
        num_free = served.engine.num_free_blocks
        gate.open()
        answer = await search
        after = await admin.get_cache(pb.GetCacheRequest())
    assert list(named.caches) == [cache]
    assert (cache.model, cache.worker, cache.num_blocks) == (MODEL_NAME, 0, served.engine.num_blocks)
    (holder,) = cache.holders
    held = [*holder.source_blocks, *holder.target_blocks]
    assert (holder.request_number, len(holder.source_blocks)) == (1, blocks_for(len(SOURCE) + 1, 16))
    assert len(set(held)) == len(held) == cache.num_blocks - num_free == answer.usage.cache_blocks
    assert list(after.caches) == [pb.CacheUse(model=MODEL_NAME, num_blocks=cache.num_blocks)]


async def test_get_cache_of_a_model_without_a_decoder_has_no_blocks() -> None:
    async with serving(heads=[HeadConfig(task="fill_mask")]) as served:
        answer = await admin_of(served).get_cache(pb.GetCacheRequest())
    assert list(answer.caches) == [pb.CacheUse(model=MODEL_NAME)]


async def test_get_cache_refuses_an_unknown_model() -> None:
    async with serving() as served:
        with pytest.raises(ModelNotFound, match="'other' is not served here; 'fake' is"):
            await admin_of(served).get_cache(pb.GetCacheRequest(model="other"))
