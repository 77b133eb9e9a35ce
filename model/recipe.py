"""A recipe: one TOML file that says which public data, which model and which training make a checkpoint.

Owns reading and validating it. The data itself is read in data.py.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from antiphon.model.config import ModelConfig

RECIPES = Path(__file__).parent / "recipes"


class RecipeError(Exception):
    """A recipe or its data cannot be used; the message names the file or field."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataFile(_Strict):
    """One file of the data folder: its path there and its SHA-256 (hex)."""

    path: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class DataConfig(_Strict):
    """Where sentence pairs come from.

    pairs: one file of source<TAB>target lines, split by `held_out_rule` of data.py; or
    train, valid, test: two aligned files each, source first.
    preprocess "moses-lower": normalise punctuation, tokenise and lower-case with Moses rules, as published
    Multi30k figures do; the model then speaks tokenised text.
    """

    origin: str
    licence: str
    attribution: str
    pairs: DataFile | None = None
    train: tuple[DataFile, DataFile] | None = None
    valid: tuple[DataFile, DataFile] | None = None
    test: tuple[DataFile, DataFile] | None = None
    preprocess: Literal["none", "moses-lower"] = "none"
    source_language: str
    target_language: str


class TrainConfig(_Strict):
    """Optimisation, after section 5 of Vaswani et al. 2017 unless said otherwise.

    batch_tokens: most target tokens in a batch, padding included.
    peak_lr: learning rate at the end of warm-up; None is the paper's d_model^-0.5 * warmup_steps^-0.5.
    cooldown_steps: the last steps before max_steps, over which the rate falls linearly to zero (Zhai et al. 2022,
        section 3.3); 0 keeps the paper's schedule to the end.
    """

    batch_tokens: int = Field(default=4096, ge=64)
    max_steps: int = Field(default=100_000, ge=1)
    max_epochs: int = Field(default=1000, ge=1)
    warmup_steps: int = Field(default=4000, ge=1)
    peak_lr: float | None = Field(default=None, gt=0)
    cooldown_steps: int = Field(default=0, ge=0)
    adam_beta2: float = Field(default=0.98, gt=0, lt=1)
    adam_epsilon: float = Field(default=1e-9, gt=0)
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    clip_norm: float = Field(default=1.0, gt=0)
    bf16: bool = True
    gradient_checkpointing: bool = False
    checkpoint_every_steps: int = Field(default=500, ge=1)
    average_last: int = Field(default=5, ge=1)
    patience: int = Field(default=10, ge=1, description="Validations without a better loss before stopping.")
    seed: int = 1


class Recipe(_Strict):
    """Contents of a recipe file. `model` is a ModelConfig without vocab_size, which the tokenizer decides."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: DataConfig
    vocab_size: int = Field(ge=300, le=250_000)
    model: dict[str, object]
    train: TrainConfig

    def model_config_for(self, vocab_size: int) -> ModelConfig:
        """The network's configuration once the vocabulary is known."""
        return ModelConfig.model_validate({**self.model, "vocab_size": vocab_size})


def load_recipe(name_or_path: str) -> Recipe:
    """Read a recipe by path, or by the name of one that comes with the package. Raises RecipeError."""
    path = Path(name_or_path)
    if not path.suffix:
        path = RECIPES / f"{name_or_path}.toml"
    try:
        recipe = Recipe.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        architecture = recipe.model_config_for(recipe.vocab_size).architecture
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.toml")))
        raise RecipeError(f"recipe {name_or_path!r} not found; recipes that come with Antiphon: {known}") from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "recipe"
        raise RecipeError(f"{path}: {field}: {first['msg']}") from None
    if architecture != "encoder-decoder":
        raise RecipeError(f"{path}: model.architecture is {architecture!r}; only encoder-decoder models are trained")
    return recipe
