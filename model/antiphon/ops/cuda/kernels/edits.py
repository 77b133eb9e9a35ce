"""Edits of a sample's logits: bias, penalty, shift, and the tokens that a sample is restricted to."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def apply_edits(
    values, logits, bias, has_bias, edit_ids, edit_rounds, edit_values, first, last, vocab_size, base, is_exclusive,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Change values [V] of one sample in place: subtract base, forbid what is not edited, apply edits first to last.

    Edits of one token apply in their order: those of round 0 at once, then those of round 1, and so on. The first one
    reads the logit itself, which an exclusive sample has already replaced by -inf in `values`.
    """
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        mask = ids < vocab_size
        value = tl.load(values + ids, mask, other=0.0) - base
        if is_exclusive != 0:
            value = tl.full([BLOCK], float("-inf"), tl.float32)
        tl.store(values + ids, value, mask)
    tl.debug_barrier()
    num_rounds = 0
    for start in range(first, last, BLOCK):
        edits = start + tl.arange(0, BLOCK)
        num_rounds = tl.maximum(num_rounds, tl.max(tl.load(edit_rounds + edits, edits < last, other=-1), 0) + 1)
    for current in range(num_rounds):
        for start in range(first, last, BLOCK):
            edits = start + tl.arange(0, BLOCK)
            mask = edits < last
            mask = mask & (tl.load(edit_rounds + edits, mask, other=-1) == current)
            token = tl.load(edit_ids + edits, mask, other=0)
            value = tl.load(values + token, mask, other=0.0)
            if current == 0:
                value = tl.load(logits + token, mask, other=0.0).to(tl.float32)
                if has_bias != 0:
                    value += tl.load(bias + token, mask, other=0.0).to(tl.float32)
                value -= base
            value += tl.load(edit_values + edits * 3, mask, other=0.0)
            penalty = tl.load(edit_values + edits * 3 + 1, mask, other=1.0)
            value = tl.where(value > 0, value / penalty, value * penalty)
            value += tl.load(edit_values + edits * 3 + 2, mask, other=0.0)
            tl.store(values + token, value, mask)
        tl.debug_barrier()


@triton.jit
def largest_after(values, vocab_size, last_value, last_id, BLOCK: tl.constexpr):
    """Return the largest of values [V], and its lowest id, among those that come after (last_value, last_id).

    The order is from large to small values and, of equal values, from low to high ids. Without a further value above
    -inf the result is -inf and an id that means nothing.
    """
    best = float("-inf")
    best_id = vocab_size
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        value = tl.load(values + ids, ids < vocab_size, other=float("-inf"))
        is_later = (value < last_value) | ((value == last_value) & (ids > last_id))
        value = tl.where(is_later, value, float("-inf"))
        largest = tl.max(value, 0)
        lowest = tl.min(tl.where((value == largest) & is_later, ids, vocab_size), 0)
        if largest > best:
            best = largest
            best_id = lowest
    return best, best_id
