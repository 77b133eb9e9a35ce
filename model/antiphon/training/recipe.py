"""Recipes: TOML files that describe the public data, the model and the training of a checkpoint.

A data section names files with their SHA-256, origin and licence, for each kind of task; corpus.py reads them.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError, model_validator

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import HeadConfig
from antiphon.errors import RecipeError
from antiphon.text.subwords import CLS_ID, PAD_ID, SEP_ID, SMALLEST_EXACT_VOCABULARY, UNK_ID


class Strict(BaseModel):
    """Base of the sections of a recipe: unknown fields are refused, and nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataFile(Strict):
    """One file of the data folder: its path in the folder and its SHA-256 (hex)."""

    path: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class TextFile(DataFile):
    """A file of texts and its format.

    format
        lines   one text a line; for `ordered` data one sentence a line and a blank line between documents
        tsv     text<TAB>label; pre-training uses only the first column
        snips   JSON with the name of one intent and its texts in chunks, as published in sonos/nlu-benchmark
        json    JSON object whose `key` has a list of [text, label], as published in clinc/oos-eval
        conll   word<TAB>tag with BIO tags, and a blank line between sentences
    """

    format: Literal["lines", "tsv", "snips", "json", "conll"] = "lines"
    key: str | None = None
    encoding: Literal["utf-8", "latin-1"] = "utf-8"

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if (self.key is None) == (self.format == "json"):
            raise ValueError(
                f"key={self.key!r} does not fit format={self.format!r}; format 'json' needs it, others none"
            )
        return self


class Origin(Strict):
    """Origin, licence and attribution of data, for the checkpoint and its bundle."""

    origin: str
    licence: str
    attribution: str


class TextData(Origin):
    """Data for pre-training an encoder.

    ordered: documents; their consecutive sentences form next-sentence pairs.
    sentences: single texts, used only for masked tokens.
    """

    ordered: tuple[TextFile, ...] = ()
    sentences: tuple[TextFile, ...] = ()


class LabelledData(Origin):
    """Data for fine-tuning an encoder; without `valid`, a hash of the text selects one text in twenty of `train`.

    max_train_examples: number of texts that are learned; None: all of the training part. See fine_tune.py.
    """

    train: tuple[TextFile, ...] = Field(min_length=1)
    valid: tuple[TextFile, ...] = ()
    test: tuple[TextFile, ...] = Field(min_length=1)
    max_train_examples: int | None = Field(default=None, ge=1)


class RunningText(Origin):
    """Data for a language model: files in UTF-8, which are one text in the order of the list.

    split: shares of the text's characters for training, validation and test, in this order from the beginning. With
        two shares the validation part is also the test part.
    """

    text: tuple[DataFile, ...] = Field(min_length=1)
    split: tuple[float, ...] = Field(min_length=2, max_length=3)

    @model_validator(mode="after")
    def _check_split(self) -> Self:
        if min(self.split) <= 0 or not math.isclose(sum(self.split), 1):
            raise ValueError(f"split={list(self.split)}; its shares must be above 0, and their sum 1")
        return self


class Collection(DataFile, Origin):
    """Sentence pairs of one origin: a file of source<TAB>target lines.

    repeat: times that a pair occurs in an epoch, 1.0 by default; of a fraction each epoch draws other pairs.
    in_order: True: consecutive pairs were consecutive in a text.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")
    repeat: float = Field(default=1.0, gt=0, le=100)
    in_order: bool = False


class DataConfig(Origin):
    """Data for training a translation model: sentence pairs.

    pairs: one file of source<TAB>target lines, split by `held_out_rule` of corpus.py; or
    collections: several such files, each split by that rule; origin, licence and attribution are then theirs; or
    train, valid, test: two aligned files each, source first.
    preprocess: "moses-lower": normalise punctuation, tokenise and lower-case with Moses rules, as published Multi30k
        results do; the model's texts are then tokenised text.
    reverse_of: name or path of a recipe whose data these are, with source and target exchanged; recipe.py fills in the
        other fields. Every part has the same pairs as there.
    """

    pairs: DataFile | None = None
    collections: tuple[Collection, ...] = ()
    train: tuple[DataFile, DataFile] | None = None
    valid: tuple[DataFile, DataFile] | None = None
    test: tuple[DataFile, DataFile] | None = None
    preprocess: Literal["none", "moses-lower"] = "none"
    source_language: str
    target_language: str
    reverse_of: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_origin(cls, raw: object) -> object:
        """Put together origin, licence and attribution of the collections."""
        if not isinstance(raw, dict) or not isinstance(raw.get("collections"), list):
            return raw
        rows = [row for row in raw["collections"] if isinstance(row, dict)]
        licences = dict.fromkeys(str(row.get("licence")) for row in rows)
        joined = {
            "origin": f"{len(rows)} collections of sentence pairs",
            "licence": "; ".join(licences),
            "attribution": "\n".join(
                f"- {row.get('name')}: {row.get('origin')}. {row.get('licence')}. {row.get('attribution')}"
                for row in rows
            ),
        }
        return {**joined, **raw}

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [collection.name for collection in self.collections]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"collections: the name {twice[0]!r} occurs more than once")
        return self


RECIPES = Path(__file__).parent / "recipes"
_WORD_PIECE_IDS = dict(pad_id=PAD_ID, bos_id=CLS_ID, eos_id=SEP_ID, unk_id=UNK_ID)


class MaskingConfig(Strict):
    """Settings of masked-language modelling (Devlin et al. 2019, section 3.1 and appendix A.1).

    rate: share of a text's tokens that are predicted.
    masked, random: shares of the predicted tokens that become the mask token or a random token; the rest do not change.
    copies: number of masks and of random pairs that a text gets, one an epoch, in turns (static masking; BERT had 10);
        None: new ones in every epoch (dynamic masking, Liu et al. 2019, section 4.1).
    """

    rate: float = Field(default=0.15, gt=0, le=1)
    masked: float = Field(default=0.8, ge=0, le=1)
    random: float = Field(default=0.1, ge=0, le=1)
    copies: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if self.masked + self.random > 1:
            raise ValueError(f"masked={self.masked} and random={self.random}; their sum must be at most 1")
        return self


class Distillation(Strict):
    """Weights of the loss of a student beside its teacher (Sanh et al. 2019, section 2); a weight of 0 leaves one out.

    temperature: divides the logits of both models before their cross entropy.
    soft: cross entropy with the teacher's distribution. labels: cross entropy with the masked tokens.
    cosine: distance of the directions of both models' states.
    """

    temperature: float = Field(default=2.0, gt=0)
    soft: float = Field(default=5.0, ge=0)
    labels: float = Field(default=2.0, ge=0)
    cosine: float = Field(default=1.0, ge=0)

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if not (self.soft or self.labels or self.cosine):
            raise ValueError("soft, labels and cosine are all 0; one of them must be above 0")
        return self


class Augmentation(Strict):
    """Changes of training pairs, drawn anew in each epoch; each is the share of pairs, or of tokens, that are changed.

    lower_case: the source in lower case.
    no_full_stop: both sides without their full stop at the end.
    joined: two pairs as one; neighbours where the collection is in order, otherwise any two of a collection.
    split_tokens: tokens replaced by the two tokens from which BPE merged them, again and again, as in BPE-dropout
        (Provilkov et al. 2020), which leaves out merges with this probability.
    """

    lower_case: float = Field(default=0.0, ge=0, le=1)
    no_full_stop: float = Field(default=0.0, ge=0, le=1)
    joined: float = Field(default=0.0, ge=0, le=1)
    split_tokens: float = Field(default=0.0, ge=0, lt=1)


class TrainConfig(Strict):
    """Settings of the optimisation, as in section 5 of Vaswani et al. 2017 unless a field names another paper.

    batch_tokens: maximum number of target tokens in a batch, padding included.
    optimizer: "adamw" (Loshchilov and Hutter 2019), or "muon" for the matrices of the layers, see optimizer.py.
    peak_lr: learning rate at the end of warm-up; None: the paper's d_model^-0.5 * warmup_steps^-0.5.
    min_steps: number of steps that max_epochs does not shorten, for a few examples.
    schedule: learning rate after warm-up: the paper's inverse square root, or linear to zero (Devlin et al. 2019).
    weight_decay: for matrices, decoupled from the gradient (Loshchilov and Hutter 2019).
    cooldown_steps: number of last steps in which the rate falls linearly to zero (Zhai et al. 2022, section 3.3);
        0: no cool-down.
    bf16: matrix products in bfloat16, where the device has them in hardware; elsewhere they are slower than float32.
    """

    batch_tokens: int = Field(default=4096, ge=64)
    optimizer: Literal["adamw", "muon"] = "adamw"
    max_steps: int = Field(default=100_000, ge=1)
    max_epochs: int = Field(default=1000, ge=1)
    min_steps: int = Field(default=0, ge=0)
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


class _Named(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    train: TrainConfig


class Recipe(_Named):
    """Recipe of a translation model. `model`: fields of ModelConfig without vocab_size, which the tokenizer decides."""

    task: Literal["translate"] = "translate"
    data: DataConfig
    vocab_size: int = Field(ge=300, le=250_000)
    model: dict[str, object]
    augmentation: Augmentation = Augmentation()

    def model_config_for(self, vocab_size: int) -> ModelConfig:
        """Return the ModelConfig for this vocabulary size."""
        return ModelConfig.model_validate({**self.model, "vocab_size": vocab_size})

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        _check_architecture(self.model_config_for(self.vocab_size), "encoder-decoder", self.task)
        return self


class PretrainRecipe(_Named):
    """Recipe of an encoder that is pre-trained on masked tokens, and with ordered data also on next-sentence pairs.

    next_sentences: False: ordered documents become texts of consecutive sentences, without pairs.
    distillation: the model learns from a teacher, see distill.py; None: from the texts alone.
    tokenizer: vocabulary to learn: "byte_bpe", or BERT's "word_piece", which removes upper case and accents.
    model: as in Recipe, without heads, which the task decides.
    neighbour_start: heads begin by looking at neighbours of each token, see transformer/neighbour_start.py.
    """

    task: Literal["pretrain"]
    data: TextData
    tokenizer: Literal["byte_bpe", "word_piece"] = "byte_bpe"
    vocab_size: int = Field(ge=300, le=250_000)
    model: dict[str, object]
    masking: MaskingConfig = MaskingConfig()
    neighbour_start: bool = False
    next_sentences: bool = True
    distillation: Distillation | None = None

    @property
    def has_pairs(self) -> bool:
        """True if the model learns next-sentence pairs."""
        return self.next_sentences and bool(self.data.ordered)

    def model_config_for(self, vocab_size: int, heads: Sequence[HeadConfig] = ()) -> ModelConfig:
        """Return the ModelConfig for this vocabulary size and these heads."""
        ids = _WORD_PIECE_IDS if self.tokenizer == "word_piece" else {}
        return ModelConfig.model_validate({**self.model, **ids, "vocab_size": vocab_size, "heads": tuple(heads)})

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        config = self.model_config_for(self.vocab_size)
        _check_architecture(config, "encoder", self.task)
        if self.has_pairs and config.token_types < 2:
            raise ValueError(f"model.token_types={config.token_types} must be at least 2 for next-sentence pairs")
        width = config.resolved_embedding_width
        if self.neighbour_start and (config.positions != "learned" or width % 2):
            raise ValueError(
                "neighbour_start needs model.positions='learned' of an even width, "
                f"not {config.positions!r} of width {width}"
            )
        if not (self.data.ordered or self.data.sentences):
            raise ValueError("data: ordered and sentences are both empty; give files in at least one of them")
        if self.distillation is not None and self.has_pairs:
            raise ValueError("next_sentences must be false with distillation: a student learns masked tokens only")
        return self


class FineTuneRecipe(_Named):
    """Recipe of a new head on a trained encoder: labels of texts (classify) or of words (tag).

    dropout: of the encoder while it is fine-tuned; None: as in pre-training.
    """

    task: Literal["classify", "tag"]
    data: LabelledData
    freeze_encoder: bool = False
    dropout: float | None = Field(default=None, ge=0, lt=1)


class LanguageModelRecipe(_Named):
    """Recipe of a decoder-only model that learns the next token of running text.

    vocab_size: entries of the byte-level BPE; 257: no merges, each token is a byte.
    model: as in Recipe. model.max_target_len is the length of a window of text, whose first token is given.
    """

    task: Literal["language-model"]
    data: RunningText
    vocab_size: int = Field(ge=SMALLEST_EXACT_VOCABULARY, le=250_000)
    model: dict[str, object]

    def model_config_for(self, vocab_size: int, **ids: int) -> ModelConfig:
        """Return the ModelConfig for this vocabulary size. ids: pad_id, bos_id, eos_id and unk_id."""
        return ModelConfig.model_validate({**self.model, "vocab_size": vocab_size, **ids})

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        config = self.model_config_for(self.vocab_size)
        _check_architecture(config, "decoder", self.task)
        if config.max_target_len < 2:
            raise ValueError(f"model.max_target_len={config.max_target_len} must be at least 2: the first is given")
        return self


AnyRecipe = Recipe | PretrainRecipe | FineTuneRecipe | LanguageModelRecipe


def _check_architecture(config: ModelConfig, expected: str, task: str) -> None:
    if config.architecture != expected:
        raise ValueError(f"model.architecture is {config.architecture!r}; task {task!r} trains {expected!r} models")


def _kind(raw: object) -> str:
    task = raw.get("task", "translate") if isinstance(raw, dict) else getattr(raw, "task", None)
    return {"classify": "fine-tune", "tag": "fine-tune"}.get(str(task), str(task))


_ANY_RECIPE: TypeAdapter[AnyRecipe] = TypeAdapter(
    Annotated[
        Annotated[Recipe, Tag("translate")]
        | Annotated[PretrainRecipe, Tag("pretrain")]
        | Annotated[FineTuneRecipe, Tag("fine-tune")]
        | Annotated[LanguageModelRecipe, Tag("language-model")],
        Discriminator(
            _kind,
            custom_error_type="task",
            custom_error_message="task must be translate (the default), pretrain, classify, tag or language-model",
        ),
    ]
)


def load_any_recipe(name_or_path: str) -> AnyRecipe:
    """Read a recipe by its path, or by its name if it is part of the package. Raises RecipeError naming the file."""
    raw = _read(name_or_path)
    if _kind(raw) == "translate":
        raw = _with_reversed_data(raw, name_or_path)
    try:
        return _ANY_RECIPE.validate_python(raw)
    except ValidationError as error:
        raise RecipeError(f"{_path(name_or_path)}: {_described(error)}") from None


def _path(name_or_path: str) -> Path:
    path = Path(name_or_path)
    return path if path.suffix else RECIPES / f"{name_or_path}.toml"


def _read(name_or_path: str) -> dict[str, Any]:
    path = _path(name_or_path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.toml")))
        raise RecipeError(f"recipe {name_or_path!r} not found; recipes that come with Antiphon: {known}") from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from None


def _with_reversed_data(raw: dict[str, Any], name_or_path: str) -> dict[str, Any]:
    """Return a recipe with the data of the one that data.reverse_of names, languages exchanged; others unchanged."""
    data = raw.get("data")
    if not isinstance(data, dict) or not isinstance(name := data.get("reverse_of"), str):
        return raw
    of_first = _read(name).get("data")
    if isinstance(of_first, dict) and "reverse_of" in of_first:
        raise RecipeError(
            f"{_path(name_or_path)}: data.reverse_of is {name!r}, whose data are the reverse of another recipe's"
        )
    first = load_recipe(name).data
    exchanged = {"source_language": first.target_language, "target_language": first.source_language}
    return {**raw, "data": first.model_dump(mode="json", exclude_none=True) | exchanged | data}


def _described(error: ValidationError) -> str:
    """Return the first error: the field, without the name of the recipe's kind, and the reason."""
    first = error.errors()[0]
    kinds = ("translate", "pretrain", "fine-tune", "language-model")
    field = ".".join(str(part) for part in first["loc"] if part not in kinds)
    return ": ".join(filter(None, (field, first["msg"].removeprefix("Value error, "))))


def load_recipe(name_or_path: str) -> Recipe:
    """Read a recipe of a translation model. Raises RecipeError, also for a recipe of another task."""
    recipe = load_any_recipe(name_or_path)
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"recipe {recipe.name!r}: task is {recipe.task!r}; it must be 'translate' for sentence pairs")
    return recipe
