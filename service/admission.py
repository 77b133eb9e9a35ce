"""May this request ever run here, and what must be kept for it if it does.

Turns a request into a waiting sequence or refuses it, naming the field. Knows limits; not what is running or free now.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass

from antiphon.service.errors import InvalidArgument
from antiphon.service.kv_cache import blocks_for
from antiphon.service.request import Request
from antiphon.service.sequence import Sequence
from antiphon.service.stream import OutputStream


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionLimits:
    """What the model and the pool can hold: token ids below vocab_size, lengths in tokens, blocks in all."""

    vocab_size: int
    max_source_len: int
    max_target_len: int
    num_blocks: int
    block_size: int


def admit(request: Request, stream: OutputStream, limits: AdmissionLimits) -> Sequence:
    """Build the waiting sequence of a request, with the blocks of its source and of its longest target counted.

    Raises InvalidArgument for a request that could not run even if nothing else did.
    """
    _check_tokens("source", request.source_ids, 1, limits.max_source_len, limits)
    # The begin token takes a position too, and one token at least is to be generated.
    prefix_len = len(request.prefix_ids)
    _check_tokens("prefix", request.prefix_ids, 0, limits.max_target_len - 1, limits)
    room = limits.max_target_len - prefix_len
    max_new_tokens = min(request.params.max_new_tokens or room, room)
    # The last token is never fed, so a full-length target has room for the begin token.
    num_slots = min(1 + prefix_len + max_new_tokens, limits.max_target_len)
    sequence = Sequence(
        request=request,
        stream=stream,
        max_new_tokens=max_new_tokens,
        num_self_blocks=blocks_for(num_slots, limits.block_size),
        num_cross_blocks=blocks_for(len(request.source_ids), limits.block_size),
    )
    if sequence.num_blocks > limits.num_blocks:
        raise _too_large(sequence, limits)
    return sequence


def _check_tokens(field: str, token_ids: Ids[int], shortest: int, longest: int, limits: AdmissionLimits) -> None:
    if not shortest <= len(token_ids) <= longest:
        raise InvalidArgument(field, f"{len(token_ids)} tokens long", f"{shortest} to {longest} tokens long")
    lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
    if lowest < 0 or highest >= limits.vocab_size:
        unknown = lowest if lowest < 0 else highest
        raise InvalidArgument(field, f"token id {unknown}", f"of token ids from 0 to {limits.vocab_size - 1}")


def _too_large(sequence: Sequence, limits: AdmissionLimits) -> InvalidArgument:
    prefix_len = len(sequence.request.prefix_ids)
    room_blocks = limits.num_blocks - sequence.num_cross_blocks
    if room_blocks < 1:
        longest = (limits.num_blocks - 1) * limits.block_size
        return InvalidArgument("source", f"{sequence.source_len} tokens long", f"at most {longest} tokens long")
    room = room_blocks * limits.block_size - 1 - prefix_len
    if room < 1:
        return InvalidArgument("prefix", f"{prefix_len} tokens long", f"at most {prefix_len + room - 1} tokens long")
    asked = sequence.request.params.max_new_tokens
    return InvalidArgument("max_new_tokens", asked, f"at most {room} for a source of this length")
