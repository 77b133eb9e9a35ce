"""Applies a model's defaults, from its checkpoint's generation settings, to requests that leave options out.

A default applies if the request does not set the option. A default that conflicts with an option of the request is
ignored: a request with a temperature gets no beam search, even if the model's default is a beam search.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from antiphon.bundle.manifest import GenerationDefaults
from antiphon.domain.combinations import Controls, check_combination
from antiphon.domain.errors import InvalidArgument
from antiphon.domain.request import EarlyStopping, SamplingParams

NO_DEFAULTS = GenerationDefaults()


@cache
def own_defaults(generation: GenerationDefaults) -> Mapping[str, Any]:
    """Return the fields of SamplingParams that a model sets. Fields that others depend on come first."""
    fields = {name: value for name, value in generation if value is not None and value != ()}
    if "early_stopping" in fields:
        fields["early_stopping"] = EarlyStopping[fields["early_stopping"].upper()]
    return MappingProxyType(dict(sorted(fields.items(), key=lambda item: item[0] not in ("beam_width", "temperature"))))


def with_defaults(sampling: Mapping[str, Any], others: Mapping[str, Any], generation: GenerationDefaults) -> Controls:
    """Return the controls of a request, with the defaults that do not conflict with it.

    sampling: fields of SamplingParams; others: the other fields of Controls.
    Raises InvalidArgument if the request itself is invalid.
    """
    defaults = {name: value for name, value in own_defaults(generation).items() if name not in sampling}
    if others.get("prefix_text") is not None or others.get("prefix_ids") is not None:
        defaults.pop("forced_first_id", None)  # the prefix sets the target's first token
    if defaults:
        try:
            return _controls({**defaults, **sampling}, others)
        except InvalidArgument:
            sampling = _with_compatible_defaults(sampling, others, defaults)
    return _controls(sampling, others)


def _with_compatible_defaults(
    sampling: Mapping[str, Any], others: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the requested fields, and each default that does not conflict with those before it."""
    kept = dict(sampling)
    for name, value in defaults.items():
        try:
            _controls({**kept, name: value}, others)
        except InvalidArgument:
            continue
        kept[name] = value
    return kept


def _controls(fields: Mapping[str, Any], others: Mapping[str, Any]) -> Controls:
    controls = Controls(params=SamplingParams(**fields), **others)
    if others.get("stop_strings") or others.get("prefix_ids") is not None:
        check_combination(controls)  # SamplingParams has checked the parameters already
    return controls
