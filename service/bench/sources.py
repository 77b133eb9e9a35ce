"""What is translated: lines of a file, or everyday sentences of many lengths that are always at hand."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from antiphon.model.tokenizer import Tokenizer
from antiphon.service.bench.report import BenchError

EVERYDAY = (
    "Stop!",
    "How are you?",
    "Thank you very much.",
    "I don't know.",
    "It's raining again.",
    "Where is the station?",
    "She reads a book every week.",
    "He has three dogs and a cat.",
    "Can you help me with this, please?",
    "We were late because of the snow.",
    "The weather is nice today, isn't it?",
    "What time does the next train leave?",
    "My brother works in a hospital in the city.",
    "I would like a cup of coffee without sugar.",
    "They have lived in the same house for ten years.",
    "Could you tell me how to get to the museum?",
    "The children are playing football behind the school.",
    "I forgot my umbrella at the office this morning.",
    "If you are hungry, there is some soup in the kitchen.",
    "My sister wants to learn German because she likes the language.",
    "The doctor told him to drink more water and to sleep longer.",
    "We went to bed early, since we were tired after the long journey.",
    "He asked me whether I had seen the letter that lay on the table.",
    "When I was a child, I spent every summer with my grandparents by the sea.",
    "The shop at the corner sells bread, milk, and vegetables, but it is closed on Sundays.",
)
_ORDER_SEED = 1


def load_texts(path: Path | None, count: int | None) -> list[str]:
    """Sentences in a fixed random order, repeated as often as it takes for `count`; None takes each once.

    Raises BenchError naming --source.
    """
    texts = list(EVERYDAY) if path is None else _read(path)
    # Files of sentences are often sorted by length, which no traffic is.
    random.Random(_ORDER_SEED).shuffle(texts)
    return list(itertools.islice(itertools.cycle(texts), len(texts) if count is None else count))


def tokenize(texts: list[str], tokenizer: Tokenizer, max_source_len: int) -> list[list[int]]:
    """Source ids of each text, end token included. Raises BenchError where one is too long for the model."""
    sources = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(texts)]
    longest = max(range(len(sources)), key=lambda index: len(sources[index]))
    if len(sources[longest]) > max_source_len:
        raise BenchError(
            f"--source: {texts[longest][:40]!r}... has {len(sources[longest])} tokens; "
            f"the model takes at most {max_source_len}"
        )
    return sources


def _read(path: Path) -> list[str]:
    try:
        texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--source {path} cannot be read: {error}") from None
    if not texts:
        raise BenchError(f"--source {path} holds no sentence")
    return texts
