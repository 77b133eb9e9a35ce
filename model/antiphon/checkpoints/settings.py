"""Typed reading of the settings of a config.json, and settings that most families share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from antiphon.architecture.config import Activation, ModelConfig
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.errors import SourceError
from antiphon.text.format import TextFormat

Settings = Mapping[str, Any]
_T = TypeVar("_T", int, float, bool, str)

# Names of transformers' ACT2FN for our activations; gelu_fast is the same function as gelu_new.
_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "silu": "silu",
    "swish": "silu",
}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file does not exist. Raises SourceError naming the file."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):  # the second: the checkpoint is a file
        return {}
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise SourceError(f"{path} is not a JSON object")
    return content


def with_class_defaults(settings: Settings) -> Settings:
    """Return the settings of a config.json as transformers resolves them: other names, defaults, derived values.

    Its configuration class for `model_type` decides; settings that the class does not know stay as they are.
    Raises SourceError with the first line of transformers' error if the class refuses them.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        resolved = CONFIG_MAPPING[str(settings["model_type"])].from_dict(dict(settings)).to_dict()
    except Exception as error:  # classes raise errors of many kinds, also of the libraries below
        raise SourceError(f"config.json: transformers refuses it: {in_one_line(error)}") from None
    return {**settings, **resolved}


def in_one_line(error: Exception) -> str:
    """Return the message of another library's error, which can have several lines, as one line."""
    return " ".join((str(error).strip() or repr(error)).split())[:500]


def token_id(settings: Settings, name: str, default: int | None) -> int:
    """Return a special token id, the first one of a list; `default` if it is absent or no id of the vocabulary.

    Checkpoints name an id outside the vocabulary, such as -1 or that of a token without a row, for a token that they do
    not use. Raises SourceError if it is no whole number, or absent without a default.
    """
    value = settings.get(name)
    first = value[0] if isinstance(value, list) and value else value
    chosen = setting({name: first}, name, int, default=default)
    is_known = 0 <= chosen < setting(settings, "vocab_size", int)
    return chosen if is_known or default is None else default


def setting(settings: Settings, name: str, kind: type[_T], default: _T | None = None) -> _T:
    """Return a setting of type `kind`; `default` if it is absent or null.

    Raises SourceError naming the setting if it has another type, or is absent without a default.
    """
    value = settings.get(name)
    if value is None:
        value = default
    if value is None:
        raise SourceError(f"config.json: {name} is missing")
    if kind is float and type(value) is int:
        return kind(value)
    if type(value) is not kind:
        raise SourceError(f"config.json: {name} is {value!r}, expected {kind.__name__}")
    return value


def activation(settings: Settings, name: str) -> Activation:
    """Return the activation that a setting names. Raises SourceError with the supported names."""
    return known_activation(setting(settings, name, str), name)


def known_activation(value: str, name: str) -> Activation:
    """Return our name of transformers' activation `value` of the setting `name`. Raises SourceError."""
    if value not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise SourceError(f"config.json: {name} is {value!r}; supported are {known}")
    return _ACTIVATIONS[value]


def is_tied(settings: Settings, weights: SourceWeights, embedding: str, output: str) -> bool:
    """Return whether the output is the embedding, as the tensors show: they are equal, or there is only the embedding.

    A missing output is a defect of the file if config.json says that it is a tensor of its own.
    """
    if output in weights:
        return not weights.differ(embedding, output)
    return setting(settings, "tie_word_embeddings", bool, default=True)


def refuse_head(settings: Settings, heads: Iterable[str]) -> None:
    """Raise SourceError if config.json names a class with a head, such as BartForQuestionAnswering, but none of these.

    heads: ends of class names. Names without "For" and "Head" and files without a class pass.
    """
    architecture = str((settings.get("architectures") or [""])[0])
    if ("For" in architecture or "Head" in architecture) and not architecture.endswith(tuple(heads)):
        raise SourceError(
            f"config.json: architectures names {architecture}, whose head is not supported; supported are "
            f"{', '.join(heads)}, and models without a head"
        )


def refuse_unless(settings: Settings, name: str, only: object, default: object) -> None:
    """Raise SourceError unless a setting has the only supported value; an absent setting has the value `default`."""
    if (value := settings.get(name, default)) != only:
        raise SourceError(f"config.json: {name} is {value!r}; only {only!r} is supported")


def refuse_unequal(settings: Settings, first: str, second: str) -> None:
    """Raise SourceError if two settings differ for which our model has only one field."""
    if settings.get(first) != settings.get(second):
        raise SourceError(
            f"config.json: {first} is {settings.get(first)!r} and {second} is {settings.get(second)!r}; "
            "only equal values are supported"
        )


def describe(**fields: Any) -> ModelConfig:
    """Return a ModelConfig with these fields. Raises SourceError naming the first invalid field."""
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "model"
        raise SourceError(f"config.json does not describe a supported model: {where}: {first['msg']}") from None


def with_default_languages(text: TextFormat, source: str, forced_id: object) -> TextFormat:
    """Return `text` with default languages: those of the files, else `source` and the language of a forced token."""
    codes = {index: code for code, index in text.languages.items()}
    target = codes.get(forced_id) if isinstance(forced_id, int) else None
    known = source if source in text.languages else None
    return text.model_copy(
        update=dict(
            default_source_language=text.default_source_language or known,
            default_target_language=text.default_target_language or target,
        )
    )
