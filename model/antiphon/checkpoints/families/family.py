"""Interface of a family of public checkpoints, and the search for the family of a checkpoint.

A family has three main functions: settings of config.json to ModelConfig, tensors into our model, and tokenizer files
to TextFormat. source_weights.py reads the weight files; importer/importer.py writes the bundle.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

from torch import Tensor

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints import families, gguf_files
from antiphon.checkpoints.settings import Settings, read_json
from antiphon.checkpoints.source_weights import SourceWeights, open_weights
from antiphon.checkpoints.text_formats import tokenizers_format
from antiphon.errors import SourceError
from antiphon.text.format import TextFormat
from antiphon.transformer.transformer import Transformer


def read_config(folder: Path) -> Settings:
    """Return the settings of config.json. Raises SourceError naming the file."""
    path = folder / "config.json"
    if not path.exists():
        raise SourceError(f"{folder} has no config.json, which is needed to find the model family")
    return read_json(path)


FamilyText = Callable[[Path, Settings, ModelConfig], TextFormat]
"""Function that returns the text format of a checkpoint's directory, its settings and our ModelConfig."""


def default_text(folder: Path, _: Settings, __: ModelConfig) -> TextFormat:
    """Return the text format that tokenizer.json of the directory describes completely."""
    return tokenizers_format(folder)


class OpenWeights(Protocol):
    """Function that opens the tensors of a directory: source_weights.open_weights, or a family's own."""

    def __call__(self, folder: Path, *, on_meta: bool = False) -> SourceWeights:
        """Return the tensors; with on_meta=True only their names and shapes. Raises SourceError."""


class Original(Protocol):
    """Encoder-decoder with the formulas of the program that its files belong to, independent of our Transformer."""

    def encode(self, source: Sequence[int], /) -> Tensor:
        """Return the encoder's states [S, M] of source tokens."""

    def logits(self, memory: Tensor, target: Sequence[int], /) -> Tensor:
        """Return logits [T, V] after each target token, the begin token first; memory [S, M]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Functions and names of one family.

    name: name for users, such as "Marian".
    model_types: values of `model_type` in config.json.
    configure: returns ModelConfig for the settings of config.json. Raises SourceError naming the setting.
    load: fills our model from the checkpoint's tensors. It runs twice. In the first run all tensors are on torch's meta
        device, to compare names and shapes before data is read. So it must access values only through the methods of
        SourceWeights.
    text: returns TextFormat for the checkpoint's directory, its settings and our ModelConfig; by default that of its
        tokenizer.json.
    reference: class of transformers that runs the original if config.json names no architecture; "" if transformers
        cannot run it.
    input_first: last parts of the names of modules whose weights are [inputs, outputs], as in transformers' Conv1D; an
        adapter's change is transposed for them.
    resolve: returns the settings with corrections that only the tensors can show, before other functions get them.
        Example: whether the output is tied, which is often wrong in config.json.

    For formats other than transformers':
    recognises: returns whether a directory has this format; checked before config.json is read.
    read_settings, open_weights: replace the reading of config.json and of the weight files.
    write_text: writes the files of `text` that the checkpoint has only in another form.
    original: returns the model with the formulas of its own program, to compare with where transformers cannot run it.
    """

    name: str
    model_types: tuple[str, ...]
    configure: Callable[[Settings], ModelConfig]
    load: Callable[[Transformer, SourceWeights, Settings], None]
    text: FamilyText = default_text
    reference: str = ""
    input_first: tuple[str, ...] = ()
    resolve: Callable[[Settings, SourceWeights], Settings] = lambda settings, _: settings
    recognises: Callable[[Path], bool] = lambda _: False
    read_settings: Callable[[Path], Settings] = read_config
    open_weights: OpenWeights = open_weights
    write_text: Callable[[Path, Settings, Path], None] = lambda folder, settings, to: None
    original: Callable[[Path], Original] | None = None


@cache
def all_families() -> tuple[Family, ...]:
    """Return every family that a module of this package defines at its top level, sorted by name."""
    modules = [importlib.import_module(f"{families.__name__}.{entry.name}") for entry in _entries()]
    defined = [value for module in modules for value in vars(module).values() if isinstance(value, Family)]
    return tuple(sorted(defined, key=lambda family: family.name))


def _entries() -> list[pkgutil.ModuleInfo]:
    return list(pkgutil.iter_modules(families.__path__))


def family_in(folder: Path) -> Family:
    """Return the family of the checkpoint in a directory, or of a GGUF file.

    Raises SourceError if it is unknown.
    """
    if gguf_files.is_gguf(folder):
        family = family_of(gguf_files.read_settings(folder))
        return replace(family, read_settings=gguf_files.read_settings, open_weights=gguf_files.open_weights)
    for family in all_families():
        if family.recognises(folder):
            return family
    return family_of(read_config(folder))


def family_of(settings: Settings) -> Family:
    """Return the family for `model_type` of config.json. Raises SourceError with the list of known families."""
    model_type = settings.get("model_type")
    for family in all_families():
        if model_type in family.model_types:
            return family
    named = [family for family in all_families() if family.model_types]
    known = ", ".join(f"{family.name} ({', '.join(family.model_types)})" for family in named)
    raise SourceError(f"config.json: model_type is {model_type!r}; known families are {known}")
