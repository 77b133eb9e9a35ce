"""First half of the end of a step: what each part of the vocabulary contributes to a sample."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_plain(float_params, int_params, edit_offsets, sample):
    """Return True for a sample that is the token of the largest logit and nothing else."""
    temperature = tl.load(float_params + sample * 4)
    forced_id = tl.load(int_params + sample * 6 + 2)
    num_logprobs = tl.load(int_params + sample * 6 + 3)
    is_normalized = tl.load(int_params + sample * 6 + 4)
    is_exclusive = tl.load(int_params + sample * 6 + 5)
    num_edits = tl.load(edit_offsets + sample + 1) - tl.load(edit_offsets + sample)
    is_asked = (temperature > 0) | (forced_id >= 0) | (num_logprobs >= 0)
    return ((num_edits > 0) | is_asked | (is_normalized != 0) | (is_exclusive != 0)) == 0


@triton.jit
def vocabulary(
    parts,  # [K, C, 3]
    values,  # [K, V]
    logits,  # [K, V]
    bias,  # [V]
    float_params,  # [K, 4]
    int_params,  # [K, 6]
    edit_offsets,  # [K + 1]
    vocab_size,
    flags,  # 1: bias
    BLOCK: tl.constexpr,
):
    """Write one part's largest logit, its lowest token and its sum of exp(logit - largest). Grid: K, C.

    The largest logit is NaN where one logit is. Logits are copied to `values` where the sample needs more than argmax.
    """
    sample = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab_size
    logit = tl.load(logits + sample * vocab_size + ids, mask, other=float("-inf")).to(tl.float32)
    if (flags & 1) != 0:
        logit += tl.load(bias + ids, mask, other=0.0).to(tl.float32)
    largest = tl.max(logit, 0)
    token = tl.min(tl.where(logit == largest, ids, vocab_size), 0)
    base = tl.where(largest > float("-inf"), largest, 0.0)
    total = tl.sum(tl.exp(logit - base), 0)
    num_nan = tl.sum((logit != logit).to(tl.int32), 0)
    largest = tl.where(num_nan > 0, float("nan"), largest)
    place = parts + (sample * tl.num_programs(1) + part) * 3
    tl.store(place, largest)
    tl.store(place + 1, token.to(tl.float32))  # exact below 2^24
    tl.store(place + 2, total)
    if is_plain(float_params, int_params, edit_offsets, sample) == 0:
        tl.store(values + sample * vocab_size + ids, logit, mask)
