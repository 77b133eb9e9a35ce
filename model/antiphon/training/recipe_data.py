"""Data sections of recipes: files with their SHA-256, origin and licence, for each kind of task.

corpus.py, text_files.py and running_text.py read the files.
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


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

    max_train_examples: number of texts that are learned; None: all of the training part. See few_examples.py.
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


class DataConfig(Strict):
    """Data for training a translation model: sentence pairs.

    pairs: one file of source<TAB>target lines, split by `held_out_rule` of corpus.py; or
    collections: several such files, each split by that rule; origin, licence and attribution are then theirs; or
    train, valid, test: two aligned files each, source first.
    preprocess: "moses-lower": normalise punctuation, tokenise and lower-case with Moses rules, as published Multi30k
        results do; the model's texts are then tokenised text.
    reverse_of: name or path of a recipe whose data these are, with source and target exchanged; recipe.py fills in the
        other fields. Every part has the same pairs as there.
    """

    origin: str
    licence: str
    attribution: str
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
