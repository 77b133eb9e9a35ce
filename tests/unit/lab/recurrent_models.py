"""Small LSTM models, texts, toy settings and trials for the tests of model/antiphon/lab."""

import random
from pathlib import Path

import torch

from antiphon.lab.datasets import ALGORITHM_VOCAB_SIZE, Algorithm, Dataset, Sizes, algorithm_dataset
from antiphon.lab.experiment import Setting
from antiphon.lab.experiments.ablations import trials_of
from antiphon.lab.recurrent import RecurrentConfig, RecurrentModel
from antiphon.lab.trial import Trial
from antiphon.training.recipe import Recipe
from antiphon.training.task import Group

SIZES = Sizes(max_len=9, train=600, valid=40, test=40)
SHAPE = dict(d_model=32, dropout=0.1)
ALONE = Group(rank=0, size=1, device=torch.device("cpu"))


def small_lstm(**fields: object) -> RecurrentModel:
    """Return a model with random weights in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return RecurrentModel(RecurrentConfig.model_validate(dict(vocab_size=20, d_model=16) | fields)).eval()


def random_ids(count: int, length: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(4, 20) for _ in range(length)] for _ in range(count)]


def made_dataset(folder: Path, algorithm: Algorithm = "copy") -> Dataset:
    return algorithm_dataset(algorithm, folder, SIZES)


def small_recipe(folder: Path, **train: object) -> Recipe:
    """Return a recipe of the task "copy" for a small Transformer."""
    settings = dict(
        batch_tokens=128, max_steps=12, warmup_steps=5, peak_lr=5e-3, bf16=False, checkpoint_every_steps=6,
        average_last=1, label_smoothing=0.0,
    )  # fmt: skip
    model = dict(
        d_model=16, encoder_layers=1, decoder_layers=1, num_heads=2, d_ff=32, norm_placement="pre",
        max_source_len=SIZES.longest_tokens, max_target_len=SIZES.longest_tokens,
    )  # fmt: skip
    return Recipe.model_validate(
        dict(
            name="copy",
            vocab_size=ALGORITHM_VOCAB_SIZE,
            data=made_dataset(folder).data,
            model=model,
            train=settings | train,
        )
    )


def toy_setting(folder: Path, seeds: tuple[int, ...] = (1,)) -> Setting:
    return Setting(data=None, output=folder, scale=None, seeds=seeds)


def toy_trial(folder: Path, name: str = "small", seed: int = 1, **train: object) -> Trial:
    changed = {"checkpoint_every_steps": 6, **train}
    (trial,) = trials_of(toy_setting(folder, (seed,)), {name: ({}, changed)}, steps=1)
    return trial
