"""Tokenises the texts of a request without blocking the event loop, and checks its token ids.

A source is completed by the model's template. Token ids that begin or end with the template's tokens already do not
get them a second time. Targets and prefixes use the target's vocabulary.

The size of every text in bytes is checked before anything reads it. A text that is much too long for the model is
refused here, before it is tokenised; the engine checks the exact limits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from antiphon.architecture.config import ModelConfig
from antiphon.domain.errors import InvalidArgument, InWords, TooManyTexts
from antiphon.domain.sampling_params import Controls
from antiphon.rpc.v1.languages import NO_LANGUAGES, RequestLanguages
from antiphon.text.format import LanguageIds, TextFormat, fill, num_before
from antiphon.text.tokenizer import Tokenizer
from antiphon.v1 import inference_pb2 as pb

# With more characters or ids than this the tokenizer takes over a millisecond, which would delay the event loop.
MAX_INLINE_LEN = 2000
# Bytes of text tokenised in a second by the slowest kind, texts of one-letter words.
_BYTES_PER_S = 700_000

HasSource = (
    pb.GenerateRequest
    | pb.GenerateUnaryRequest
    | pb.ScoreRequest
    | pb.EmbedRequest
    | pb.ExplainRequest
    | pb.NextTokenRequest
    | pb.ClassifyRequest
    | pb.FillMaskRequest
)
HasTarget = pb.ScoreRequest | pb.ExplainRequest
_HasPair = pb.EmbedRequest | pb.ClassifyRequest | pb.ExplainRequest

_SOURCE_FIELDS = ("text", "text_pair")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Source as the model reads it."""

    ids: tuple[int, ...]
    type_ids: tuple[int, ...] = ()
    """Token types; empty if all are 0."""
    first: int = 0
    """Index of the text's first token, after the template's tokens."""
    offsets: tuple[tuple[int, int], ...] = ()
    """[start, end) of each of the text's tokens in code points; empty unless requested."""


@dataclass(frozen=True, slots=True)
class _Side:
    """Functions for the texts of one side: encode a short text, encode several in a thread, bound their tokens."""

    encode: Callable[[str], list[int]]
    encode_many: Callable[[Sequence[str]], list[list[int]]]
    min_tokens: Callable[[str], int]


def is_short(message: pb.GenerateRequest) -> bool:
    """Return whether the texts of a request are read at once, without waiting for a thread."""
    return max(len(message.text), len(message.options.prefix_text)) <= MAX_INLINE_LEN


class Inputs:
    """Reads sources, targets and prefixes with one model's tokenizer, text format and limits."""

    def __init__(
        self, tokenizer: Tokenizer, text: TextFormat, config: ModelConfig, limits: pb.Limits, long_texts: LongTexts
    ) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._config = config
        self._limits = limits
        self._long_texts = long_texts
        self._source = _Side(tokenizer.encode, tokenizer.encode_batch, tokenizer.min_tokens)
        self._target = _Side(tokenizer.encode_target, tokenizer.encode_targets, tokenizer.min_target_tokens)
        self._not_in_targets = _not_in_targets(config, text)

    async def source(self, message: HasSource, languages: RequestLanguages = NO_LANGUAGES, *, caller: str) -> Source:
        """Return the source of a request, which may be a pair. Only the prompt of a decoder-only model may be empty.

        Raises InvalidArgument.
        """
        kind = message.WhichOneof("source")
        if kind is None:
            raise InvalidArgument("source", None, "set: text or token_ids")
        content = message.text if kind == "text" else message.token_ids.ids
        ids = await self._ids(kind, content, self._limits.max_source_len, caller, shortest=1)
        if not ids and self._config.architecture != "decoder":
            empty = message.text if kind == "text" else []
            raise InvalidArgument(kind, empty, "not empty; white space alone counts as empty")
        pair_ids = await self._pair_ids(message, kind, caller)
        return self._filled(ids, pair_ids, languages.ids, are_ids=kind == "token_ids")

    async def text_source(self, text: str, *, caller: str) -> Source:
        """Return a text as a source with the offsets of its tokens. Raises InvalidArgument."""
        check = partial(self._refuse_endless, "text", text, self._source, self._limits.max_source_len, 1)
        encoding = await self._read("text", text, self._tokenizer.encode_source, caller, check=check)
        if not encoding.ids:
            raise InvalidArgument("text", text, "not empty; white space alone counts as empty")
        return self._filled(encoding.ids, None, LanguageIds(), offsets=tuple(encoding.offsets))

    async def target_ids(
        self, message: HasTarget, languages: RequestLanguages, *, caller: str
    ) -> tuple[int, ...] | None:
        """Return the target's tokens, without an end token; None if there is no target.

        The token of the target language comes first for models whose targets begin with it.
        """
        kind = message.WhichOneof("target")
        if kind is None:
            return None
        content = message.target_text if kind == "target_text" else message.target_token_ids.ids
        return languages.target(await self._ids(kind, content, self._limits.max_target_len, caller))

    async def ended_target_ids(
        self, message: pb.ScoreRequest, languages: RequestLanguages, *, caller: str
    ) -> tuple[int, ...]:
        """Return the target's tokens, end token included. Raises InvalidArgument if there is no target."""
        ids = await self.target_ids(message, languages, caller=caller)
        if ids is None:
            raise InvalidArgument("target", None, "set: target_text or target_token_ids")
        eos_id = self._config.eos_id
        return ids if ids and ids[-1] == eos_id else (*ids, eos_id)

    async def prefix_ids(self, controls: Controls, languages: RequestLanguages, *, caller: str) -> tuple[int, ...]:
        """Return the first tokens of the target, after the token of its language; empty if there is no prefix."""
        limit = self._limits.max_target_len - 1  # at least one token is generated
        if controls.prefix_text is not None:
            return languages.prefix(await self._ids("options.prefix_text", controls.prefix_text, limit, caller))
        ids = await self._ids("options.prefix_ids", controls.prefix_ids or (), limit, caller)
        for token_id, name in self._not_in_targets.items():
            if token_id in ids:
                raise InvalidArgument("options.prefix_ids", f"holding the {name} token {token_id}", "without it")
        return languages.prefix(ids)

    async def tokenized(self, text: str, *, caller: str) -> tuple[list[int], str]:
        """Return the token ids of a text of any length, without the template, and its normalised form."""
        return await self._read("text", text, self._with_normal_form, caller)

    async def detokenized(self, ids: Sequence[int], *, caller: str) -> tuple[str, list[str]]:
        """Return the text of target token ids and the piece of each, at most as many ids as a text may have bytes.

        Raises InvalidArgument.
        """
        most, vocab_size = self._limits.max_text_bytes, self._config.vocab_size
        if len(ids) > most:
            raise InvalidArgument("token_ids", InWords(f"{len(ids)} ids long"), f"at most {most} ids long")
        if (largest_id := max(ids, default=0)) >= vocab_size:
            raise InvalidArgument("token_ids", largest_id, f"of token ids from 0 to {vocab_size - 1}")
        if len(ids) <= MAX_INLINE_LEN:
            return self._decoded(ids)
        return await self._long_texts.run(caller, len(ids), partial(self._decoded, ids))

    def _decoded(self, ids: Sequence[int]) -> tuple[str, list[str]]:
        piece_of = {token_id: self._tokenizer.piece(token_id) for token_id in set(ids)}  # long lists repeat tokens
        return self._tokenizer.decode(ids), [piece_of[token_id] for token_id in ids]

    def _with_normal_form(self, text: str) -> tuple[list[int], str]:
        ids = _encode(self._source, text)
        return ids, self._tokenizer.decode_source(ids)

    async def _pair_ids(self, message: HasSource, kind: str, caller: str) -> tuple[int, ...] | None:
        if not isinstance(message, _HasPair) or not message.HasField("text_pair"):
            return None
        if kind != "text":
            raise InvalidArgument("text_pair", message.text_pair, "absent beside token_ids")
        if self._text.pair_template is None:
            raise InvalidArgument("text_pair", message.text_pair, "absent: this model reads single texts")
        return await self._ids("text_pair", message.text_pair, self._limits.max_source_len, caller)

    async def _ids(
        self, field: str, content: str | Sequence[int], limit: int, caller: str, *, shortest: int = 0
    ) -> tuple[int, ...]:
        """Return the tokens of a text, or the given ids. Refuses a text before tokenising it if surely too long."""
        if not isinstance(content, str):
            _check_len(field, len(content), limit, shortest)
            return tuple(content)
        side = self._source if field in _SOURCE_FIELDS else self._target
        check = partial(self._refuse_endless, field, content, side, limit, shortest)
        return tuple(await self._read(field, content, partial(_encode, side), caller, check=check))

    async def _read(
        self, field: str, text: str, read: Callable[[str], _T], caller: str, *, check: Callable[[], None] | None = None
    ) -> _T:
        """Read a text: a short one at once, a long one in the thread of long texts after the check.

        Raises InvalidArgument if it has too many bytes.
        """
        num_bytes, most = len(text) if text.isascii() else len(text.encode()), self._limits.max_text_bytes
        if num_bytes > most:
            raise InvalidArgument(field, InWords(f"{num_bytes} bytes long"), f"at most {most} bytes long")
        if len(text) <= MAX_INLINE_LEN:
            return read(text)

        def checked() -> _T:
            if check is not None:
                check()
            return read(text)

        return await self._long_texts.run(caller, num_bytes, checked)

    def _refuse_endless(self, field: str, text: str, side: _Side, limit: int, shortest: int) -> None:
        _check_len(field, side.min_tokens(text), limit, shortest)

    def _filled(
        self,
        ids: Sequence[int],
        pair_ids: Sequence[int] | None,
        languages: LanguageIds,
        *,
        are_ids: bool = False,
        offsets: tuple[tuple[int, int], ...] = (),
    ) -> Source:
        filled, types = fill(self._text, ids, pair_ids, languages, is_partly_filled=are_ids)
        has_types = self._config.token_types > 0 and any(types)
        return Source(
            ids=filled or (self._config.bos_id,),  # an empty prompt without a template begins with the begin token
            type_ids=types if has_types else (),
            first=num_before(self._text, languages),
            offsets=offsets,
        )


def _encode(side: _Side, text: str) -> list[int]:
    # `encode` holds the interpreter lock, which stops the engine. `encode_many` releases it, so it reads long texts.
    return side.encode(text) if len(text) <= MAX_INLINE_LEN else side.encode_many([text])[0]


def _check_len(field: str, least: int, limit: int, shortest: int) -> None:
    if least > limit:
        raise InvalidArgument(field, InWords(f"at least {least} tokens long"), f"{shortest} to {limit} tokens long")


def _not_in_targets(config: ModelConfig, text: TextFormat) -> dict[int, str]:
    """Return tokens that may not be inside a target, with their names.

    The text of a decoder-only model may contain begin and padding tokens: in a prompt they separate documents.
    """
    if config.architecture == "decoder":
        return {config.eos_id: "end"}
    # One token may have several of these roles. The token of a language may begin a target, so it is allowed inside.
    named = {config.pad_id: "padding", config.bos_id: "begin", config.eos_id: "end"}
    return {token_id: name for token_id, name in named.items() if token_id not in text.languages.values()}


class LongTexts:
    """One thread for the long texts of all callers and models, and the texts that wait for it or are being tokenised.

    Tokenising a text takes many times its size in memory: 130 to 400 times for most texts, at most 600 times with the
    shipped tokenizer, at most 1,105 times over all tokenizers (T5's, for U+FDFA, which becomes 18 characters). So only
    one text is tokenised at a time. Callers take turns. For the event loop.

    max_bytes: limit on the total bytes of these texts; one caller may have half of it.
    """

    def __init__(self, max_bytes: int = 2 << 20) -> None:
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, "long-texts")
        self._is_busy = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller; the next one comes first
        self._held_bytes: Counter[str] = Counter()  # by caller

    @property
    def held_bytes(self) -> int:
        """Bytes of the texts that wait or are being tokenised."""
        return self._held_bytes.total()

    async def run(self, caller: str, num_bytes: int, work: Callable[[], _T]) -> _T:
        """Run work on a text of num_bytes bytes in the thread, when it is the caller's turn.

        Raises TooManyTexts at once if too many bytes wait already, and every error of the work.
        """
        self._check_room(caller, num_bytes)
        self._held_bytes[caller] += num_bytes
        try:
            await self._turn(caller)
        except BaseException:
            self._release(caller, num_bytes)
            raise
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        done.add_done_callback(lambda _: self._end(caller, num_bytes))
        try:
            # The thread continues if the caller leaves: the text counts until its work has ended.
            return await asyncio.shield(done)
        finally:
            del done  # breaks a reference cycle: its error references this frame, which references the text

    def _check_room(self, caller: str, num_bytes: int) -> None:
        of_all, of_caller = self.held_bytes, self._held_bytes[caller]
        if of_all + num_bytes > self._max_bytes:
            waiting, most = f"{of_all} bytes of long texts", self._max_bytes
        elif of_caller + num_bytes > self._max_bytes // 2:
            waiting, most = f"{of_caller} bytes of this caller's long texts", self._max_bytes // 2
        else:
            return
        message = f"{waiting} wait to be tokenised; with {num_bytes} more they would be above {most}"
        raise TooManyTexts(message, retry_after_s=of_all / _BYTES_PER_S)

    async def _turn(self, caller: str) -> None:
        """Wait until the thread is free for the caller's next text."""
        if not self._is_busy:
            self._is_busy = True
            return
        turn = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(caller, deque())
        line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn was given, but the caller has left
                self._next()
            with contextlib.suppress(ValueError):
                line.remove(turn)
            raise

    def _next(self) -> None:
        """Give the thread to the next caller. Its remaining texts wait behind those of the other callers."""
        while self._waiting:
            caller = next(iter(self._waiting))
            line = self._waiting.pop(caller)
            turn = line.popleft() if line else None
            if line:
                self._waiting[caller] = line
            if turn is not None and not turn.done():
                turn.set_result(None)
                return
        self._is_busy = False

    def _end(self, caller: str, num_bytes: int) -> None:
        self._release(caller, num_bytes)
        self._next()

    def _release(self, caller: str, num_bytes: int) -> None:
        self._held_bytes[caller] -= num_bytes
        if not self._held_bytes[caller]:
            del self._held_bytes[caller]
