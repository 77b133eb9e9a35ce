"""What a model's own defaults, its checkpoint's generation settings, do to a request that leaves options out.

A default holds where a request says nothing of it. One that what the request does say excludes is left out: who asks
for a temperature wants no beam search, though the model's default be one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from antiphon.model.bundle.manifest import GenerationDefaults
from antiphon.service.domain.combinations import Controls, check_combination
from antiphon.service.domain.errors import InvalidArgument
from antiphon.service.domain.request import EarlyStopping, SamplingParams

NO_DEFAULTS = GenerationDefaults()


@cache
def own_defaults(generation: GenerationDefaults) -> Mapping[str, Any]:
    """Fields of SamplingParams that a model sets, those first which others depend on."""
    fields = {name: value for name, value in generation if value is not None and value != ()}
    if "early_stopping" in fields:
        fields["early_stopping"] = EarlyStopping[fields["early_stopping"].upper()]
    return MappingProxyType(dict(sorted(fields.items(), key=lambda item: item[0] not in ("beam_width", "temperature"))))


def with_defaults(asked: Mapping[str, Any], beside: Mapping[str, Any], generation: GenerationDefaults) -> Controls:
    """Controls of what a request asks, and of the defaults that go together with it.

    asked: fields of SamplingParams; beside: the other fields of Controls.
    Raises InvalidArgument where the request by itself cannot be.
    """
    defaults = {name: value for name, value in own_defaults(generation).items() if name not in asked}
    if beside.get("prefix_text") is not None or beside.get("prefix_ids") is not None:
        defaults.pop("forced_first_id", None)  # it is the target's first token, and that is given
    if defaults:
        try:
            return _controls({**defaults, **asked}, beside)
        except InvalidArgument:
            asked = _with_what_fits(asked, beside, defaults)
    return _controls(asked, beside)


def _with_what_fits(asked: Mapping[str, Any], beside: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked and, one after the other, the defaults that go with it."""
    kept = dict(asked)
    for name, value in defaults.items():
        try:
            _controls({**kept, name: value}, beside)
        except InvalidArgument:
            continue
        kept[name] = value
    return kept


def _controls(fields: Mapping[str, Any], beside: Mapping[str, Any]) -> Controls:
    controls = Controls(params=SamplingParams(**fields), **beside)
    if beside.get("stop_strings") or beside.get("prefix_ids") is not None:
        check_combination(controls)  # the parameters have been checked among themselves already
    return controls
