"""Fixtures of the engine's tests: an event loop, an engine over the fake model, and a gate that blocks its steps."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.fakes import FakeRunner
from tests.unit.engine.engine_bench import Bench, Gate


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(FakeRunner(max_rows=4, block_size=4))
    bench.engine.start()
    yield bench
    bench.engine.stop()
    assert bench.engine.num_free_blocks == bench.engine.num_blocks


@pytest.fixture
def gate(bench: Bench) -> Iterator[Gate]:
    gate = Gate()
    bench.runner.before_decode = gate
    yield gate
    gate.open()
