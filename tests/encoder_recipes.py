"""An artificial language of commands, and recipes that train an encoder on it in seconds."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import torch

from antiphon.training.recipe import FineTuneRecipe, PretrainRecipe
from antiphon.training.task import Group
from antiphon.training.trainer import Trainer

VERBS = {"play": "music", "book": "table", "check": "weather"}
PLACES = ["rome", "oslo", "lima"]
NAMES = ["anna", "bert", "cleo"]
FILLERS = ["please", "now", "today", "again"]

SETTINGS = dict(
    batch_tokens=256, max_steps=30, warmup_steps=5, peak_lr=5e-3, schedule="linear", bf16=False, label_smoothing=0.0,
    checkpoint_every_steps=10, average_last=1, weight_decay=0.01,
)  # fmt: skip
MODEL = dict(
    architecture="encoder", d_model=32, encoder_layers=2, decoder_layers=0, num_heads=4, d_ff=64, norm_placement="pre",
    activation="gelu", positions="learned", scale_embeddings=False, embedding_norm=True, token_types=2,
    max_source_len=32, dropout=0.1,
)  # fmt: skip
GROUP = Group(rank=0, size=1, device=torch.device("cpu"))


def command(chance: random.Random) -> tuple[str, str, list[str]]:
    """Return a text, its intent and the tags of its words."""
    verb = chance.choice(list(VERBS))
    words = [verb, VERBS[verb], *chance.sample(FILLERS, chance.randint(0, 2)), "in", chance.choice(PLACES)]
    tags = [*["O"] * (len(words) - 1), "B-place"]
    if chance.random() < 0.5:
        words += ["for", *(found := chance.sample(NAMES, 2))]
        tags += ["O", "B-person", "I-person"]
        assert len(found) == 2
    return " ".join(words), verb, tags


def _file(folder: Path, name: str, content: str, file_format: str) -> dict[str, str]:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return dict(path=name, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), format=file_format)


def commands(count: int, seed: int) -> list[tuple[str, str, list[str]]]:
    """Return different commands."""
    chance = random.Random(seed)
    return list({text: (text, intent, tags) for text, intent, tags in (command(chance) for _ in range(count))}.values())


def pretrain_recipe(folder: Path, tokenizer: str = "byte_bpe", **train: object) -> PretrainRecipe:
    """Write a recipe for masked tokens. Documents have two halves with one verb each, so the order is learnable."""
    texts = [text for text, _, _ in commands(400, seed=1)]
    chance = random.Random(2)
    documents = []
    for _ in range(300):
        verb = chance.choice(list(VERBS))
        documents.append("\n".join(chance.choice([t for t in texts if t.startswith(verb)]) for _ in range(2)))
    return PretrainRecipe.model_validate(
        dict(
            name="commands",
            task="pretrain",
            tokenizer=tokenizer,
            vocab_size=330,
            data=dict(
                origin="made up",
                licence="CC0",
                attribution="nobody",
                ordered=[_file(folder, "ordered.txt", "\n\n".join(documents) + "\n", "lines")],
                sentences=[_file(folder, "texts.txt", "\n".join(texts) + "\n", "lines")],
            ),
            model=MODEL,
            train={**SETTINGS, **train},
        )
    )


def fine_tune_recipe(folder: Path, task: str, **train: object) -> FineTuneRecipe:
    """Write a recipe for the intents of commands, or for the places and persons in them."""

    def written(name: str, seed: int, count: int) -> dict[str, str]:
        made = commands(count, seed)
        if task == "classify":
            return _file(folder, name, "".join(f"{text}\t{intent}\n" for text, intent, _ in made), "tsv")
        lines = ("".join(f"{w}\t{t}\n" for w, t in zip(text.split(), tags, strict=True)) for text, _, tags in made)
        return _file(folder, name, "\n".join(lines), "conll")

    return FineTuneRecipe.model_validate(
        dict(
            name=f"commands-{task}",
            task=task,
            data=dict(
                origin="made up too",
                licence="CC0",
                attribution="nobody",
                train=[written(f"{task}.train", 3, 300)],
                test=[written(f"{task}.test", 4, 60)],
            ),
            train={**SETTINGS, **train},
        )
    )


def pretrained(folder: Path, tokenizer: str = "byte_bpe", **train: object) -> Path:
    """Train an encoder on the language and return its checkpoint."""
    averaged = Trainer(pretrain_recipe(folder, tokenizer, **train), folder, folder / "pretrained", GROUP).run()
    assert averaged is not None
    return averaged
