"""Record of a beam search: its live beams and finished hypotheses after every step. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Beam:
    """A beam after one step of a search.

    parent: index of the beam that it continues, among the live beams of the step before; 0 at the first step.
    token_id: its new token.
    total_logprob: sum of the log-probabilities of its tokens, after penalties.
    score: of a finished hypothesis, total_logprob divided by its length to the power of the length penalty; None while
        it lives.
    """

    parent: int
    token_id: int
    total_logprob: float
    score: float | None = None


@dataclass(frozen=True, slots=True)
class BeamStep:
    """One step of a search. live: best first. finished: in the order in which the search found them."""

    live: tuple[Beam, ...]
    finished: tuple[Beam, ...]
