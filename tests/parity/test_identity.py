"""Answers are bit-identical alone and in a batch: tokens, log-probabilities and scores of every request.

Random mixes of requests go through the engine's steps over native graphs, with any lengths and any controls (greedy,
sampled, beams, penalties, constraints, prefixes, targets to score, sources to embed). They start and end at random
steps, and some are cancelled. Each is then run alone, with one thread. ANTIPHON_IDENTITY_ROUNDS is the number of mixes
for each graph set and number of threads; `make soak` runs many.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon.bundle.manifest import Bundle, Precision
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.controls.table import MAX_SEED, EarlyStopping
from antiphon.domain.errors import InvalidArgument
from antiphon.domain.request import FinishReason, Pooling, Request, Task, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.export.export import export_bundle
from antiphon.runtime.native import NativeRunner
from tests.fakes import changed, request_of, scored
from tests.marks import marked
from tests.parity.crowd import Crowd

ROUNDS = int(os.environ.get("ANTIPHON_IDENTITY_ROUNDS") or 2)
MAX_ROWS = 40
NUM_REQUESTS = 200
MAX_WIDTH = 8


def random_request(dice: random.Random, name: str, runner: NativeRunner) -> Request:
    def ids(count: int) -> tuple[int, ...]:
        return tuple(dice.randrange(4, runner.facts.vocab_size) for _ in range(count))

    source = ids(dice.randint(1, runner.facts.max_source_len))
    prefix = ids(dice.choice([0, 0, 1, 3, 8, runner.facts.max_target_len - 1]))
    made = request_of(name, source, params=random_params(dice, runner.facts.vocab_size), prefix=prefix)
    own_dice = random.Random(f"{name} {source}")
    if not made.params.allowed_ids and own_dice.random() < 0.3:
        candidates = own_dice.sample(range(4, runner.facts.vocab_size), own_dice.randint(1, 90))
        made = changed(made, candidate_ids=np.array(sorted({runner.facts.eos_id, *candidates}), np.int32))
    task = dice.choice([Task.GENERATE] * 8 + [Task.SCORE, Task.EMBED])
    if task is Task.GENERATE:
        return made
    if task is Task.SCORE:
        params = SamplingParams(num_logprobs=dice.choice([None, 0, 3]))
        return scored(changed(made, prefix_ids=(), params=params), ids(dice.randint(1, runner.facts.max_target_len)))
    of_encoders_only = (Pooling.MODEL, Pooling.DECLARED)
    pooling = dice.choice([kind for kind in Pooling if kind not in of_encoders_only])
    return Request(task=Task.EMBED, arrival=made.arrival, source_ids=source, pooling=pooling)


def random_params(dice: random.Random, vocab_size: int) -> SamplingParams:
    """Return a few random controls of every kind."""

    def some(values: list[Any], default: Any) -> Any:
        return dice.choice(values) if dice.random() < 0.3 else default

    shared: dict[str, Any] = {
        "max_new_tokens": dice.choice([1, 4, 12, None]),
        "repetition_penalty": some([1.3, 0.8], 1.0),
        "presence_penalty": some([0.5, -0.5], 0.0),
        "frequency_penalty": some([0.5], 0.0),
        "no_repeat_ngram_size": some([1, 2, 3], 0),
        "logit_bias": some([((7, 2.0), (9, -1.0))], ()),
        "suppressed_ids": some([(5, 6, 8)], ()),
        "allowed_ids": tuple(range(4, vocab_size, 2)) if dice.random() < 0.05 else (),
        "stop_ids": some([(10, 11), (12,)], ()),
        "ignore_eos": some([True], False),
    }
    if dice.random() < 0.35:
        width = dice.randint(2, MAX_WIDTH)
        return SamplingParams(
            **shared,
            beam_width=width,
            num_return_sequences=dice.randint(1, width),
            length_penalty=dice.choice([0.0, 1.0, 2.0]),
            early_stopping=dice.choice(list(EarlyStopping)),
            num_logprobs=some([0], None),
        )
    temperature = dice.choice([0.0, 0.6, 1.0, 4.0])
    return SamplingParams(
        **shared,
        temperature=temperature,
        top_k=dice.choice([0, 0, 1, 5, 50]),
        top_p=dice.choice([1.0, 1.0, 0.3, 0.95]),
        min_p=some([0.1], 0.0) if temperature else 0.0,
        typical_p=some([0.5], 1.0) if temperature else 1.0,
        num_return_sequences=some([2, 5], 1) if temperature else 1,
        num_logprobs=dice.choice([None, 0, 2]),
        seed=dice.randint(0, MAX_SEED),
    )


def long_request(dice: random.Random, name: str, runner: NativeRunner) -> Request:
    """Return a random request. If it uses a single row, it starts early and ends at the last position."""
    made = random_request(dice, name, runner)
    while made.task is Task.GENERATE and made.params.num_rows > 1 and dice.random() < 0.9:
        made = random_request(dice, name, runner)
    if made.task is not Task.GENERATE or made.params.num_rows > 1:
        return made
    params = dataclasses.replace(made.params, max_new_tokens=None, ignore_eos=True, stop_ids=())
    return changed(made, source_ids=made.source_ids[:16], params=params, prefix_ids=made.prefix_ids[:3])


def run_mix(
    runner: NativeRunner,
    dice: random.Random,
    loop: asyncio.AbstractEventLoop,
    count: int,
    draw: Callable[[random.Random, str, NativeRunner], Request] = random_request,
    further: Sequence[NativeRunner] = (),
) -> Crowd:
    crowd = Crowd(runner, loop, further)
    pace = dice.choice([0.1, 0.4, 1.5])  # steps between arrivals, so that batches are large or small
    for index in range(count):
        with contextlib.suppress(InvalidArgument):  # more beams do not fit into a small pool
            crowd.add(draw(dice, str(index), runner))
        while dice.random() < pace / (1 + pace):
            crowd.step(*dice.sample(list(crowd.live), int(dice.random() < 0.05 * len(crowd.live))))
    crowd.finish()
    return crowd


def bits(event: TokenEvent) -> tuple[object, ...]:
    """Return the parts of an output that a client sees."""
    embedding = None if event.encoder_outputs is None else event.encoder_outputs.values.tobytes()
    return event.output_index, event.token_ids, event.logprobs, event.score, event.finish_reason, embedding


def check_against_alone(crowd: Crowd, runner: NativeRunner) -> None:
    alone = Crowd(runner, crowd.loop)
    for name, group in crowd.groups.items():
        together = crowd.events(name)
        (last,) = [event for event in together if event.is_last]
        alone.add(group.request)
        alone.finish()
        expected = alone.events(name)
        if last.finish_reason is FinishReason.CANCELLED:
            for event in together:
                begun = expected[event.output_index]
                assert event.token_ids == begun.token_ids[: len(event.token_ids)]
                assert event.logprobs == begun.logprobs[: len(event.logprobs)]
        else:
            assert list(map(bits, together)) == list(map(bits, expected)), f"{group.request} differs"


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.mark.parametrize("threads", marked([1, 2], "combinations", but=[2]))
@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_requests_of_a_random_mix_are_bit_identical_to_each_alone(
    bundle: Bundle, loop: asyncio.AbstractEventLoop, precision: Precision, threads: int
) -> None:
    crowded = NativeRunner(bundle, max_rows=MAX_ROWS, threads=threads, precision=precision)
    alone = NativeRunner(bundle, max_rows=MAX_WIDTH, threads=1, precision=precision)
    num_mixed_steps = 0
    for seed in range(ROUNDS):
        crowd = run_mix(crowded, random.Random(seed), loop, NUM_REQUESTS)
        check_against_alone(crowd, alone)
        num_mixed_steps += crowd.watcher.num_mixed_steps
    assert num_mixed_steps > ROUNDS  # prefixes were fed in steps with other rows' tokens


@pytest.mark.parametrize("is_tight", [False, True])
def test_requests_of_a_random_mix_over_lanes_are_bit_identical_to_each_alone(
    bundle: Bundle, loop: asyncio.AbstractEventLoop, is_tight: bool
) -> None:
    alone = NativeRunner(bundle, max_rows=MAX_WIDTH, threads=1)
    num_blocks = alone.facts.num_blocks // MAX_WIDTH * 4 if is_tight else None
    first = NativeRunner(bundle, max_rows=MAX_ROWS, threads=1, num_blocks=num_blocks)
    second = NativeRunner(bundle, max_rows=MAX_ROWS, threads=2, cache=first.cache)
    num_preemptions = 0
    for seed in range(ROUNDS):
        draw = long_request if is_tight else random_request
        crowd = run_mix(first, random.Random(seed), loop, NUM_REQUESTS // 2, draw, further=[second])
        check_against_alone(crowd, alone)
        num_preemptions += crowd.num_preemptions
    assert (num_preemptions > 0) == is_tight


@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_requests_are_bit_identical_to_each_alone_with_every_kind_of_positions(
    variant: Bundle, loop: asyncio.AbstractEventLoop, precision: Precision
) -> None:
    crowded = NativeRunner(variant, max_rows=MAX_ROWS, threads=2, precision=precision)
    alone = NativeRunner(variant, max_rows=MAX_WIDTH, threads=1, precision=precision)
    for seed in range(-(-ROUNDS // 4)):
        check_against_alone(run_mix(crowded, random.Random(seed), loop, NUM_REQUESTS // 4), alone)


def test_requests_are_bit_identical_to_each_alone_with_4_bit_weights(
    checkpoint: Checkpoint, tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    bundle = export_bundle(checkpoint, tmp_path / "bundle", precisions=("int4",), explain=False)
    crowded = NativeRunner(bundle, max_rows=MAX_ROWS, threads=2)
    alone = NativeRunner(bundle, max_rows=MAX_WIDTH, threads=1)
    check_against_alone(run_mix(crowded, random.Random(0), loop, NUM_REQUESTS // 4), alone)
    tight = NativeRunner(bundle, max_rows=24, threads=2, num_blocks=alone.facts.num_blocks // MAX_WIDTH * 4)
    crowd = run_mix(tight, random.Random(0), loop, NUM_REQUESTS // 2, long_request)
    check_against_alone(crowd, alone)
    assert crowd.num_preemptions > 0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_preempted_requests_are_bit_identical_to_uninterrupted_ones(
    bundle: Bundle, loop: asyncio.AbstractEventLoop, precision: Precision, threads: int
) -> None:
    longest = NativeRunner(bundle, max_rows=1, threads=1).facts.num_blocks
    crowded = NativeRunner(bundle, max_rows=24, threads=threads, precision=precision, num_blocks=4 * longest)
    alone = NativeRunner(bundle, max_rows=MAX_WIDTH, threads=1, precision=precision)
    num_preemptions = 0
    for seed in range(ROUNDS):
        crowd = run_mix(crowded, random.Random(seed), loop, NUM_REQUESTS // 2, long_request)
        check_against_alone(crowd, alone)
        num_preemptions += crowd.num_preemptions
    assert num_preemptions > 5 * ROUNDS


def test_preempted_requests_are_bit_identical_to_uninterrupted_ones_with_every_kind_of_positions(
    variant: Bundle, loop: asyncio.AbstractEventLoop
) -> None:
    longest = NativeRunner(variant, max_rows=1, threads=1).facts.num_blocks
    crowded = NativeRunner(variant, max_rows=24, threads=2, num_blocks=3 * longest)
    alone = NativeRunner(variant, max_rows=MAX_WIDTH, threads=1)
    draw = long_request
    if variant.manifest.model.decoder_self != "attention":  # its rows never need another block, but lose their turn
        crowded = NativeRunner(variant, max_rows=2 * MAX_WIDTH, threads=2)
        draw = contending_request
    crowd = run_mix(crowded, random.Random(0), loop, NUM_REQUESTS // 2, draw)
    check_against_alone(crowd, alone)
    assert crowd.num_preemptions > 0


def contending_request(dice: random.Random, name: str, runner: NativeRunner) -> Request:
    """Return a request of one of a few callers. Half of them come from one caller with samples of maximum length."""
    made = random_request(dice, name, runner)
    if dice.random() < 0.5:
        return changed(made, client=dice.choice("xyz"))
    while made.task is not Task.GENERATE or not made.params.temperature:
        made = random_request(dice, name, runner)
    count = dice.choice([1, MAX_WIDTH])
    params = dataclasses.replace(
        made.params, max_new_tokens=None, ignore_eos=True, stop_ids=(), num_return_sequences=count
    )
    return changed(made, prefix_ids=made.prefix_ids[:3], params=params, client="many")


@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_samples_are_bit_identical_to_uninterrupted_ones_when_other_callers_took_their_rows(
    bundle: Bundle, loop: asyncio.AbstractEventLoop, precision: Precision
) -> None:
    crowded = NativeRunner(bundle, max_rows=2 * MAX_WIDTH, threads=2, precision=precision)
    alone = NativeRunner(bundle, max_rows=MAX_WIDTH, threads=1, precision=precision)
    num_preemptions = 0
    for seed in range(ROUNDS):
        crowd = run_mix(crowded, random.Random(seed), loop, NUM_REQUESTS // 4, contending_request)
        check_against_alone(crowd, alone)
        num_preemptions += crowd.num_preemptions
    assert num_preemptions > 5 * ROUNDS


@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_output_is_bit_identical_when_continued_from_its_own_prefix(
    bundle: Bundle, loop: asyncio.AbstractEventLoop, precision: Precision
) -> None:
    runner = NativeRunner(bundle, max_rows=1, threads=1, precision=precision)
    crowd = Crowd(runner, loop)
    dice = random.Random(0)
    for index in range(4):
        params = SamplingParams(temperature=index / 2, seed=index, max_new_tokens=12, num_logprobs=1)
        source = tuple(dice.randrange(4, runner.facts.vocab_size) for _ in range(5 + 3 * index))
        crowd.add(request_of(f"whole {index}", source, params=params))
        crowd.finish()
        (whole,) = crowd.events(f"whole {index}")
        for cut in range(1, len(whole.token_ids)):
            rest = dataclasses.replace(params, max_new_tokens=12 - cut)
            crowd.add(request_of(f"{index} {cut}", source, params=rest, prefix=whole.token_ids[:cut]))
            crowd.finish()
            (found,) = crowd.events(f"{index} {cut}")
            assert (found.token_ids, found.logprobs) == (whole.token_ids[cut:], whole.logprobs[cut:])


@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_score_is_bit_identical_to_the_log_probabilities_of_generation(
    bundle: Bundle, loop: asyncio.AbstractEventLoop, precision: Precision
) -> None:
    runner = NativeRunner(bundle, max_rows=4, threads=2, precision=precision)
    crowd = Crowd(runner, loop)
    params = SamplingParams(temperature=1.0, seed=5, max_new_tokens=12, num_logprobs=2, num_return_sequences=3)
    made = request_of("made", (5, 6, 7, 8), params=params)
    crowd.add(made)
    crowd.finish()
    for event in crowd.events("made"):
        target = tuple(one.token_id for one in event.logprobs)
        name = f"scored {event.output_index}"
        crowd.add(scored(made, target, name=name))
        crowd.finish()
        assert crowd.events(name)[0].logprobs == event.logprobs
