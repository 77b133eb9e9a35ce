"""`antiphon evaluate` for decoder-only models: perplexity of texts, by Score requests to the engine."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.bundle.manifest import Bundle, Measure
from antiphon.domain.request import Arrival, Request, Task
from antiphon.runtime.lanes import AnyRunner
from antiphon.text.format import TextFormat, fill, num_before
from antiphon.text.tokenizer import Tokenizer, open_tokenizer
from antiphon.tools.offline import answer_all
from antiphon.training.scores import text_loss

# The first token of a text or window is given; the following ones are scored.
SHORTEST = 2


class NoTextError(ValueError):
    """The texts contain no token to score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextScore:
    """Score of one system on texts. perplexity: exp of the mean negative log-likelihood of the scored tokens.

    nats_per_character, bits_per_byte: the same loss for the characters and the UTF-8 bytes of the scored tokens.
    texts: number of scored texts; skipped: number of texts that are too short; windows: number of scored windows.
    """

    system: str
    perplexity: float
    nats_per_character: float
    bits_per_byte: float
    tokens: int
    texts: int
    skipped: int
    windows: int
    seconds: float

    @property
    def quality(self) -> tuple[Measure, float]:
        """Return the measure and the value that a manifest records."""
        return "perplexity", self.perplexity

    @property
    def row(self) -> str:
        """Return the score as one line."""
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return (
            f"{self.system:<24} perplexity {self.perplexity:.4f}  {self.nats_per_character:.4f} nats per character  "
            f"{self.bits_per_byte:.4f} bits per byte  {self.tokens} tokens of {self.texts} texts{skipped}  "
            f"{self.tokens / self.seconds:,.0f} tokens/s"
        )


def evaluate_texts(bundle: Bundle, runner: AnyRunner, texts: Sequence[str]) -> TextScore:
    """Score a decoder-only model on texts. Raises NoTextError if no text has two tokens."""
    tokenizer = open_tokenizer(bundle.path, bundle.manifest.text)
    encoded = [ids for ids in _tokenize(bundle.manifest.text, tokenizer, texts) if len(ids) >= SHORTEST]
    pieces = [piece for ids in encoded for piece in windows(ids, bundle.manifest.model.max_target_len)]
    if not pieces:
        raise NoTextError(f"none of {len(texts)} lines has {SHORTEST} tokens, the first of which is given")
    requests = [_score_request(str(index), piece) for index, piece in enumerate(pieces)]
    started = time.perf_counter()
    events = asyncio.run(answer_all(runner, requests, unit="window"))
    seconds = time.perf_counter() - started
    loss = text_loss(
        -math.fsum(token.logprob for event in events for token in event.logprobs),
        b"".join(tokenizer.bytes_of(piece[1:]) for piece in pieces),
    )
    num_tokens = sum(len(piece) - 1 for piece in pieces)
    return TextScore(
        system=f"antiphon {runner.facts.precision}",
        perplexity=math.exp(loss.nats / num_tokens),
        nats_per_character=loss.nats_per_character,
        bits_per_byte=loss.bits_per_byte,
        tokens=num_tokens,
        texts=len(encoded),
        skipped=len(texts) - len(encoded),
        windows=len(pieces),
        seconds=seconds,
    )


def windows(ids: Sequence[int], longest: int) -> list[Sequence[int]]:
    """Split ids into windows of at most `longest` tokens. Each window begins with the last token of the previous one.

    Every token except the first is scored once, after the tokens before it in its window.
    """
    return [ids[start : start + longest] for start in range(0, len(ids) - 1, longest - 1)]


def _tokenize(text: TextFormat, tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Tokenise each text, with the template's tokens before it and none after it. A blank line has no tokens."""
    before = num_before(text)
    filled = []
    for line, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        filled.append(fill(text, ids)[0][: before + len(ids)] if line.strip() else ())
    return filled


def _score_request(name: str, ids: Sequence[int]) -> Request:
    return Request(
        task=Task.SCORE,
        arrival=Arrival(request_id=name, arrival_s=0.0),
        source_ids=(),
        begin_id=ids[0],
        num_prompt_ids=1,
        target_ids=tuple(ids[1:]),
    )
