"""Logits warpers and the random draw, in the order of model/antiphon/ops/logits_warpers.py.

A warper keeps the tokens above a threshold of a key: the edited logit (top-k, top-p) or the distance of the surprise
from the entropy (typical-p). The threshold is found digit by digit over the key's bits, which needs no sorting.
"""

from __future__ import annotations

import triton
import triton.language as tl

from antiphon.ops.cuda.kernels.random import uniform_at


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
