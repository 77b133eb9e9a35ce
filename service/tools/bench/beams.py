"""Section `beams`: what a beam search costs beside greedy decoding, and beside CTranslate2's with the same weights.

Over as many rows as CONCURRENCY searches need. Beside CTranslate2, both are given all sources at once, and it runs at
the best settings it has for this width (twin.py). Beside greedy decoding, requests come CONCURRENCY at a time, each
followed by the next, as clients do.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from antiphon.service.tools.bench.decode import num_requests
from antiphon.service.tools.bench.offline import Offline
from antiphon.service.tools.bench.report import Case, Finding, compare, share_equal
from antiphon.service.tools.bench.setup import Setup, Subject
from antiphon.service.tools.bench.timing import alternate, timed
from antiphon.service.tools.bench.twin import Twin, TwinSettings, decode_candidates, prompts_of

WIDTH = 4
CONCURRENCY = 16


def beams(setup: Setup) -> list[Finding]:
    """Every model: requests a second at width 1 and at WIDTH, and tokens a second beside CTranslate2."""
    return [found for subject in setup.twinned() for found in _of(subject, setup)]


def _of(subject: Subject, setup: Setup) -> list[Finding]:
    runner = setup.runner(subject, WIDTH * CONCURRENCY)
    sources, limit = subject.sources(num_requests(subject, CONCURRENCY)), subject.max_new_tokens
    twin = Twin(subject.twin_folder)
    settings = twin.best(_candidates(setup.threads), prompts_of(sources), limit)
    with Offline(runner, rows=WIDTH * CONCURRENCY) as offline:
        greedy = partial(offline.translate, sources, concurrency=CONCURRENCY, max_new_tokens=limit)
        paced = partial(greedy, beam_width=WIDTH)
        searched = partial(paced, concurrency=len(sources))
        theirs = partial(twin.translate, prompts_of(sources), settings, limit)
        targets = [[index for index in target if index != runner.eos_id] for target in searched()]
        equal = share_equal(targets, theirs()[1])
        against_twin = alternate(lambda: timed(searched), lambda: theirs()[0], setup.repeat)
        against_greedy = alternate(lambda: timed(paced), lambda: timed(greedy), setup.repeat)
    case = Case(
        name="beams",
        case=f"{subject.name}, {WIDTH} beams",
        rows=WIDTH * CONCURRENCY,
        against=str(settings),
        is_twin=True,
        equal_outputs=equal,
    )
    each_ms = 1e3 / len(sources)
    pairs = [(one.seconds * each_ms, other.seconds * each_ms) for one, other in against_greedy]
    beside = dataclasses.replace(
        case, case=f"{case.case}, {CONCURRENCY} requests at a time", against="greedy", is_twin=False, equal_outputs=None
    )
    return [*compare(case, against_twin), beside.finding(pairs, "ms a request", digits=3)]


def _candidates(threads: int) -> list[TwinSettings]:
    """Batches of as many sources as we run at once, of fewer and of more, in every layout of the threads."""
    sizes = (CONCURRENCY // 2, CONCURRENCY, 2 * CONCURRENCY, 4 * CONCURRENCY)
    held = {one for size in sizes for one in decode_candidates(size, threads, None)}
    ordered = sorted(held, key=lambda one: (one.workers, one.max_batch_size))
    return [dataclasses.replace(one, beam_size=WIDTH) for one in ordered]
