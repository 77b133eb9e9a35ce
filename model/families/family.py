"""What a family of public checkpoints is, and the search for the one that a config.json belongs to.

A family is described by three functions: config.json to ModelConfig, source tensors into our model, files and special
tokens to TextFormat. It neither reads weights files nor writes anything: source_weights.py and importer.py do.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from antiphon.model import families
from antiphon.model.config import ModelConfig
from antiphon.model.source_weights import SourceError, SourceWeights
from antiphon.model.text_format import TextFormat
from antiphon.model.transformer import Transformer

Settings = Mapping[str, Any]


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
    reference: the class of transformers that runs the original, where config.json names no architecture.
    """

    name: str
    model_types: tuple[str, ...]
    configure: Callable[[Settings], ModelConfig]
    load: Callable[[Transformer, SourceWeights, Settings], None]
    text: Callable[[Path, Settings, ModelConfig], TextFormat]
    reference: str


@cache
def all_families() -> tuple[Family, ...]:
    """Every FAMILY of this package's modules, by name."""
    modules = (importlib.import_module(f"{families.__name__}.{found.name}") for found in _modules())
    return tuple(sorted((module.FAMILY for module in modules if hasattr(module, "FAMILY")), key=lambda f: f.name))


def _modules() -> list[pkgutil.ModuleInfo]:
    return list(pkgutil.iter_modules(families.__path__))


def family_of(settings: Settings) -> Family:
    """The family that config.json's model_type names. Raises SourceError with those there are."""
    model_type = settings.get("model_type")
    for family in all_families():
        if model_type in family.model_types:
            return family
    known = ", ".join(f"{family.name} ({', '.join(family.model_types)})" for family in all_families())
    raise SourceError(f"config.json: model_type is {model_type!r}, which is none of the known families: {known}")
