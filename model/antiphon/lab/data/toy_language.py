"""Sentence pairs of an artificial language, for experiments at toy size: each word has one translation."""

from __future__ import annotations

import random
from pathlib import Path

from antiphon.lab.data.written import write_parts
from antiphon.training.recipe import DataConfig

_WORDS = {"red": "rot", "green": "grün", "blue": "blau", "house": "Haus", "tree": "Baum", "old": "alt", "new": "neu"}


def toy_language(folder: Path) -> DataConfig:
    """Write 400 pairs of 2 to 5 words below `folder`, once, and return them as data of a recipe."""
    chance = random.Random(1)
    sentences = dict.fromkeys(" ".join(chance.choices(list(_WORDS), k=chance.randint(2, 5))) for _ in range(400))
    pairs = [(text, " ".join(_WORDS[word] for word in text.split())) for text in sentences]
    parts = {"train": pairs[60:], "valid": pairs[:30], "test": pairs[30:60]}
    return write_parts(folder, "toy-language", parts, languages=("en", "de"))
