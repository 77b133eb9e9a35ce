"""Section `beams`: cost of beam search against greedy decoding, and against CTranslate2 with the same weights.

The number of rows is that of CONCURRENCY searches. In the comparison with CTranslate2, both sides receive all sources
at once, and CTranslate2 runs at its best settings for this width (ctranslate2/reference.py). In the comparison with
greedy decoding, CONCURRENCY requests run at a time and each is followed by the next, as with real clients.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from antiphon.tools.bench.ctranslate2.reference import (
    CTranslate2Reference,
    CTranslate2Settings,
    decode_candidates,
    prompts_of,
)
from antiphon.tools.bench.drivers.offline import Offline
from antiphon.tools.bench.report import Case, Finding, compare, share_equal
from antiphon.tools.bench.sections.decode import num_requests
from antiphon.tools.bench.setup import Setup, Subject
from antiphon.tools.bench.timing import alternate, timed

WIDTH = 4
CONCURRENCY = 16


def beams(setup: Setup) -> list[Finding]:
    """Measure every model: time per request at width 1 and at WIDTH, and tokens per second against CTranslate2."""
    return [found for subject in setup.with_ctranslate2() for found in _of(subject, setup)]


def _of(subject: Subject, setup: Setup) -> list[Finding]:
    runners = setup.runners(subject, WIDTH * CONCURRENCY)
    sources, limit = subject.sources(num_requests(subject, CONCURRENCY)), subject.max_new_tokens
    reference = CTranslate2Reference(subject.ctranslate2_folder)
    settings = reference.best(_candidates(setup.threads), prompts_of(sources), limit)
    with Offline(*runners, rows=WIDTH * CONCURRENCY) as offline:
        greedy = partial(offline.translate, sources, concurrency=CONCURRENCY, max_new_tokens=limit)
        paced = partial(greedy, beam_width=WIDTH)
        searched = partial(paced, concurrency=len(sources))
        theirs = partial(reference.translate, prompts_of(sources), settings, limit)
        targets = [[index for index in target if index != runners[0].facts.eos_id] for target in searched()]
        equal = share_equal(targets, theirs()[1])
        against_ctranslate2 = alternate(lambda: timed(searched), lambda: theirs()[0], setup.repeat)
        against_greedy = alternate(lambda: timed(paced), lambda: timed(greedy), setup.repeat)
    case = Case(
        name="beams",
        case=f"{subject.name}, {WIDTH} beams",
        rows=WIDTH * CONCURRENCY,
        against=str(settings),
        is_ctranslate2=True,
        equal_outputs=equal,
    )
    each_ms = 1e3 / len(sources)
    pairs = [(one.seconds * each_ms, other.seconds * each_ms) for one, other in against_greedy]
    greedy_case = dataclasses.replace(
        case,
        case=f"{case.case}, {CONCURRENCY} requests at a time",
        against="greedy",
        is_ctranslate2=False,
        equal_outputs=None,
    )
    return [*compare(case, against_ctranslate2), greedy_case.finding(pairs, "ms a request", digits=3)]


def _candidates(threads: int) -> list[CTranslate2Settings]:
    """Return settings with batches of CONCURRENCY sources, of fewer and of more, in every layout of the threads."""
    sizes = (CONCURRENCY // 2, CONCURRENCY, 2 * CONCURRENCY, 4 * CONCURRENCY)
    candidates = {one for size in sizes for one in decode_candidates(size, threads, None)}
    ordered = sorted(candidates, key=lambda one: (one.workers, one.max_batch_size))
    return [dataclasses.replace(one, beam_size=WIDTH) for one in ordered]
