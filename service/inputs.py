"""Texts and ids of a request become token ids, without holding up the event loop over a long one.

Refuses here what is far too long to be worth tokenising; exact limits are the engine's to check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from antiphon.model.tokenizer import Tokenizer
from antiphon.service.combinations import Controls
from antiphon.service.errors import InvalidArgument
from antiphon.v1 import inference_pb2 as pb

# Above this many characters or ids the tokenizer takes over a millisecond, too long for the event loop.
MAX_INLINE_LEN = 2000

HasSource = pb.GenerateRequest | pb.GenerateUnaryRequest | pb.ScoreRequest | pb.EmbedRequest | pb.ExplainRequest
HasTarget = pb.ScoreRequest | pb.ExplainRequest


class Inputs:
    """Reads sources, targets and prefixes with one model's tokenizer and limits."""

    def __init__(self, tokenizer: Tokenizer, limits: pb.Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    async def source_ids(self, message: HasSource) -> tuple[int, ...]:
        """The source's tokens, end token included."""
        kind = message.WhichOneof("source")
        if kind is None:
            raise InvalidArgument("source", None, "set: text or token_ids")
        given = message.text if kind == "text" else message.token_ids.ids
        ids = await self._ids(kind, given, self._limits.max_source_len, shortest=1)
        if not ids:
            found = message.text if kind == "text" else []
            raise InvalidArgument(kind, found, "not empty; white space alone counts as empty")
        return self._ended(ids)

    async def target_ids(self, message: HasTarget) -> tuple[int, ...] | None:
        """The target's tokens as given, without an end token appended; None where there is no target."""
        kind = message.WhichOneof("target")
        if kind is None:
            return None
        given = message.target_text if kind == "target_text" else message.target_token_ids.ids
        return await self._ids(kind, given, self._limits.max_target_len)

    async def ended_target_ids(self, message: pb.ScoreRequest) -> tuple[int, ...]:
        """The target's tokens, end token included. Raises InvalidArgument where there is no target."""
        ids = await self.target_ids(message)
        if ids is None:
            raise InvalidArgument("target", None, "set: target_text or target_token_ids")
        return self._ended(ids)

    async def prefix_ids(self, controls: Controls) -> tuple[int, ...]:
        """The first tokens of the target; empty where none are given."""
        limit = self._limits.max_target_len - 1  # one token at least is to be generated
        if controls.prefix_text is not None:
            return await self._ids("options.prefix_text", controls.prefix_text, limit)
        ids = await self._ids("options.prefix_ids", controls.prefix_ids or (), limit)
        if self._tokenizer.eos_id in ids:
            raise InvalidArgument("options.prefix_ids", f"holding the end token {self._tokenizer.eos_id}", "without it")
        return ids

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text of any length, without end token."""
        if len(text) <= MAX_INLINE_LEN:
            return self._tokenizer.encode(text)
        # As a batch of one: `encode` keeps the interpreter lock, and with it the engine, until it is done.
        return (await asyncio.to_thread(self._tokenizer.encode_batch, [text]))[0]

    async def _ids(self, field: str, given: str | Sequence[int], limit: int, *, shortest: int = 0) -> tuple[int, ...]:
        """Tokens of a text or ids as they are. Refuses, before it costs seconds of a core, what is surely too long."""
        least = len(given)
        if isinstance(given, str):
            least = await asyncio.to_thread(self._tokenizer.min_tokens, given) if least > MAX_INLINE_LEN else 0
        if least > limit:
            raise InvalidArgument(field, f"at least {least} tokens long", f"{shortest} to {limit} tokens long")
        return tuple(await self.encode(given)) if isinstance(given, str) else tuple(given)

    def _ended(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        eos_id = self._tokenizer.eos_id
        return ids if ids and ids[-1] == eos_id else (*ids, eos_id)
