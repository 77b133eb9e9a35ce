"""Choice among connections to the processes of a server."""

from __future__ import annotations

import random

import grpc
import pytest

from antiphon.client.connection import WORKER_KEY, Offer, Placement, offer_of


@pytest.mark.parametrize(
    ("code", "is_known"),
    [
        (grpc.StatusCode.OK, True),
        (grpc.StatusCode.UNIMPLEMENTED, False),
        (grpc.StatusCode.UNAVAILABLE, None),
        (grpc.StatusCode.UNAUTHENTICATED, None),
    ],
)
def test_only_a_definite_answer_counts(code: grpc.StatusCode, is_known: bool | None) -> None:
    assert offer_of(code, None) == Offer(is_known, 0, 1)


def test_trailer_names_the_process() -> None:
    assert offer_of(grpc.StatusCode.OK, [("x", "y"), (WORKER_KEY, "3/8")]) == Offer(True, 3, 8)


@pytest.mark.parametrize("num_workers", [1, 2, 8, 32])
def test_one_connection_to_each_process_is_kept(num_workers: int) -> None:
    kernel = random.Random(num_workers)
    first = Offer(True, kernel.randrange(num_workers), num_workers)
    placement, kept = Placement(first), [first.worker]
    while placement.wants_more():
        offer = Offer(True, kernel.randrange(num_workers), num_workers)
        if placement.keeps(offer):
            kept.append(offer.worker)
    assert sorted(kept) == list(range(num_workers))


def test_attempts_end_when_a_process_is_never_reached() -> None:
    placement, num_attempts = Placement(Offer(True, 0, 2)), 0
    while placement.wants_more():
        num_attempts += 1
        assert not placement.keeps(Offer(True, 0, 2))
        assert not placement.keeps(Offer(None, 1, 2))
    assert num_attempts == 16
