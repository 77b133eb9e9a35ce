"""Kernels of the end of a step: what each part of the vocabulary contributes to a sample, then the samples.

Edits of logits, logits warpers and the random draw have the order of model/antiphon/ops/sampling.py and
logits_warpers.py; random numbers have the same bits as those of sampling.py.

A warper keeps the tokens above a threshold of a key: the edited logit (top-k, top-p) or the distance of the surprise
from the entropy (typical-p). The threshold is found digit by digit over the key's bits, which needs no sorting.
"""

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


@triton.jit
def uniform_at(seed, position):
    """Return the float64 in [0, 1) of a seed, int64 of the bits of a uint64, and a position (Salmon et al. 2011)."""
    first_factor = tl.full([], 0xD2E7470EE14C6C93, tl.uint64)
    second_factor = tl.full([], 0xCA5A826395121157, tl.uint64)
    first_step = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    second_step = tl.full([], 0xBB67AE8584CAA73B, tl.uint64)
    first_key = seed.to(tl.uint64, bitcast=True)
    second_key = tl.full([], 0, tl.uint64)
    word0 = (position.to(tl.int64) + 1).to(tl.uint64, bitcast=True)  # NumPy counts up before it draws
    word1 = tl.full([], 0, tl.uint64)
    word2 = tl.full([], 0, tl.uint64)
    word3 = tl.full([], 0, tl.uint64)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(first_factor, word0)
        high1 = tl.umulhi(second_factor, word2)
        low0 = first_factor * word0
        low1 = second_factor * word2
        word0 = high1 ^ word1 ^ first_key
        word1 = low1
        word2 = high0 ^ word3 ^ second_key
        word3 = low0
        first_key += first_step
        second_key += second_step
    return (word0 >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _ordered(value):
    """Return int64 keys from 0 to 2^32 - 1 in the order of float32 values."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)


@triton.jit
def _value_of(key):
    """Return the float32 value of a key of _ordered."""
    bits = tl.where(key >= 0x80000000, key - 0x80000000, 0xFFFFFFFF - key)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _weights(value, ids, largest, temperature, threshold, last_tie, min_p):
    """Return exp((value - largest) / temperature) of the tokens that are kept so far, and 0 for the others.

    Kept: key above threshold, or equal to it and id at most last_tie; weight at least min_p.
    """
    key = _ordered(value)
    is_kept = (key > threshold) | ((key == threshold) & (ids <= last_tie))
    weight = tl.exp((value - largest) / temperature)
    return tl.where(is_kept & (value > float("-inf")) & (weight >= min_p), weight, 0.0)


@triton.jit
def _distance(value, largest, temperature, log_total, entropy):
    """Return the distance of each token's surprise from the entropy (Meister et al. 2022)."""
    return tl.abs(log_total - (value - largest) / temperature - entropy)


@triton.jit
def _threshold(
    values, vocab_size, largest, temperature, threshold, last_tie, min_p, log_total, entropy, target,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest key whose tokens and those above it weigh at least target, and the weight above it.

    KIND 0: every token weighs 1, the key is its value. 1: its probability, the key is its value. 2: its probability,
    the key falls with the distance of its surprise.
    """
    digits = tl.arange(0, 16)
    prefix = tl.full([], 0, tl.int64)
    above = tl.full([], 0.0, tl.float64)
    for place in range(8):
        shift = 28 - 4 * place
        sums = tl.zeros([16], tl.float64)
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            value = tl.load(values + ids, ids < vocab_size, other=float("-inf"))
            weight = _weights(value, ids, largest, temperature, threshold, last_tie, min_p)
            key = _ordered(value)
            if KIND == 0:
                weight = tl.where(value > float("-inf"), 1.0, 0.0)
            if KIND == 2:
                key = _ordered(-_distance(value, largest, temperature, log_total, entropy))
            weight = tl.where((key >> (shift + 4)) == (prefix >> (shift + 4)), weight, 0.0)
            digit = ((key >> shift) & 15).to(tl.int32)
            spread = tl.where(digit[:, None] == digits[None, :], weight[:, None], 0.0)
            sums += tl.sum(spread, 0).to(tl.float64)
        from_digit = tl.sum(tl.where(digits[None, :] >= digits[:, None], sums[None, :], 0.0), 1)
        chosen = tl.max(tl.where(above + from_digit >= target, digits, 0), 0)
        above += tl.sum(tl.where(digits > chosen, sums, 0.0), 0)
        prefix += chosen.to(tl.int64) << shift
    return prefix, above


@triton.jit
def _id_of_tie(values, vocab_size, key, last_tie, count, BLOCK: tl.constexpr):
    """Return the id of the tie number `count` at a key, among ids up to last_tie; vocab_size if there are fewer."""
    found = vocab_size
    before = 0
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        value = tl.load(values + ids, ids < vocab_size, other=float("-inf"))
        is_tie = (_ordered(value) == key) & (ids < vocab_size) & (ids <= last_tie)
        ties = is_tie.to(tl.int32)
        rank = before + tl.cumsum(ties, 0)
        found = tl.minimum(found, tl.min(tl.where(is_tie & (rank == count), ids, vocab_size), 0))
        before += tl.sum(ties, 0)
    return found


@triton.jit
def _total(values, vocab_size, largest, temperature, threshold, last_tie, min_p, BLOCK: tl.constexpr):
    """Return the sum of the kept weights, float64, and the sum of weight * (value - largest) / temperature."""
    total = tl.full([], 0.0, tl.float64)
    moment = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        value = tl.load(values + ids, ids < vocab_size, other=float("-inf"))
        weight = _weights(value, ids, largest, temperature, threshold, last_tie, min_p)
        total += tl.sum(weight, 0).to(tl.float64)
        scaled = tl.where(weight > 0, (value - largest) / temperature, 0.0)
        moment += tl.sum(weight * scaled, 0).to(tl.float64)
    return total, moment


@triton.jit
def draw(
    values, vocab_size, largest, temperature, top_k, top_p, min_p, typical_p, seed, position,
    BLOCK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Return a token drawn from values [V], whose largest is finite; -inf forbids a token."""
    threshold = tl.full([], 0, tl.int64)
    last_tie = vocab_size
    if (top_k > 0) & (top_k < vocab_size):
        key, above = _threshold(
            values, vocab_size, largest, temperature, threshold, last_tie, 0.0, 0.0, 0.0, top_k.to(tl.float64),
            KIND=0, BLOCK=NARROW,
        )  # fmt: skip
        last_tie = _id_of_tie(values, vocab_size, key, last_tie, top_k - above.to(tl.int32), BLOCK=BLOCK)
        threshold = key
    if top_p < 1.0:
        total, _ = _total(values, vocab_size, largest, temperature, threshold, last_tie, 0.0, BLOCK=BLOCK)
        mass = total * top_p.to(tl.float64)
        key, above = _threshold(
            values, vocab_size, largest, temperature, threshold, last_tie, 0.0, 0.0, 0.0, mass,
            KIND=1, BLOCK=NARROW,
        )  # fmt: skip
        weight = tl.exp((_value_of(key) - largest) / temperature).to(tl.float64)
        ties = tl.ceil((mass - above) / tl.where(weight > 0, weight, 1.0)).to(tl.int32)
        last_tie = _id_of_tie(
            values, vocab_size, key, tl.where(key == threshold, last_tie, vocab_size), tl.maximum(ties, 1), BLOCK=BLOCK
        )
        threshold = key
    farthest = float("inf")
    log_total = 0.0
    entropy = 0.0
    if typical_p < 1.0:
        total, moment = _total(values, vocab_size, largest, temperature, threshold, last_tie, min_p, BLOCK=BLOCK)
        log_total = tl.log(total.to(tl.float32))
        entropy = log_total - moment.to(tl.float32) / total.to(tl.float32)
        key, _ = _threshold(
            values, vocab_size, largest, temperature, threshold, last_tie, min_p, log_total, entropy,
            total * typical_p.to(tl.float64), KIND=2, BLOCK=NARROW,
        )  # fmt: skip
        farthest = -_value_of(key)
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        value = tl.load(values + ids, ids < vocab_size, other=float("-inf"))
        weight = _weights(value, ids, largest, temperature, threshold, last_tie, min_p)
        weight = tl.where(_distance(value, largest, temperature, log_total, entropy) <= farthest, weight, 0.0)
        total += tl.sum(weight, 0).to(tl.float64)
    point = uniform_at(seed, position) * total
    token = -1
    last = 0
    before = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        value = tl.load(values + ids, ids < vocab_size, other=float("-inf"))
        weight = _weights(value, ids, largest, temperature, threshold, last_tie, min_p)
        weight = tl.where(_distance(value, largest, temperature, log_total, entropy) <= farthest, weight, 0.0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, ids, 0), 0))
        part = tl.sum(weight, 0).to(tl.float64)
        if (token < 0) & (before + part > point):
            passed = (before + tl.cumsum(weight.to(tl.float64), 0) > point) & (weight > 0)
            first = tl.min(tl.where(passed, ids, vocab_size), 0)
            # Sums in another order can differ in the last bit: then the draw ends with the block's last token.
            token = tl.where(first < vocab_size, first, tl.max(tl.where(weight > 0, ids, 0), 0))
        before += part
    return tl.where(token < 0, last, token)


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
