"""Second half of the end of a step: the token, its log-probability and the candidates of each sample."""

from __future__ import annotations

import triton
import triton.language as tl

from antiphon.ops.cuda.kernels.draw import draw
from antiphon.ops.cuda.kernels.edits import apply_edits, largest_after
from antiphon.ops.cuda.kernels.vocabulary import is_plain


@triton.jit
def _reduced(parts, num_parts, vocab_size, BLOCK: tl.constexpr):
    """Return the largest logit (NaN if one is), its token and the sum of exp(logit - largest) over all parts [C, 3]."""
    index = tl.arange(0, BLOCK)
    mask = index < num_parts
    largest_of = tl.load(parts + index * 3, mask, other=float("-inf"))
    largest = tl.max(largest_of, 0)
    num_nan = tl.sum((largest_of != largest_of).to(tl.int32), 0)
    tokens = tl.load(parts + index * 3 + 1, mask, other=0.0).to(tl.int32)
    token = tl.min(tl.where(largest_of == largest, tokens, vocab_size), 0)
    base = tl.where(largest > float("-inf"), largest, 0.0)
    total = tl.sum(tl.load(parts + index * 3 + 2, mask, other=0.0) * tl.exp(largest_of - base), 0)
    return tl.where(num_nan > 0, float("nan"), largest), token, total


@triton.jit
def _logit(logits, bias, has_bias, token):
    value = tl.load(logits + token).to(tl.float32)
    if has_bias != 0:
        value += tl.load(bias + token).to(tl.float32)
    return value


@triton.jit
def sample(
    token_ids,  # [K]
    logprobs,  # [K]
    top_ids,  # [K, k]
    top_logprobs,  # [K, k]
    top_scores,  # [K, k]
    values,  # [K, V]
    parts,  # [K, C, 3]
    logits,  # [K, V]
    bias,  # [V]
    positions,  # [K]
    float_params,  # [K, 4]
    int_params,  # [K, 6]
    edit_offsets,  # [K + 1]
    edit_ids,  # [E]
    edit_rounds,  # [E]
    edit_values,  # [E, 3]
    vocab_size,
    num_parts,
    num_candidates,  # k
    flags,  # 1: bias
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    PARTS: tl.constexpr,  # power of two, at least C
):
    """Sample one token as `sample` of model/antiphon/ops/sampling.py does. Grid: K."""
    index = tl.program_id(0).to(tl.int64)
    has_bias = flags & 1
    logits += index * vocab_size
    values += index * vocab_size
    largest, token, total = _reduced(parts + index * num_parts * 3, num_parts, vocab_size, BLOCK=PARTS)
    is_finite = (largest == largest) & (tl.abs(largest) < float("inf"))
    log_sum = largest + tl.log(total)
    logprob = 0.0
    num_logprobs = tl.load(int_params + index * 6 + 3).to(tl.int32)
    wanted = tl.where(is_finite, tl.minimum(num_logprobs, num_candidates), 0)
    if is_finite == 0:
        token = -1
    elif is_plain(float_params, int_params, edit_offsets, index) == 0:
        is_normalized = tl.load(int_params + index * 6 + 4)
        is_exclusive = tl.load(int_params + index * 6 + 5)
        first = tl.load(edit_offsets + index)
        last = tl.load(edit_offsets + index + 1)
        if (last > first) | (is_normalized != 0) | (is_exclusive != 0):
            base = tl.where(is_normalized != 0, log_sum, 0.0)
            apply_edits(
                values, logits, bias, has_bias, edit_ids, edit_rounds, edit_values, first, last, vocab_size, base,
                is_exclusive, BLOCK=BLOCK,
            )  # fmt: skip
        best, best_id = largest_after(values, vocab_size, float("inf"), -1, BLOCK=BLOCK)
        forced_id = tl.load(int_params + index * 6 + 2).to(tl.int32)
        temperature = tl.load(float_params + index * 4)
        token = tl.where(best > float("-inf"), best_id, -2)
        if forced_id >= 0:
            token = forced_id
        elif (temperature > 0) & (best > float("-inf")):
            token = draw(
                values, vocab_size, best, temperature, tl.load(int_params + index * 6).to(tl.int32),
                tl.load(float_params + index * 4 + 1), tl.load(float_params + index * 4 + 2),
                tl.load(float_params + index * 4 + 3), tl.load(int_params + index * 6 + 1), tl.load(positions + index),
                BLOCK=BLOCK, NARROW=NARROW,
            )  # fmt: skip
        if (num_logprobs >= 0) & (token >= 0):
            logprob = _logit(logits, bias, has_bias, token) - log_sum
        value = float("inf")
        value_id = -1
        for place in range(wanted):
            value, value_id = largest_after(values, vocab_size, value, value_id, BLOCK=BLOCK)
            is_candidate = value > float("-inf")
            score = tl.where(is_normalized != 0, value, value - log_sum)
            chosen = tl.where(is_candidate, value_id, 0)
            chosen_logprob = _logit(logits, bias, has_bias, chosen) - log_sum
            tl.store(top_ids + index * num_candidates + place, tl.where(is_candidate, value_id, -1))
            tl.store(top_logprobs + index * num_candidates + place, tl.where(is_candidate, chosen_logprob, 0.0))
            tl.store(top_scores + index * num_candidates + place, tl.where(is_candidate, score, float("-inf")))
    for place in range(tl.maximum(wanted, 0), num_candidates):
        tl.store(top_ids + index * num_candidates + place, -1)
        tl.store(top_logprobs + index * num_candidates + place, 0.0)
        tl.store(top_scores + index * num_candidates + place, float("-inf"))
    tl.store(token_ids + index, token)
    tl.store(logprobs + index, logprob)
