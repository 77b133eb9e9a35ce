"""Section `sampling`: cost of logits warpers against temperature alone, and the wait of another caller meanwhile.

One request over one source has as many samples as there are rows, and all have the maximum length. Every step contains
every row, so the request's tokens per second are those of a step. The other caller asks for short greedy answers, one
after another, until the same request with all filters has ended.
"""

from __future__ import annotations

import dataclasses
import statistics
from functools import partial
from typing import Any

from antiphon.domain.sampling_params import SamplingParams
from antiphon.tools.bench.drivers.offline import Offline
from antiphon.tools.bench.report import Case, Finding, compare
from antiphon.tools.bench.setup import Setup, Subject
from antiphon.tools.bench.timing import alternate, timed

ROWS = 64
TEMPERATURE = 2.0
_ANSWER_LEN = 4


def sampling(setup: Setup) -> list[Finding]:
    """Measure every model: tokens per second with each filter, and the wait of the other caller."""
    return [found for subject in setup.subjects() for found in _of(subject, setup)]


def _of(subject: Subject, setup: Setup) -> list[Finding]:
    rows = max(setup.rows) if setup.rows else ROWS
    runner = setup.runner(subject, rows)
    source, longest = subject.sources(1)[0], runner.facts.max_target_len - 1
    plain = SamplingParams(
        temperature=TEMPERATURE, seed=1, num_return_sequences=rows, ignore_eos=True, max_new_tokens=longest
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
    for name, of in (("median", statistics.median), ("longest", max)):
        case = Case(
            name="sampling", case=f"{subject.name}, another caller, {name}", rows=rows, against="no other caller"
        )
        waits_ms = [(1e3 * of(busy), 1e3 * of(idle)) for busy, idle in waits]
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
