"""A text of short sentences, and a recipe that trains a language model on it in seconds."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import torch

from antiphon.training.recipe import LanguageModelRecipe
from antiphon.training.task import Group
from antiphon.training.trainer import Trainer

MODEL = dict(
    architecture="decoder", encoder_layers=0, decoder_layers=2, d_model=32, num_heads=4, d_ff=64, norm_placement="pre",
    activation="gelu", positions="rope", scale_embeddings=False, bias=False, dropout=0.1, max_target_len=33,
)  # fmt: skip
SETTINGS = dict(
    batch_tokens=256, max_steps=30, warmup_steps=10, peak_lr=1e-2, schedule="linear", bf16=False, label_smoothing=0.0,
    checkpoint_every_steps=10, average_last=1, weight_decay=0.1,
)  # fmt: skip
GROUP = Group(rank=0, size=1, device=torch.device("cpu"))

SPEAKERS = ["ANNA", "BERT", "ZOË"]
SAID = ["good  morrow, my lord", "the sea is cold", "what news?\n  none", "ay — and no"]


def running_text(num_speeches: int = 400, seed: int = 5) -> str:
    """Return speeches with line breaks, double spaces, and characters of two and three bytes."""
    chance = random.Random(seed)
    speeches = (f"{chance.choice(SPEAKERS)}:\n{chance.choice(SAID)}.\n\n" for _ in range(num_speeches))
    return "".join(speeches)


def language_recipe(folder: Path, *, vocab_size: int = 257, **train: object) -> LanguageModelRecipe:
    """Write the text in two files and return a recipe for it."""
    text = running_text()
    files = []
    for name, part in (("first.txt", text[:5001].encode()), ("second.txt", text[5001:].encode())):
        (folder / name).write_bytes(part)
        files.append(dict(path=name, sha256=hashlib.sha256(part).hexdigest()))
    return LanguageModelRecipe.model_validate(
        dict(
            name="speeches",
            task="language-model",
            vocab_size=vocab_size,
            data=dict(origin="made up", licence="CC0", attribution="nobody", text=files, split=[0.8, 0.1, 0.1]),
            model=MODEL,
            train={**SETTINGS, **train},
        )
    )


def trained_language_model(folder: Path, run: str, **settings: object) -> Path:
    """Train a language model on the text and return its checkpoint."""
    vocab_size = settings.pop("vocab_size", 257)
    assert isinstance(vocab_size, int)
    averaged = Trainer(language_recipe(folder, vocab_size=vocab_size, **settings), folder, folder / run, GROUP).run()
    assert averaged is not None
    return averaged
