"""Turns of callers on the event loop: order and number of the calls that start."""

from __future__ import annotations

import asyncio

from antiphon.rpc.middleware import CallTurns


async def test_call_of_another_caller_starts_before_the_rest_of_a_burst() -> None:
    """Regression: it waited behind 5,100 calls of one client for 4 to 6 seconds."""
    turns, started = CallTurns(calls_per_turn=2), list[str]()

    async def call(caller: str) -> None:
        await turns.take(caller)
        started.append(caller)

    burst = [asyncio.ensure_future(call("many")) for _ in range(100)]
    await asyncio.sleep(0)
    late = asyncio.ensure_future(call("one"))
    await asyncio.gather(*burst, late)
    assert started.index("one") <= 6
    assert started.count("many") == 100


async def test_waiting_call_takes_no_turn_when_it_has_ended() -> None:
    turns, started = CallTurns(calls_per_turn=1), list[int]()

    async def call(number: int) -> None:
        await turns.take("a")
        started.append(number)

    calls = [asyncio.ensure_future(call(number)) for number in range(4)]
    await asyncio.sleep(0)
    calls[1].cancel()
    await asyncio.wait(calls)
    assert started == [0, 2, 3]


async def test_calls_start_immediately_when_there_are_few() -> None:
    turns = CallTurns(calls_per_turn=4)
    for _ in range(4):
        taking = turns.take("a")
        try:
            taking.send(None)
        except StopIteration:
            continue
        raise AssertionError("a call waited although no other did")


async def test_waiting_calls_are_forgotten_when_all_have_started() -> None:
    turns = CallTurns(calls_per_turn=1)
    await asyncio.gather(*(turns.take(str(number % 3)) for number in range(30)))
    assert turns.num_waiting == 0
