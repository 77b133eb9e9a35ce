"""GetCache of one process: blocks of the running requests of each model, while the engine is held in a step."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from antiphon.architecture.heads import HeadConfig
from antiphon.domain.errors import ModelNotFound
from antiphon.observability.metrics import MetricFamilies
from antiphon.ops.cache_geometry import blocks_for
from antiphon.rpc.v1.streaming import Pacing
from antiphon.server.admin import AdminServicer
from antiphon.server.models.control import Control
from antiphon.server.models.loading import SharedResources
from antiphon.server.models.memory import MemoryBudget
from antiphon.server.settings import ServerConfig
from antiphon.v1 import admin_pb2 as pb
from tests.fakes import FakeRunner
from tests.serving import MODEL_NAME, SOURCE, Gate, Serving, asking_whole, serving, stub_of


def admin_of(served: Serving) -> AdminServicer:
    """Return the admin service of a server in this process."""

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
