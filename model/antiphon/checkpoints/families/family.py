"""Interface of a family of public checkpoints, and the search for the family of a checkpoint.

A family has three main functions: settings of config.json to ModelConfig, tensors into our model, and tokenizer files
to TextFormat. source_weights.py reads the weight files; importer/importer.py writes the bundle.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints import families
from antiphon.checkpoints.source_weights import SourceWeights, open_weights
from antiphon.errors import SourceError
from antiphon.text.format import TextFormat
from antiphon.transformer.transformer import Transformer

Settings = Mapping[str, Any]


def read_config(folder: Path) -> Settings:
    """Return the settings of config.json. Raises SourceError naming the file."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SourceError(f"{folder} has no config.json, which is needed to find the model family") from None
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise SourceError(f"{path} is not a JSON object")
    return settings


class OpenWeights(Protocol):
    """Function that opens the tensors of a directory: source_weights.open_weights, or a family's own."""

    def __call__(self, folder: Path, *, on_meta: bool = False) -> SourceWeights:
        """Return the tensors; with on_meta=True only their names and shapes. Raises SourceError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Functions and names of one family.

    name: name for users, such as "Marian".
    model_types: values of `model_type` in config.json.
    configure: returns ModelConfig for the settings of config.json. Raises SourceError naming the setting.
    load: fills our model from the checkpoint's tensors. It runs twice. In the first run all tensors are on torch's meta
        device, to compare names and shapes before data is read. So it must access values only through the methods of
        SourceWeights.
    text: returns TextFormat for the checkpoint's directory, its settings and our ModelConfig.
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
    """

    name: str
    model_types: tuple[str, ...]
    configure: Callable[[Settings], ModelConfig]
    load: Callable[[Transformer, SourceWeights, Settings], None]
    text: Callable[[Path, Settings, ModelConfig], TextFormat]
    reference: str = ""
    input_first: tuple[str, ...] = ()
    resolve: Callable[[Settings, SourceWeights], Settings] = lambda settings, _: settings
    recognises: Callable[[Path], bool] = lambda _: False
    read_settings: Callable[[Path], Settings] = read_config
    open_weights: OpenWeights = open_weights
    write_text: Callable[[Path, Settings, Path], None] = lambda folder, settings, to: None


@cache
def all_families() -> tuple[Family, ...]:
    """Return the FAMILY of every module of this package, sorted by name."""
    modules = (importlib.import_module(f"{families.__name__}.{found.name}") for found in _modules())
    return tuple(sorted((module.FAMILY for module in modules if hasattr(module, "FAMILY")), key=lambda f: f.name))


def _modules() -> list[pkgutil.ModuleInfo]:
    return list(pkgutil.iter_modules(families.__path__))


def family_in(folder: Path) -> Family:
    """Return the family of the checkpoint in a directory. Raises SourceError if it is unknown."""
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
