"""The shipped bundle, served by an emulated 64-bit Arm and asked from here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from antiphon.client import Client, Generation
from antiphon.load.workload import EVERYDAY
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.arm.emulator import PYTHON, settings
from tests.integration.process import ServerProcess

pytestmark = pytest.mark.arm

SENTENCES = EVERYDAY[:50]


def answers(client: Client) -> list[Generation]:
    """Return the answer to each sentence; requests run together."""
    found = list(client.generate_many(SENTENCES))
    assert all(isinstance(answer, Generation) for answer in found)
    return [answer for answer in found if isinstance(answer, Generation)]


@pytest.fixture(scope="module")
def expected() -> list[Generation]:
    """Return what this processor answers."""
    with ServerProcess(SHIPPED_BUNDLE) as server, Client(server.target) as client:
        return answers(client)


@pytest.fixture(scope="module", params=[("dotprod", "1"), ("i8mm", "2")], ids="-".join)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Serve with kernels and a number of threads; the engine is not compiled."""
    kernels, threads = request.param
    program = (str(PYTHON), "-m", "antiphon.cli")
    with (
        ServerProcess(SHIPPED_BUNDLE, ("--threads", threads), program=program, env=settings(kernels)) as server,
        Client(server.target) as client,
    ):
        yield client


def test_answers_are_those_of_this_processor(client: Client, expected: list[Generation]) -> None:
    found = answers(client)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]


def test_a_streamed_answer_alone_is_that_of_the_crowd(client: Client, expected: list[Generation]) -> None:
    for sentence, answer in list(zip(SENTENCES, expected, strict=True))[:5]:
        deltas = list(client.generate(sentence))
        assert len(deltas) > 1
        assert [token for delta in deltas for token in delta.token_ids] == list(answer.token_ids)
