"""Texts of requests: built-in everyday sentences, and texts from a file."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from antiphon.load.plan import PlanError

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


def read_texts(name: str | None) -> list[str]:
    """Read the lines of a file, or of standard input for '-', without blank ones. None: everyday sentences.

    The order is random and fixed: files of sentences are often sorted by length, and traffic is not. Raises PlanError.
    """
    texts = [text for text in (EVERYDAY if name is None else _read(name).split("\n")) if text.strip()]
    if not texts:
        raise PlanError(f"--input {name} holds no text")
    return shuffled(texts)


def shuffled(texts: Sequence[str]) -> list[str]:
    """Return the texts in a fixed random order."""
    return random.Random(_ORDER_SEED).sample(list(texts), len(texts))


def read_file(flag: str, path: Path) -> str:
    """Read the text of a file. Raises PlanError, which names the flag."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{flag} {path} cannot be read: {error}") from None


def _read(name: str) -> str:
    if name != "-":
        return read_file("--input", Path(name))
    if sys.stdin is None:
        raise PlanError("--input - cannot be read: standard input is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--input - cannot be read: {error}") from None
