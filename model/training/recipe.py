"""A recipe: one TOML file that says which public data, which model and which training make a checkpoint.

Owns reading and validating it. The data itself is read in corpus.py and text_files.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from antiphon.model.config import ModelConfig
from antiphon.model.head_config import HeadConfig

RECIPES = Path(__file__).parent / "recipes"


class RecipeError(Exception):
    """A recipe or its data cannot be used; the message names the file or field."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataFile(_Strict):
    """One file of the data folder: its path there and its SHA-256 (hex)."""

    path: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class TextFile(DataFile):
    """A file of texts, and how text_files.py reads it.

    format
        lines   one text a line; as `ordered` text a sentence a line and a blank line between documents
        tsv     text<TAB>label; without labels the first column
        snips   JSON of one intent: its name, then texts in chunks, as sonos/nlu-benchmark publishes
        conll   word<TAB>tag, a blank line between sentences, tags in BIO
    """

    format: Literal["lines", "tsv", "snips", "conll"] = "lines"
    encoding: Literal["utf-8", "latin-1"] = "utf-8"


class _Origin(_Strict):
    origin: str
    licence: str
    attribution: str


class TextData(_Origin):
    """What an encoder is pre-trained on.

    ordered: documents, whose neighbouring sentences make next-sentence pairs.
    sentences: texts that stand alone; only masked tokens are learned from them.
    """

    ordered: tuple[TextFile, ...] = ()
    sentences: tuple[TextFile, ...] = ()


class LabelledData(_Origin):
    """What an encoder is fine-tuned on; without `valid`, a hash of each text holds out one of twenty of `train`."""

    train: tuple[TextFile, ...] = Field(min_length=1)
    valid: tuple[TextFile, ...] = ()
    test: tuple[TextFile, ...] = Field(min_length=1)


class MaskingConfig(_Strict):
    """Which tokens a masked-language model predicts (Devlin et al. 2019, section 3.1 and appendix A.1).

    rate: share of a text's tokens that are predicted. Of these `masked` become the mask token, `random` another token,
    and the rest stay.
    """

    rate: float = Field(default=0.15, gt=0, le=1)
    masked: float = Field(default=0.8, ge=0, le=1)
    random: float = Field(default=0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if self.masked + self.random > 1:
            raise ValueError(f"masked={self.masked} and random={self.random} must not add up to more than 1")
        return self


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
    schedule: what follows warm-up: the paper's inverse square root, or a line to zero at the end (Devlin et al. 2019).
    weight_decay: of matrices, decoupled from the gradient (Loshchilov and Hutter 2019).
    cooldown_steps: the last steps before max_steps, over which the rate falls linearly to zero (Zhai et al. 2022,
        section 3.3); 0 keeps the paper's schedule to the end.
    """

    batch_tokens: int = Field(default=4096, ge=64)
    max_steps: int = Field(default=100_000, ge=1)
    max_epochs: int = Field(default=1000, ge=1)
    warmup_steps: int = Field(default=4000, ge=1)
    peak_lr: float | None = Field(default=None, gt=0)
    schedule: Literal["inverse_sqrt", "linear"] = "inverse_sqrt"
    weight_decay: float = Field(default=0.0, ge=0, lt=1)
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


class _Named(_Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    train: TrainConfig


class Recipe(_Named):
    """A translation model. `model` is a ModelConfig without vocab_size, which the tokenizer decides."""

    task: Literal["translate"] = "translate"
    data: DataConfig
    vocab_size: int = Field(ge=300, le=250_000)
    model: dict[str, object]

    def model_config_for(self, vocab_size: int) -> ModelConfig:
        """The network's configuration once the vocabulary is known."""
        return ModelConfig.model_validate({**self.model, "vocab_size": vocab_size})

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        _check_architecture(self.model_config_for(self.vocab_size), "encoder-decoder", self.task)
        return self


class PretrainRecipe(_Named):
    """An encoder that learns from plain text: masked tokens, and next-sentence pairs where there is ordered text.

    `model` as in Recipe, without heads, which follow from the task.
    """

    task: Literal["pretrain"]
    data: TextData
    vocab_size: int = Field(ge=300, le=250_000)
    model: dict[str, object]
    masking: MaskingConfig = MaskingConfig()

    def model_config_for(self, vocab_size: int, heads: Sequence[HeadConfig] = ()) -> ModelConfig:
        """The network's configuration once vocabulary and heads are known."""
        return ModelConfig.model_validate({**self.model, "vocab_size": vocab_size, "heads": tuple(heads)})

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        config = self.model_config_for(self.vocab_size)
        _check_architecture(config, "encoder", self.task)
        if self.data.ordered and config.token_types < 2:
            raise ValueError(f"model.token_types={config.token_types} must be at least 2 for next-sentence pairs")
        if not (self.data.ordered or self.data.sentences):
            raise ValueError("data: name files under ordered, sentences or both")
        return self


class FineTuneRecipe(_Named):
    """A head on an encoder that is trained already: labels of texts (classify) or of words (tag)."""

    task: Literal["classify", "tag"]
    data: LabelledData
    freeze_encoder: bool = False


AnyRecipe = Recipe | PretrainRecipe | FineTuneRecipe


def _check_architecture(config: ModelConfig, wanted: str, task: str) -> None:
    if config.architecture != wanted:
        raise ValueError(f"model.architecture is {config.architecture!r}; task {task!r} trains {wanted!r} models")


def _kind(raw: object) -> str:
    task = raw.get("task", "translate") if isinstance(raw, dict) else getattr(raw, "task", None)
    return {"classify": "fine-tune", "tag": "fine-tune"}.get(str(task), str(task))


_ANY_RECIPE: TypeAdapter[AnyRecipe] = TypeAdapter(
    Annotated[
        Annotated[Recipe, Tag("translate")]
        | Annotated[PretrainRecipe, Tag("pretrain")]
        | Annotated[FineTuneRecipe, Tag("fine-tune")],
        Discriminator(
            _kind,
            custom_error_type="task",
            custom_error_message="task must be translate (the default), pretrain, classify or tag",
        ),
    ]
)


def load_any_recipe(name_or_path: str) -> AnyRecipe:
    """Read a recipe by path, or by the name of one that comes with the package. Raises RecipeError."""
    path = Path(name_or_path)
    if not path.suffix:
        path = RECIPES / f"{name_or_path}.toml"
    try:
        return _ANY_RECIPE.validate_python(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.toml")))
        raise RecipeError(f"recipe {name_or_path!r} not found; recipes that come with Antiphon: {known}") from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from None
    except ValidationError as error:
        raise RecipeError(f"{path}: {_described(error)}") from None


def _described(error: ValidationError) -> str:
    """The first complaint: its field without the name of the kind of recipe, then what is wrong."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part not in ("translate", "pretrain", "fine-tune"))
    return ": ".join(filter(None, (field, first["msg"].removeprefix("Value error, "))))


def load_recipe(name_or_path: str) -> Recipe:
    """Read a recipe of a translation model. Raises RecipeError."""
    recipe = load_any_recipe(name_or_path)
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"recipe {recipe.name!r}: task is {recipe.task!r}; sentence pairs come from 'translate' only")
    return recipe
