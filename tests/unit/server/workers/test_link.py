"""Questions and answers over a pair of sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from antiphon.domain.errors import InvalidArgument, LastModel, Status
from antiphon.server.workers.link import Handler, Link, LinkLost, WorkerError


@contextlib.asynccontextmanager
async def linked(answer: Handler) -> AsyncIterator[tuple[Link, asyncio.Task[None], asyncio.Task[None]]]:
    """Yield the asking end, and the tasks that read both ends."""
    ours, theirs = socket.socketpair()
    asking, answering = await Link.over(ours), await Link.over(theirs, answer)
    tasks = [asyncio.create_task(link.run()) for link in (asking, answering)]
    try:
        yield asking, tasks[0], tasks[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_answers_come_to_their_questions_in_any_order() -> None:
    waits = {"slow": asyncio.Event(), "quick": asyncio.Event()}
    waits["quick"].set()

    async def answer(question: str, value: Any) -> Any:
        await waits[question].wait()
        return [question, value]

    async with linked(answer) as (link, _, _):
        slow = asyncio.create_task(link.call("slow", {"a": 1}))
        assert await link.call("quick", "Ä\n" * 100_000) == ["quick", "Ä\n" * 100_000]
        assert not slow.done()
        waits["slow"].set()
        assert await slow == ["slow", {"a": 1}]


async def test_errors_keep_their_status_reason_and_field() -> None:
    async def answer(question: str, value: Any) -> Any:
        if question == "field":
            raise InvalidArgument("name", "?", "a letter")
        if question == "status":
            raise LastModel("the last one")
        raise RuntimeError("a secret")

    async with linked(answer) as (link, _, _):
        with pytest.raises(InvalidArgument, match="name is '\\?'; it must be a letter") as field:
            await link.call("field")
        assert (field.value.field, field.value.status, field.value.reason) == (
            "name",
            Status.INVALID_ARGUMENT,
            "INVALID_FIELD",
        )
        with pytest.raises(WorkerError, match="the last one") as refused:
            await link.call("status")
        assert (refused.value.status, refused.value.reason) == (Status.FAILED_PRECONDITION, "LAST_MODEL")
        with pytest.raises(WorkerError) as fault:
            await link.call("fault")
        assert (fault.value.status, str(fault.value)) == (Status.INTERNAL, "a worker failed")


async def test_questions_end_when_the_other_end_is_gone() -> None:
    asked = asyncio.Event()

    async def never(question: str, value: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    async with linked(never) as (link, reading, answering):
        open_question = asyncio.create_task(link.call("anything"))
        await asked.wait()
        answering.cancel()
        with pytest.raises(LinkLost):
            await open_question
        await reading
        with pytest.raises(LinkLost):
            await link.call("more")


async def test_answer_to_a_question_that_was_given_up_is_ignored() -> None:
    go = asyncio.Event()

    async def answer(question: str, value: Any) -> Any:
        if question == "late":
            await go.wait()
        return question

    async with linked(answer) as (link, _, _):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(link.call("late"), 0.01)
        go.set()
        assert await link.call("next") == "next"
