"""Section `decode`: target tokens per second at several numbers of rows, the whole engine against CTranslate2.

Antiphon schedules, encodes, decodes, samples and streams. All requests are queued at the start, so that every row is
in use until the last requests. CTranslate2 receives all of the same sources at once; see ctranslate2/reference.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from antiphon.runtime.runner import Runner
from antiphon.tools.bench.bleu import bleu
from antiphon.tools.bench.ctranslate2.reference import (
    CTranslate2Reference,
    CTranslate2Settings,
    decode_candidates,
    prompts_of,
)
from antiphon.tools.bench.drivers.offline import Offline
from antiphon.tools.bench.report import BenchFailure, Case, Finding, compare, share_equal
from antiphon.tools.bench.setup import Setup, Subject
from antiphon.tools.bench.sources import Ids
from antiphon.tools.bench.timing import alternate, timed

ROWS = (1, 8, 32, 64, 128)
# Requests of one run: a multiple of the rows, and at least a minimum, so that start and end of a run matter little.
_RANDOM_FILLS, _MIN_RANDOM = 4, 16
_SENTENCE_FILLS, _MIN_SENTENCES = 12, 64


def decode(setup: Setup) -> list[Finding]:
    """Measure every model at every number of rows, and the quality of both sides if references are known."""
    findings = []
    for subject in setup.with_ctranslate2():
        rows = setup.rows or ROWS
        reference = CTranslate2Reference(subject.ctranslate2_folder)
        for count in rows:
            runners = setup.runners(subject, count)
            findings += _at_rows(subject, runners, reference, count, setup)
        if subject.corpus is not None and subject.corpus.references is not None:
            findings.append(_quality(subject, runners, reference, rows[-1], setup.threads))
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
    return reference.best(decode_candidates(rows, threads, mean_len), prompts_of(sources), subject.max_new_tokens)


def num_requests(subject: Subject, rows: int) -> int:
    """Return the number of requests of one run."""
    if subject.is_endless:
        return max(_RANDOM_FILLS * rows, _MIN_RANDOM)
    return max(_SENTENCE_FILLS * rows, _MIN_SENTENCES)


def _at_rows(
    subject: Subject, runners: Sequence[Runner], reference: CTranslate2Reference, rows: int, setup: Setup
) -> list[Finding]:
    sources, limit = subject.sources(num_requests(subject, rows)), subject.max_new_tokens
    settings = settings_for(subject, reference, rows, setup.threads)
    with Offline(*runners, rows=rows) as offline:
        ours = partial(offline.translate, sources, concurrency=len(sources), max_new_tokens=limit)
        theirs = partial(reference.translate, prompts_of(sources), settings, limit)
        equal = _share_equal(subject, ours(), theirs()[1], runners[0].facts.eos_id)
        pairs = alternate(lambda: timed(ours), lambda: theirs()[0], setup.repeat)
    case = Case(
        name="decode", case=_case(subject), rows=rows, against=str(settings), is_ctranslate2=True, equal_outputs=equal
    )
    return compare(case, pairs)


def _share_equal(subject: Subject, ours: Sequence[Ids], theirs: Sequence[Ids], eos_id: int) -> float:
    """Return the share of equal outputs. Raises BenchFailure if a side has not done all of the work."""
    if subject.is_endless:
        for side, targets in (("antiphon", ours), ("CTranslate2", theirs)):
            if odd := {len(target) for target in targets} - {subject.max_new_tokens}:
                raise BenchFailure(
                    f"decode, {subject.name}: {side} gave targets of {sorted(odd)} tokens, not {subject.max_new_tokens}"
                )
    return share_equal([[index for index in target if index != eos_id] for target in ours], theirs)


def _case(subject: Subject) -> str:
    return f"{subject.name}, " + (f"{subject.max_new_tokens} tokens each" if subject.is_endless else "sentences")


def _quality(
    subject: Subject, runners: Sequence[Runner], reference: CTranslate2Reference, rows: int, threads: int
) -> Finding:
    """Measure BLEU of both sides; each source is translated once."""
    corpus = subject.corpus
    assert corpus is not None
    sources, limit = subject.sources(len(corpus.texts)), subject.bundle.manifest.model.max_target_len
    settings = settings_for(subject, reference, rows, threads)
    with Offline(*runners, rows=rows) as offline:
        ours = offline.translate(sources, concurrency=len(sources), max_new_tokens=limit)
    _, theirs = reference.translate(prompts_of(sources), settings, limit)
    scores = [bleu([subject.tokenizer.decode(target) for target in targets], corpus) for targets in (ours, theirs)]
    case = Case(
        name="decode",
        case=f"{subject.name}, quality of {len(sources)} sentences",
        rows=rows,
        against=str(settings),
        is_ctranslate2=True,
        equal_outputs=_share_equal(subject, ours, theirs, runners[0].facts.eos_id),
    )
    return case.finding([(scores[0], scores[1])], "BLEU", digits=2)
