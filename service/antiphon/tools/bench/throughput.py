"""Sections that measure tokens per second in this process: `decode`, `beams`, `sampling`, `encode`, `growth`, `engine`.

Antiphon schedules, encodes, decodes, samples and answers. All requests are queued at the start, so that every row is
in use until the last requests, unless a section says otherwise. CTranslate2 receives all of the same sources at once,
at its best settings for the measured work; see ctranslate2.py.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from antiphon.domain.sampling_params import SamplingParams
from antiphon.runtime.runner import Runner
from antiphon.text.shortlist import Shortlist
from antiphon.tools.bench.corpus import Ids, bleu
from antiphon.tools.bench.ctranslate2 import (
    CTranslate2Reference,
    CTranslate2Settings,
    decode_candidates,
    encode_candidates,
    prompts_of,
)
from antiphon.tools.bench.report import BenchFailure, Case, Finding, Speed, alternate, compare, share_equal, timed
from antiphon.tools.bench.setup import Setup, Subject
from antiphon.tools.bench.static import StaticBatch, translate_static
from antiphon.tools.offline import Offline

ROWS = (1, 8, 32, 64, 128)
# Requests of one run: a multiple of the rows, and at least a minimum, so that start and end of a run matter little.
_RANDOM_FILLS, _MIN_RANDOM = 4, 16
_SENTENCE_FILLS, _MIN_SENTENCES = 12, 64
BEAM_WIDTH = 4
# Requests that run at a time in the section beams.
BEAM_REQUESTS = 16
SAMPLING_ROWS = 64
_TEMPERATURE = 2.0
_ANSWER_LEN = 4  # of the other caller
ENCODE_ROWS = 64
_SHORTEST, _LONGEST = 5, 100
# Batches of one run: a single batch is too short for a precise time.
_BATCHES_A_RUN = 5
_LENGTHS_SEED = 3
ENGINE_ROWS = (32,)
# Number of static batches in one run of the section engine; each has `rows` sources.
_NUM_BATCHES = 12


def decode(setup: Setup) -> list[Finding]:
    """Measure the engine against CTranslate2 by rows, and the quality of both sides if references are known."""
    findings = []
    for subject in setup.with_ctranslate2():
        rows = setup.rows or ROWS
        reference = CTranslate2Reference(subject.ctranslate2_folder)
        for count in rows:
            runners = setup.runners(subject, count)
            findings += _decode_rows(subject, runners, reference, count, setup)
        if subject.corpus is not None and subject.corpus.references is not None:
            findings += _quality(subject, runners, reference, rows[-1], setup.threads)
    return findings


def settings_for(subject: Subject, reference: CTranslate2Reference, rows: int, threads: int) -> CTranslate2Settings:
    """Return CTranslate2's best settings for `rows` rows of a model.

    The search runs the measured work. If all targets have one length, one batch for each worker is enough for it.
    """
    if subject.is_endless:
        sources, mean_len = subject.sources(rows * threads if rows > 1 else 4), None
    else:
        sources = subject.sources(num_requests(subject, rows))
        mean_len = sum(map(len, sources)) / len(sources)
    candidates = _with_vmap(subject, decode_candidates(rows, threads, mean_len))
    return reference.best(candidates, prompts_of(sources), subject.max_new_tokens)


def _with_vmap(subject: Subject, candidates: Sequence[CTranslate2Settings]) -> list[CTranslate2Settings]:
    """Return settings without and, if the model has a shortlist, with CTranslate2's vocabulary map."""
    mapped = [] if subject.shortlist is None else [replace(settings, use_vmap=True) for settings in candidates]
    return [*candidates, *mapped]


def vocabularies(subject: Subject) -> list[tuple[str, Shortlist | None]]:
    """Return the vocabularies of requests to measure, each with an addition to the name of its case."""
    whole: list[tuple[str, Shortlist | None]] = [("", None)]
    return whole if subject.shortlist is None else [*whole, (", shortlist", subject.shortlist)]


def num_requests(subject: Subject, rows: int) -> int:
    """Return the number of requests of one run."""
    if subject.is_endless:
        return max(_RANDOM_FILLS * rows, _MIN_RANDOM)
    return max(_SENTENCE_FILLS * rows, _MIN_SENTENCES)


def _decode_rows(
    subject: Subject, runners: Sequence[Runner], reference: CTranslate2Reference, rows: int, setup: Setup
) -> list[Finding]:
    sources, limit = subject.sources(num_requests(subject, rows)), subject.max_new_tokens
    settings = settings_for(subject, reference, rows, setup.threads)
    findings = []
    with Offline(*runners, rows=rows) as offline:
        theirs = partial(reference.translate, prompts_of(sources), settings, limit)
        for words, shortlist in vocabularies(subject):
            ours = partial(
                offline.translate, sources, concurrency=len(sources), max_new_tokens=limit, shortlist=shortlist
            )
            equal = checked_share_equal(subject, ours(), theirs()[1])
            pairs = alternate(partial(timed, ours), lambda: theirs()[0], setup.repeat)
            case = Case(
                name="decode",
                case=f"{decode_case(subject)}{words}",
                rows=rows,
                against=str(settings),
                is_ctranslate2=True,
                equal_outputs=equal,
            )
            findings += compare(case, pairs)
    return findings


def checked_share_equal(
    subject: Subject, ours: Sequence[Ids], theirs: Sequence[Ids], *, other: str = "CTranslate2"
) -> float:
    """Return the share of outputs that are equal but for end tokens. other: name of the other side.

    Raises BenchFailure if a side has not done all of the work.
    """
    if subject.is_endless:
        for side, targets in (("antiphon", ours), (other, theirs)):
            if odd := {len(target) for target in targets} - {subject.max_new_tokens}:
                raise BenchFailure(
                    f"decode, {subject.name}: {side} gave targets of {sorted(odd)} tokens, not {subject.max_new_tokens}"
                )
    eos_id = subject.bundle.manifest.model.eos_id
    words = [[[index for index in target if index != eos_id] for target in targets] for targets in (ours, theirs)]
    return share_equal(*words)


def decode_case(subject: Subject) -> str:
    """Return the name of the case in tables."""
    return f"{subject.name}, " + (f"{subject.max_new_tokens} tokens each" if subject.is_endless else "sentences")


def _quality(
    subject: Subject, runners: Sequence[Runner], reference: CTranslate2Reference, rows: int, threads: int
) -> list[Finding]:
    """Measure BLEU of both sides; each source is translated once. A shortlist here is a vocabulary map there."""
    corpus = subject.corpus
    assert corpus is not None
    sources, limit = subject.sources(len(corpus.texts)), subject.bundle.manifest.model.max_target_len
    best, findings = settings_for(subject, reference, rows, threads), []
    with Offline(*runners, rows=rows) as offline:
        for words, shortlist in vocabularies(subject):
            settings = replace(best, use_vmap=shortlist is not None)
            ours = offline.translate(sources, concurrency=len(sources), max_new_tokens=limit, shortlist=shortlist)
            _, theirs = reference.translate(prompts_of(sources), settings, limit)
            texts = [[subject.tokenizer.decode(target) for target in targets] for targets in (ours, theirs)]
            case = Case(
                name="decode",
                case=f"{subject.name}, quality of {len(sources)} sentences{words}",
                rows=rows,
                against=str(settings),
                is_ctranslate2=True,
                equal_outputs=checked_share_equal(subject, ours, theirs),
            )
            findings.append(case.finding([(bleu(texts[0], corpus), bleu(texts[1], corpus))], "BLEU", digits=2))
    return findings


def beams(setup: Setup) -> list[Finding]:
    """Measure beam search against greedy decoding, and against CTranslate2 with the same weights.

    The number of rows is that of BEAM_REQUESTS searches. In the comparison with greedy decoding, BEAM_REQUESTS requests
    run at a time and each is followed by the next, as with real clients.
    """
    return [finding for subject in setup.with_ctranslate2() for finding in _beams_of(subject, setup)]


def _beams_of(subject: Subject, setup: Setup) -> list[Finding]:
    runners = setup.runners(subject, BEAM_WIDTH * BEAM_REQUESTS)
    sources, limit = subject.sources(num_requests(subject, BEAM_REQUESTS)), subject.max_new_tokens
    reference = CTranslate2Reference(subject.ctranslate2_folder)
    settings = reference.best(_with_vmap(subject, _beam_candidates(setup.threads)), prompts_of(sources), limit)
    name, rows = f"{subject.name}, {BEAM_WIDTH} beams", BEAM_WIDTH * BEAM_REQUESTS
    findings = []
    with Offline(*runners, rows=rows) as offline:
        greedy = partial(offline.translate, sources, concurrency=BEAM_REQUESTS, max_new_tokens=limit)
        paced = partial(greedy, beam_width=BEAM_WIDTH)
        theirs = partial(reference.translate, prompts_of(sources), settings, limit)
        for words, shortlist in vocabularies(subject):
            searched = partial(paced, concurrency=len(sources), shortlist=shortlist)
            targets = [[index for index in target if index != runners[0].facts.eos_id] for target in searched()]
            case = Case(
                name="beams",
                case=f"{name}{words}",
                rows=rows,
                against=str(settings),
                is_ctranslate2=True,
                equal_outputs=share_equal(targets, theirs()[1]),
            )
            findings += compare(case, alternate(partial(timed, searched), lambda: theirs()[0], setup.repeat))
        against_greedy = alternate(lambda: timed(paced), lambda: timed(greedy), setup.repeat)
    ms_a_request = 1e3 / len(sources)
    pairs = [(search.seconds * ms_a_request, plain.seconds * ms_a_request) for search, plain in against_greedy]
    case = Case(name="beams", case=f"{name}, {BEAM_REQUESTS} requests at a time", rows=rows, against="greedy")
    return [*findings, case.finding(pairs, "ms a request", digits=3)]


def _beam_candidates(threads: int) -> list[CTranslate2Settings]:
    """Return settings with batches of BEAM_REQUESTS sources, of fewer and of more, in every layout of the threads."""
    sizes = (BEAM_REQUESTS // 2, BEAM_REQUESTS, 2 * BEAM_REQUESTS, 4 * BEAM_REQUESTS)
    candidates = {settings for size in sizes for settings in decode_candidates(size, threads, None)}
    ordered = sorted(candidates, key=lambda settings: (settings.workers, settings.max_batch_size))
    return [dataclasses.replace(settings, beam_size=BEAM_WIDTH) for settings in ordered]


def sampling(setup: Setup) -> list[Finding]:
    """Measure each logits warper against temperature alone, and the wait of another caller meanwhile.

    One request over one source has as many samples as there are rows, and all have the maximum length. Every step
    contains every row, so the request's tokens per second are those of a step. The other caller asks for short greedy
    answers, one after another, until the same request with all filters has ended.
    """
    return [finding for subject in setup.subjects() for finding in _sampling_of(subject, setup)]


def _sampling_of(subject: Subject, setup: Setup) -> list[Finding]:
    rows = max(setup.rows) if setup.rows else SAMPLING_ROWS
    runner = setup.runner(subject, rows)
    source, longest = subject.sources(1)[0], runner.facts.max_target_len - 1
    plain = SamplingParams(
        temperature=_TEMPERATURE, seed=1, num_return_sequences=rows, ignore_eos=True, max_new_tokens=longest
    )
    findings = []
    with Offline(runner, rows=rows) as offline:
        for name, changes in filters_of(runner.facts.vocab_size).items():
            filtered = dataclasses.replace(plain, **changes)
            pairs = alternate(
                partial(timed, partial(offline.sample, source, filtered)),
                partial(timed, partial(offline.sample, source, plain)),
                setup.repeat,
            )
            case = Case(name="sampling", case=f"{subject.name}, {name}", rows=rows, against="temperature alone")
            findings += compare(case, pairs)
            heaviest = filtered
        waits = alternate(
            lambda: offline.run(offline.waits_beside(source, heaviest, _ANSWER_LEN)),
            lambda: offline.run(offline.waits_alone(source, _ANSWER_LEN)),
            setup.repeat,
        )
    for name, summarise in (("median", statistics.median), ("longest", max)):
        case = Case(
            name="sampling", case=f"{subject.name}, another caller, {name}", rows=rows, against="no other caller"
        )
        waits_ms = [(1e3 * summarise(busy), 1e3 * summarise(idle)) for busy, idle in waits]
        findings.append(case.finding(waits_ms, "ms to the first token", digits=2))
    return findings


def filters_of(vocab_size: int) -> dict[str, dict[str, Any]]:
    """Return the settings of each case besides the temperature; the most expensive case comes last."""
    return {
        "top_k of half the tokens": {"top_k": vocab_size // 2},
        "top_p 0.99": {"top_p": 0.99},
        "top_p 1 - 1e-6": {"top_p": 1 - 1e-6},
        "min_p 1e-4": {"min_p": 1e-4},
        "typical_p 0.95": {"typical_p": 0.95},
        "all filters": {"top_p": 0.99, "min_p": 1e-4, "typical_p": 0.95},
    }


def encode(setup: Setup) -> list[Finding]:
    """Measure source tokens per second of one packed batch of mixed lengths, against CTranslate2.

    CTranslate2 has no call that only encodes. Both sides therefore also run one decoder step over all rows: CTranslate2
    translates each source into one token, and Antiphon feeds one token to every row.
    """
    return [finding for subject in setup.with_ctranslate2() for finding in _encode_of(subject, setup)]


def _encode_of(subject: Subject, setup: Setup) -> list[Finding]:
    sources = _encode_sources(subject)
    prompts, num_tokens = prompts_of(sources), sum(map(len, sources))
    reference, runner = CTranslate2Reference(subject.ctranslate2_folder), setup.runner(subject, ENCODE_ROWS)
    settings = reference.best(
        encode_candidates(ENCODE_ROWS, setup.threads, [len(source) for source in sources]), prompts, 1
    )
    ours, theirs = partial(_first_tokens, runner, sources), partial(reference.translate, prompts, settings, 1)
    equal = share_equal([[i for i in target if i != runner.facts.eos_id] for target in ours()], theirs()[1])

    def our_run() -> Speed:
        started_s = time.perf_counter()
        for _ in range(_BATCHES_A_RUN):
            ours()
        return Speed(num_tokens=num_tokens * _BATCHES_A_RUN, seconds=time.perf_counter() - started_s)

    def their_run() -> Speed:
        seconds = sum(theirs()[0].seconds for _ in range(_BATCHES_A_RUN))
        return Speed(num_tokens=num_tokens * _BATCHES_A_RUN, seconds=seconds)

    lengths = f"{min(map(len, sources))} to {max(map(len, sources))} tokens"
    case = Case(
        name="encode", case=f"{subject.name}, {lengths}", rows=ENCODE_ROWS, against=str(settings), is_ctranslate2=True,
        equal_outputs=equal,
    )  # fmt: skip
    return compare(case, alternate(our_run, their_run, setup.repeat), "source tokens/s")


def _encode_sources(subject: Subject) -> list[Ids]:
    """Return sentences if the model has some, else random ids of random lengths with a fixed seed."""
    if not subject.is_endless:
        return subject.sources(ENCODE_ROWS)
    rng = random.Random(_LENGTHS_SEED)
    longest = min(_LONGEST, subject.bundle.manifest.model.max_source_len)
    return subject.random_sources([rng.randint(_SHORTEST, longest) for _ in range(ENCODE_ROWS)])


def _first_tokens(runner: Runner, sources: list[Ids]) -> list[Ids]:
    """Encode all sources, feed the begin token to every row and return the first token of each target."""
    batch = StaticBatch(runner, sources, max_new_tokens=1)
    batch.encode()
    token_ids = batch.step(np.full(len(sources), runner.facts.bos_id, np.int64), 0)
    return [[token_id] for token_id in token_ids.tolist()]


def growth(setup: Setup) -> list[Finding]:
    """Measure the engine by rows, for every division of 1, 2, 4 and so on threads, up to all of them, into lanes.

    Divisions that use fewer threads show what another thread adds.
    """
    return [
        growth_of(subject, rows, replace(setup, lanes=num_lanes, threads=threads))
        for subject in setup.subjects()
        for num_lanes, threads in divisions(setup.threads)
        for rows in setup.rows or ROWS
        if num_lanes <= rows
    ]


def divisions(threads: int) -> list[tuple[int, int]]:
    """Return every pair (lanes, threads of all lanes) of powers of two within `threads`, which is one of them too."""
    totals = sorted({threads, *(1 << power for power in range(threads.bit_length()) if 1 << power <= threads)})
    return [(lanes, total) for total in totals for lanes in totals if lanes <= total and total % lanes == 0]


def growth_of(subject: Subject, rows: int, setup: Setup) -> Finding:
    """Measure tokens per second of the engine with the threads and lanes of a setup."""
    runners = setup.runners(subject, rows)
    sources, limit = subject.sources(num_requests(subject, rows)), subject.max_new_tokens
    rates = []
    with Offline(*runners, rows=rows) as offline:
        for _ in range(1 + setup.repeat):
            speed = timed(lambda: offline.translate(sources, concurrency=len(sources), max_new_tokens=limit))
            rates.append(speed.num_tokens / speed.seconds)
    return Finding(
        name="growth",
        case=f"{subject.name}, {len(runners)} x {setup.threads // len(runners)} threads",
        rows=rows,
        antiphon=round(statistics.median(rates[1:]), 1),  # the first run is not measured
        unit="tokens/s",
    )


def engine(setup: Setup) -> list[Finding]:
    """Measure the engine, with all requests queued at the start, against static batches of the same number of rows."""
    findings = []
    for rows in setup.rows or ENGINE_ROWS:
        subject = setup.bundle_subject
        runner = setup.runner(subject, rows)
        sources, limit = subject.sources(_NUM_BATCHES * rows), subject.max_new_tokens
        targets = translate_static(runner, sources, rows=rows, max_new_tokens=limit, is_sorted=True)
        findings += _against_static(runner, setup, (rows, limit), "sentences", sources)
        length = statistics.median_high(map(len, targets))
        # Sources whose targets are at least `length` long: with that limit all targets have the same length.
        lasting = [source for source, target in zip(sources, targets, strict=True) if len(target) >= length]
        repeated = (lasting * (len(sources) // len(lasting) + 1))[: len(sources)]
        findings += _against_static(runner, setup, (rows, length), f"{length} tokens each", repeated)
    return findings


def _against_static(
    runner: Runner, setup: Setup, shape: tuple[int, int], case: str, sources: Sequence[Ids]
) -> list[Finding]:
    """Compare the engine with static batches. shape: number of rows, and maximum length of every target."""
    rows, limit = shape
    static = partial(translate_static, runner, sources, rows=rows, max_new_tokens=limit)
    arriving, sorted_first = partial(static, is_sorted=False), partial(static, is_sorted=True)
    with Offline(runner, rows=rows) as offline:
        ours = partial(offline.translate, sources, concurrency=len(sources), max_new_tokens=limit)
        if not ours() == arriving() == sorted_first():
            raise BenchFailure(f"engine, {case}: the engine and the static batches disagree on tokens")
        runs = [(timed(ours), timed(arriving), timed(sorted_first)) for _ in range(setup.repeat)]
    return [
        finding
        for side, against in ((1, "static batches as they arrive"), (2, "static batches sorted by length"))
        for finding in compare(
            Case(name="engine", case=case, rows=rows, against=against), [(run[0], run[side]) for run in runs]
        )
    ]
