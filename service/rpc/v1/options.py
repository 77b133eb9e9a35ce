"""GenerateOptions of the contract: read into domain values with every check made, and the defaults told back."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from antiphon.model.bundle.manifest import GenerationDefaults
from antiphon.service.domain.combinations import Controls
from antiphon.service.domain.errors import InvalidArgument
from antiphon.service.domain.ranges import check_token_ids
from antiphon.service.domain.request import EarlyStopping, SamplingParams
from antiphon.service.engine.constraints.stop_strings import check_stop_strings
from antiphon.service.rpc.v1.model_defaults import NO_DEFAULTS, own_defaults, with_defaults
from antiphon.v1 import inference_pb2 as pb

_EARLY_STOPPING = {
    pb.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    pb.EARLY_STOPPING_HEURISTIC: EarlyStopping.HEURISTIC,
    pb.EARLY_STOPPING_FIRST: EarlyStopping.FIRST,
    pb.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}

_SEEDS_AT_ONCE = 512

_EARLY_STOPPING_OF = {value: known for known, value in _EARLY_STOPPING.items()}


def read_options(
    options: pb.GenerateOptions, vocab_size: int, generation: GenerationDefaults = NO_DEFAULTS
) -> Controls:
    """Options as given, absent ones at the model's defaults. Raises InvalidArgument naming the contract's field."""
    try:
        return _read(options, vocab_size, generation)
    except InvalidArgument as error:
        raise as_option(error) from None


def as_option(error: InvalidArgument) -> InvalidArgument:
    """A complaint about a control, with its field named as the client knows it."""
    field = "time_limit_millis" if error.field == "time_limit_s" else error.field
    return InvalidArgument(f"options.{field}", error.value, error.allowed)


def default_options(generation: GenerationDefaults = NO_DEFAULTS) -> pb.GenerateOptions:
    """Values that absent options take; without those whose absence means something of its own."""
    params = SamplingParams(**own_defaults(generation))
    defaults = pb.GenerateOptions(early_stopping=_EARLY_STOPPING_OF[params.early_stopping])
    for field in pb.GenerateOptions.DESCRIPTOR.fields:
        value = getattr(params, field.name, None)
        if field.name != "seed" and isinstance(value, bool | int | float):
            setattr(defaults, field.name, value)
    defaults.suppressed_ids.extend(params.suppressed_ids)
    defaults.stop_ids.extend(params.stop_ids)
    return defaults


def _read(options: pb.GenerateOptions, vocab_size: int, generation: GenerationDefaults) -> Controls:
    given = {field.name: value for field, value in options.ListFields()}
    stop_strings = tuple(given.pop("stop_strings", ()))
    check_stop_strings(stop_strings)
    prefix_text, prefix_ids = given.pop("prefix_text", None), given.pop("prefix_ids", None)
    if (millis := given.pop("time_limit_millis", None)) is not None:
        given["time_limit_s"] = _seconds(millis)
    if "seed" not in given:
        given["seed"] = next(_seeds)
    beside: dict[str, Any] = dict(
        stop_strings=stop_strings,
        prefix_text=prefix_text,
        prefix_ids=None if prefix_ids is None else tuple(prefix_ids.ids),
    )
    asked = {name: _READERS.get(name, _as_is)(value) for name, value in given.items()}
    controls = with_defaults(asked, beside, generation)
    check_token_ids(controls.params, vocab_size)
    return controls


def _drawn_seeds() -> Iterator[int]:
    """64-bit seeds that nobody can guess, for the event loop.

    Drawn many at a time: to ask the system lets go of the interpreter, and a call would wait for the engine there.
    """
    while True:
        yield from array("Q", secrets.token_bytes(8 * _SEEDS_AT_ONCE))


_seeds = _drawn_seeds()


def _seconds(millis: int) -> float:
    if millis < 1:
        raise InvalidArgument("time_limit_millis", millis, "at least 1")
    return millis / 1000


def _early_stopping(value: int) -> EarlyStopping:
    known = _EARLY_STOPPING.get(value)  # type: ignore[call-overload]
    if known is None:
        raise InvalidArgument("early_stopping", value, "one of the values of EarlyStopping")
    return known  # type: ignore[no-any-return]


def _as_is(value: Any) -> Any:
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    "early_stopping": _early_stopping,
    "logit_bias": lambda biases: tuple(sorted(biases.items())),
    "suppressed_ids": tuple,
    "allowed_ids": tuple,
    "stop_ids": tuple,
}
