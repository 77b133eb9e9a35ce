"""Section `encode`: source tokens per second of one packed batch of mixed lengths, against CTranslate2.

CTranslate2 has no call that only encodes. Both sides therefore also run one decoder step over all rows: CTranslate2
translates each source into one token, and Antiphon feeds one token to every row. The best batch size of CTranslate2 is
found first.
"""

from __future__ import annotations

import random
import time
from functools import partial

import numpy as np

from antiphon.runtime.runner import Runner
from antiphon.tools.bench.ctranslate2.reference import CTranslate2Reference, encode_candidates, prompts_of
from antiphon.tools.bench.drivers.static import StaticBatch
from antiphon.tools.bench.report import Case, Finding, Speed, compare, share_equal
from antiphon.tools.bench.setup import Setup, Subject
from antiphon.tools.bench.sources import Ids
from antiphon.tools.bench.timing import alternate

ROWS = 64
SHORTEST, LONGEST = 5, 100
# Batches of one run: a single batch is too short for a precise time.
_BATCHES_A_RUN = 5
_SEED = 3


def encode(setup: Setup) -> list[Finding]:
    """Measure every model that CTranslate2 can run."""
    return [found for subject in setup.with_ctranslate2() for found in _encode_subject(subject, setup)]


def _encode_subject(subject: Subject, setup: Setup) -> list[Finding]:
    sources = _sources(subject)
    prompts, num_tokens = prompts_of(sources), sum(map(len, sources))
    reference, runner = CTranslate2Reference(subject.ctranslate2_folder), setup.runner(subject, ROWS)
    settings = reference.best(encode_candidates(ROWS, setup.threads, [len(source) for source in sources]), prompts, 1)
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
        name="encode", case=f"{subject.name}, {lengths}", rows=ROWS, against=str(settings), is_ctranslate2=True,
        equal_outputs=equal,
    )  # fmt: skip
    return compare(case, alternate(our_run, their_run, setup.repeat), "source tokens/s")


def _sources(subject: Subject) -> list[Ids]:
    """Return sentences if the model has some, else random ids of random lengths with a fixed seed."""
    if not subject.is_endless:
        return subject.sources(ROWS)
    rng = random.Random(_SEED)
    longest = min(LONGEST, subject.bundle.manifest.model.max_source_len)
    return subject.random_sources([rng.randint(SHORTEST, longest) for _ in range(ROWS)])


def _first_tokens(runner: Runner, sources: list[Ids]) -> list[Ids]:
    """Encode all sources, feed the begin token to every row and return the first token of each target."""
    batch = StaticBatch(runner, sources, max_new_tokens=1)
    batch.encode()
    drawn = batch.step(np.full(len(sources), runner.facts.bos_id, np.int64), 0)
    return [[token_id] for token_id in drawn.tolist()]
