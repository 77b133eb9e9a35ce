"""Memory arithmetic of one training step: terms with formulas, and the peak. Torch-free.

A peak is the largest sum over time of what lives: weights and optimiser, what autograd keeps, and the working memory
of the sublayer that runs. Letters as in terms.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from antiphon.lab.memory import sublayers as parts
from antiphon.lab.memory.terms import (
    FLOAT,
    Case,
    Prediction,
    Sublayer,
    Term,
    num_parameters,
    position_rows,
    total,
)


def training(case: Case) -> Prediction:
    """Predict one training step of a translation model. Raises UncoveredModelError."""
    weights = FLOAT * num_parameters(case.config)
    fixed = (
        Term(name="parameters", formula="4 P", num_bytes=weights),
        Term(name="AdamW moments", formula="8 P", num_bytes=2 * weights),
        Term(name="tables of positions", formula="4 M rows", num_bytes=_tables(case)),
    )
    steps = _training_steps(case)
    changing = max(_peak(steps), weights)
    kept = _merged(term for step in steps for term in step.kept)
    gradients = Term(name="gradients, after the backward pass", formula="4 P", num_bytes=weights)
    return Prediction(terms=(*fixed, *kept, gradients), peak_bytes=total(fixed) + changing)


def _tables(case: Case) -> int:
    is_constant = case.config.positions == "sinusoidal"
    return FLOAT * case.config.d_model * position_rows(case.config) * is_constant


def _training_steps(case: Case) -> list[Sublayer]:
    config = case.config
    self_attention = parts.attention(case, is_cross=False, is_causal=False)
    causal = parts.attention(case, is_cross=False, is_causal=True)
    cross = parts.attention(case, is_cross=True, is_causal=False)
    inner = parts.feed_forward(case)
    memory = parts.final_norm(case)
    return [
        parts.embedding(case, rows=parts.source_rows(config), owns_gradient=not config.tie_source_target),
        *_layers(case, [self_attention, inner], config.encoder_layers),
        replace(memory, held=0),
        parts.projected_memory(case),
        parts.embedding(case, rows=config.vocab_size, owns_gradient=not config.tie_output),
        *_layers(case, [causal, cross, inner], config.decoder_layers),
        memory,
        parts.loss(case, padding(case.tokens)),
    ]


def padding(labels: int) -> int:
    """Return `padding_of` of losses.py, which imports torch; a test compares the two."""
    return -labels % (parts.LOSS_ROWS if labels > parts.LOSS_ROWS else parts.LOSS_ROWS // 4)


def _layers(case: Case, sublayers: list[Sublayer], count: int) -> list[Sublayer]:
    return ([_checkpointed(case, sublayers)] if case.checkpointing else sublayers) * count


def _checkpointed(case: Case, sublayers: Sequence[Sublayer]) -> Sublayer:
    """Return a layer that keeps only its input, and that the backward pass computes again."""
    stream = FLOAT * case.config.d_model * case.tokens
    is_shared = not case.bf16 or case.config.norm_placement == "pre"  # the input is also saved by the first sublayer
    narrow = sum(t.num_bytes for step in sublayers for t in step.kept if t.name == "bf16 copies of weights")
    return Sublayer(
        kept=(Term(name="inputs of layers", formula="4 M n", num_bytes=stream),),
        held=narrow,
        forward=stream + max(step.forward for step in sublayers),
        backward=_peak(sublayers) + stream * (1 if is_shared else 2),
        gradients=sum(step.gradients for step in sublayers),
        pending=sum(step.pending for step in sublayers),
    )


def _peak(steps: Sequence[Sublayer]) -> int:
    """Return the largest sum of what lives in a forward pass and in the backward pass after it."""
    best = live = 0
    for step in steps:
        best = max(best, live + step.forward)
        live += step.kept_bytes + step.held
    live -= sum(step.held for step in steps)
    for step in reversed(steps):
        live -= step.kept_bytes
        best = max(best, live + step.backward)
        live += step.gradients + step.pending
    return best


def _merged(terms: Iterable[Term]) -> tuple[Term, ...]:
    merged: dict[str, Term] = {}
    for term in terms:
        old = merged.get(term.name)
        merged[term.name] = term if old is None else replace(old, num_bytes=old.num_bytes + term.num_bytes)
    return tuple(merged.values())
