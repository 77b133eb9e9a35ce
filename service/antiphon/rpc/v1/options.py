"""Reads GenerateOptions of the contract into checked domain values, and applies a model's defaults to absent options.

The kind of a control's row in `antiphon.controls.table` determines the reading of its option.

The defaults come from the generation settings of the model's checkpoint. A default that conflicts with an option of the
request is ignored: a request with a temperature gets no beam search, even if the model's default is a beam search.
"""

from __future__ import annotations

import enum
import secrets
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from antiphon.bundle.manifest import GenerationDefaults
from antiphon.controls.control import Control, Kind
from antiphon.controls.table import CONTROLS, SAMPLING_CONTROLS, TEXT_CONTROLS, EarlyStopping
from antiphon.domain.errors import InvalidArgument
from antiphon.domain.sampling_params import Controls, SamplingParams, check_combination, check_token_ids
from antiphon.engine.constraints.stop_strings import check_stop_strings
from antiphon.v1 import inference_pb2 as pb

_SEEDS_AT_ONCE = 512
# Options that an OptionReader keeps, and the size of the largest ones: clients send few different ones.
_MAX_CACHED = 64
_MAX_CACHED_BYTES = 256

_NAMES = {control.field: control.name for control in CONTROLS}
NO_DEFAULTS = GenerationDefaults()


def read_options(
    options: pb.GenerateOptions, vocab_size: int, generation: GenerationDefaults = NO_DEFAULTS
) -> Controls:
    """Return the controls of a request, with the model's defaults for absent options.

    Raises InvalidArgument naming the contract's field.
    """
    try:
        return _read(options, vocab_size, generation)
    except InvalidArgument as error:
        raise as_option(error) from None


class OptionReader:
    """Reads the options of requests to one model. Greedy requests with the same options share one result.

    Such requests share the seed too, which does not matter for them.
    """

    def __init__(self, vocab_size: int, generation: GenerationDefaults = NO_DEFAULTS) -> None:
        self._vocab_size = vocab_size
        self._generation = generation
        self._cache: dict[bytes, Controls] = {}

    def read(self, options: pb.GenerateOptions) -> Controls:
        """Return the controls of a request, as read_options does. Raises InvalidArgument."""
        key = options.SerializeToString(deterministic=True)
        controls = self._cache.get(key)
        if controls is None:
            controls = read_options(options, self._vocab_size, self._generation)
            if not controls.params.temperature and len(key) <= _MAX_CACHED_BYTES:
                if len(self._cache) == _MAX_CACHED:
                    self._cache.clear()
                self._cache[key] = controls
        return controls


def as_option(error: InvalidArgument) -> InvalidArgument:
    """Return the error of a control with the field name that the client knows."""
    return InvalidArgument(f"options.{_NAMES.get(error.field, error.field)}", error.value, error.allowed)


def prefix_field(options: pb.GenerateOptions) -> str:
    """Return the name of the field that gives the prefix."""
    return "options.prefix_text" if options.HasField("prefix_text") else "options.prefix_ids"


def default_options(generation: GenerationDefaults = NO_DEFAULTS) -> pb.GenerateOptions:
    """Return the values of absent options, except of options whose absence has a separate meaning."""
    params = SamplingParams(**own_defaults(generation))
    defaults = pb.GenerateOptions()
    for control in SAMPLING_CONTROLS:
        value = getattr(params, control.field)
        if control.name == "seed" or value is None:
            continue
        if control.kind is Kind.TOKEN_IDS:
            getattr(defaults, control.name).extend(value)
        elif control.kind is Kind.CHOICE:
            setattr(defaults, control.name, _number_of(control, value))
        elif control.kind is Kind.BIASES:
            defaults.logit_bias.update(dict(value))
        else:
            setattr(defaults, control.name, round(1000 * value) if control.field == "time_limit_s" else value)
    return defaults


def _read(options: pb.GenerateOptions, vocab_size: int, generation: GenerationDefaults) -> Controls:
    fields = {field.name: _READERS.get(field.name, _as_is)(value) for field, value in options.ListFields()}
    check_stop_strings(fields.get("stop_strings", ()))
    if "time_limit_millis" in fields:
        fields["time_limit_s"] = fields.pop("time_limit_millis")
    if "seed" not in fields:
        fields["seed"] = next(_seeds)
    texts = {control.field: fields.pop(control.name) for control in TEXT_CONTROLS if control.name in fields}
    controls = with_defaults(fields, texts, generation)
    check_token_ids(controls.params, vocab_size)
    return controls


def _random_seeds() -> Iterator[int]:
    """Yield 64-bit seeds that cannot be guessed, for the event loop.

    Many are drawn at once, because a system call releases the interpreter lock, and the event loop would then wait for
    the engine.
    """
    while True:
        yield from array("Q", secrets.token_bytes(8 * _SEEDS_AT_ONCE))


_seeds = _random_seeds()


def _seconds(millis: int) -> float:
    if millis < 1:
        raise InvalidArgument("time_limit_millis", millis, "at least 1")
    return millis / 1000


def _token_ids(value: Any) -> tuple[int, ...]:
    """Return a list of ids. The contract wraps a list in a message if an empty list differs from an absent one."""
    return tuple(value.ids if isinstance(value, pb.TokenIds) else value)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(value.items()))


def _choice_of(control: Control) -> Callable[[int], enum.Enum]:
    """Return a function that converts numbers of the contract's enum to members of the control's enum."""
    members: dict[int, enum.Enum] = {0: control.default}
    members |= {_number_of(control, member): member for member in type(control.default)}
    allowed = f"one of the values of {type(control.default).__name__}"

    def read(number: int) -> enum.Enum:
        if number not in members:
            raise InvalidArgument(control.name, number, allowed)
        return members[number]

    return read


def _number_of(control: Control, member: enum.Enum) -> int:
    """Return the number of a member in the contract, whose names begin with the name of the control."""
    contract = pb.GenerateOptions.DESCRIPTOR.fields_by_name[control.name].enum_type
    assert contract is not None
    return int(contract.values_by_name[f"{control.name}_{member.name}".upper()].number)


def _as_is(value: Any) -> Any:
    return value


_READERS_OF_KINDS: dict[Kind, Callable[[Any], Any]] = {
    Kind.TOKEN_IDS: _token_ids,
    Kind.TEXTS: tuple,
    Kind.BIASES: _biases,
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "time_limit_millis": _seconds,
    **{control.name: _READERS_OF_KINDS[control.kind] for control in CONTROLS if control.kind in _READERS_OF_KINDS},
    **{control.name: _choice_of(control) for control in CONTROLS if control.kind is Kind.CHOICE},
}


@cache
def own_defaults(generation: GenerationDefaults) -> Mapping[str, Any]:
    """Return the fields of SamplingParams that a model sets. Fields that others depend on come first."""
    fields = {name: value for name, value in generation if value is not None and value != ()}
    if "early_stopping" in fields:
        fields["early_stopping"] = EarlyStopping[fields["early_stopping"].upper()]
    return MappingProxyType(dict(sorted(fields.items(), key=lambda item: item[0] not in ("beam_width", "temperature"))))


def with_defaults(sampling: Mapping[str, Any], texts: Mapping[str, Any], generation: GenerationDefaults) -> Controls:
    """Return the controls of a request, with the defaults that do not conflict with it.

    sampling: fields of SamplingParams; texts: the other fields of Controls.
    Raises InvalidArgument if the request itself is invalid.
    """
    defaults = {name: value for name, value in own_defaults(generation).items() if name not in sampling}
    if texts.get("prefix_text") is not None or texts.get("prefix_ids") is not None:
        defaults.pop("forced_first_id", None)  # the prefix sets the target's first token
    if defaults:
        try:
            return _controls({**defaults, **sampling}, texts)
        except InvalidArgument:
            sampling = _with_compatible_defaults(sampling, texts, defaults)
    return _controls(sampling, texts)


def _with_compatible_defaults(
    sampling: Mapping[str, Any], texts: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the requested fields, and each default that does not conflict with those before it."""
    compatible = dict(sampling)
    for name, value in defaults.items():
        try:
            _controls({**compatible, name: value}, texts)
        except InvalidArgument:
            continue
        compatible[name] = value
    return compatible


def _controls(fields: Mapping[str, Any], texts: Mapping[str, Any]) -> Controls:
    controls = Controls(params=SamplingParams(**fields), **texts)
    if texts.get("stop_strings") or texts.get("prefix_ids") is not None:
        check_combination(controls)  # SamplingParams has checked the parameters already
    return controls
