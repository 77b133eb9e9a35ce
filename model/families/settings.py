"""Settings of a config.json, read with their types checked, and what most families' settings have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from antiphon.model.config import Activation, ModelConfig
from antiphon.model.source_weights import SourceError

Settings = Mapping[str, Any]
_T = TypeVar("_T", int, float, bool, str)

# The names of transformers' ACT2FN that mean a function of ours; gelu_fast is gelu_new in other words.
_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def setting(settings: Settings, name: str, kind: type[_T], default: _T | None = None) -> _T:
    """One setting of this type; `default` where it is absent or null. Raises SourceError naming it."""
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
    """The activation that a setting names. Raises SourceError with those there are."""
    return known_activation(setting(settings, name, str), name)


def known_activation(value: str, name: str) -> Activation:
    """Our name of transformers' activation `value`, which the setting `name` holds. Raises SourceError."""
    if value not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise SourceError(f"config.json: {name} is {value!r}; supported are {known}")
    return _ACTIVATIONS[value]


def refuse_unless(settings: Settings, name: str, only: object, default: object) -> None:
    """Raise SourceError where a setting is anything but what our model computes; absent is `default`."""
    if (value := settings.get(name, default)) != only:
        raise SourceError(f"config.json: {name} is {value!r}; only {only!r} is supported")


def refuse_unequal(settings: Settings, first: str, second: str) -> None:
    """Raise SourceError where two settings differ that our model has one of."""
    if settings.get(first) != settings.get(second):
        raise SourceError(
            f"config.json: {first} is {settings.get(first)!r} and {second} {settings.get(second)!r}; "
            "only equal ones are supported"
        )


def describe(**fields: Any) -> ModelConfig:
    """ModelConfig of these fields. Raises SourceError naming the first that does not fit."""
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "model"
        raise SourceError(f"config.json does not describe a model: {where}: {first['msg']}") from None
