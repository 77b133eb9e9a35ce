"""Lanes over the shipped bundle: answers, memory and settings."""

from dataclasses import replace

import pytest

from antiphon.bundle.manifest import Bundle, load_bundle
from antiphon.runtime.lanes import fastest_num_lanes, open_lanes, possible_lanes
from antiphon.server.models.loading import _possible_lanes
from antiphon.server.models.memory import encode_budget, need_of
from antiphon.server.settings import ModelPlan, ModelSettings, ServerConfig
from antiphon.text.tokenizer import Tokenizer
from antiphon.tools.offline import Offline
from tests.integration.test_shipped_bundle import BUNDLE, SENTENCES

ROWS = 24
NUM_SOURCES = 60


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return load_bundle(BUNDLE)


def plan(**fields: object) -> ModelPlan:
    return ServerConfig.model_validate({"threads": 4, **fields}).plan(None, ModelSettings(path=BUNDLE))


@pytest.mark.combinations
@pytest.mark.parametrize("beam_width", [1, 3])
def test_answers_do_not_depend_on_the_number_of_lanes(bundle: Bundle, beam_width: int) -> None:
    """Each lane has rows for a part of the requests, so that requests run beside different ones."""
    tokenizer = Tokenizer.load(bundle.file("tokenizer.json"))
    texts = [" ".join(SENTENCES[index % len(SENTENCES) :][: 1 + index % 4]) for index in range(NUM_SOURCES)]
    sources = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]

    def answers(num_lanes: int, threads: int) -> list[list[int]]:
        runners = open_lanes(bundle, num_lanes=num_lanes, max_rows=ROWS, threads=threads)
        with Offline(*runners, rows=ROWS) as offline:
            return offline.translate(sources, concurrency=NUM_SOURCES, max_new_tokens=40, beam_width=beam_width)

    alone = answers(1, 1)
    assert alone == answers(2, 2) == answers(3, 4)
    assert len({tuple(answer) for answer in alone}) > len(SENTENCES)


def test_lanes_share_the_cache_and_have_their_own_workspaces(bundle: Bundle) -> None:
    first, second = open_lanes(bundle, num_lanes=2, max_rows=2, threads=2, workspace_limit_bytes=64 << 20)
    assert second.cache is first.cache  # type: ignore[union-attr]
    assert second.workspace is not first.workspace


@pytest.mark.parametrize("num_lanes", [0, 3])
def test_number_of_lanes_must_be_within_the_threads(bundle: Bundle, num_lanes: int) -> None:
    with pytest.raises(ValueError, match=rf"^lanes is {num_lanes}; it must be 1 to 2, the number of threads$"):
        open_lanes(bundle, num_lanes=num_lanes, max_rows=2, threads=2)


def test_fastest_number_is_one_of_the_candidates(bundle: Bundle) -> None:
    assert fastest_num_lanes(bundle, [1, 2], max_rows=4, threads=2) in (1, 2)
    assert fastest_num_lanes(bundle, [3], max_rows=4, threads=6) == 3


def test_possible_numbers_of_lanes_divide_the_threads(bundle: Bundle) -> None:
    assert possible_lanes(bundle, 6) == [1, 2, 3, 6]
    assert possible_lanes(bundle, 32) == [1, 2, 4, 8]
    model = bundle.manifest.model.model_copy(update={"architecture": "encoder"})
    encoder = replace(bundle, manifest=bundle.manifest.model_copy(update={"model": model}))
    assert possible_lanes(encoder, 6) == [1]


def test_memory_counts_a_workspace_for_every_lane(bundle: Bundle) -> None:
    graphs, limits = bundle.graph_set(None), plan().limits
    alone, three = (need_of(bundle, graphs, limits, count).memory for count in (1, 3))
    assert three.workspace_bytes == 3 * alone.workspace_bytes
    assert three.cache_bytes == alone.cache_bytes


def test_numbers_of_lanes_that_leave_too_little_workspace_for_the_longest_source_are_left_out(bundle: Bundle) -> None:
    """The limit is what two lanes need for the longest source each."""
    longest = bundle.manifest.model.max_source_len
    budget = encode_budget(bundle, bundle.graph_set(None), plan().limits)
    assert budget is not None
    limit = int(2.1 * 1.25 * budget.predict(longest, longest))
    assert _possible_lanes(bundle, plan(lanes="auto")) == [1, 2, 4]
    assert _possible_lanes(bundle, plan(lanes="auto", workspace_limit_bytes=limit)) == [1, 2]
    assert _possible_lanes(bundle, plan(lanes=4, workspace_limit_bytes=limit)) == [4]
