"""What a family of public checkpoints is, and the search for the one that a config.json belongs to.

A family is described by three functions: config.json to ModelConfig, source tensors into our model, files and special
tokens to TextFormat. It neither reads weights files nor writes anything: source_weights.py and importer.py do.
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

from antiphon.model.checkpoints import families
from antiphon.model.checkpoints.source_weights import SourceError, SourceWeights, open_weights
from antiphon.model.config import ModelConfig
from antiphon.model.text.format import TextFormat
from antiphon.model.transformer.transformer import Transformer

Settings = Mapping[str, Any]


def read_config(folder: Path) -> Settings:
    """What config.json says. Raises SourceError naming it."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SourceError(f"{folder} has no config.json, which says what the model is") from None
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise SourceError(f"{path} is not a JSON object")
    return settings


class OpenWeights(Protocol):
    """source_weights.open_weights, or a family's own way to the tensors of a directory."""

    def __call__(self, folder: Path, *, on_meta: bool = False) -> SourceWeights:
        """The tensors; with on_meta their shapes alone. Raises SourceError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One family.

    name: as users know it, "Marian".
    model_types: what `model_type` in config.json may be.
    configure: settings of config.json -> our description. Raises SourceError naming the setting.
    load: fills our model from source tensors by `weights.fill`. It runs twice: first with every tensor on torch's meta
        device, to compare names and shapes before anything is read; so it may look at no numbers but through the
        methods of SourceWeights.
    text: the checkpoint's folder, its settings and our description -> how its texts become ids.
    reference: the class of transformers that runs the original, where config.json names no architecture; "" where
        transformers does not.
    settle: the settings, with what only the tensors can tell put in before anything else reads them: whether an
        output is tied, say, which config.json gets wrong.

    Of a format that is not transformers' own:
    recognises: whether a directory is one, whatever its config.json says, if it has one at all.
    read_settings, open_weights: what config.json and the files of tensors give otherwise.
    write_text: writes into a folder the files of `text` that the checkpoint's directory holds in another form.
    """

    name: str
    model_types: tuple[str, ...]
    configure: Callable[[Settings], ModelConfig]
    load: Callable[[Transformer, SourceWeights, Settings], None]
    text: Callable[[Path, Settings, ModelConfig], TextFormat]
    reference: str = ""
    settle: Callable[[Settings, SourceWeights], Settings] = lambda settings, _: settings
    recognises: Callable[[Path], bool] = lambda _: False
    read_settings: Callable[[Path], Settings] = read_config
    open_weights: OpenWeights = open_weights
    write_text: Callable[[Path, Settings, Path], None] = lambda folder, settings, to: None


@cache
def all_families() -> tuple[Family, ...]:
    """Every FAMILY of this package's modules, by name."""
    modules = (importlib.import_module(f"{families.__name__}.{found.name}") for found in _modules())
    return tuple(sorted((module.FAMILY for module in modules if hasattr(module, "FAMILY")), key=lambda f: f.name))


def _modules() -> list[pkgutil.ModuleInfo]:
    return list(pkgutil.iter_modules(families.__path__))


def family_in(folder: Path) -> Family:
    """The family of the checkpoint in a directory. Raises SourceError."""
    for family in all_families():
        if family.recognises(folder):
            return family
    return family_of(read_config(folder))


def family_of(settings: Settings) -> Family:
    """The family that config.json's model_type names. Raises SourceError with those there are."""
    model_type = settings.get("model_type")
    for family in all_families():
        if model_type in family.model_types:
            return family
    named = [family for family in all_families() if family.model_types]
    known = ", ".join(f"{family.name} ({', '.join(family.model_types)})" for family in named)
    raise SourceError(f"config.json: model_type is {model_type!r}, which is none of the known families: {known}")
