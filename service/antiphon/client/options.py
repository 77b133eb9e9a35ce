"""The client's sampling controls, and their conversion to the contract's GenerateOptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from antiphon.controls.control import Control, Kind
from antiphon.controls.table import CONTROLS
from antiphon.v1 import inference_pb2

EarlyStopping = Literal["heuristic", "first", "never"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Sampling controls of a request; None takes the model's default, which `Model.default_options` reports.

    docs/CONTROLS.md describes the order in which they are applied, and the combinations that are refused.

    max_new_tokens: maximum number of tokens to produce, the end token included.
    min_new_tokens: minimum number of tokens before the end token or a stop id; 0 is no minimum.
    time_limit_millis: milliseconds from arrival, after which the output so far is returned.
    temperature: 0 always takes the likeliest token; a number above 0, up to 100, divides the logits.
    top_k: sample only from the k likeliest tokens; 0 keeps all.
    top_p: sample from the likeliest tokens whose probabilities together reach p, (0, 1].
    min_p: drop tokens less likely than min_p times the likeliest, [0, 1].
    typical_p: sample from the locally typical tokens whose probabilities together reach p, (0, 1].
    seed: 0 to 2**64 - 1; the same seed gives the same tokens. With None the server draws a seed and reports it.
    num_return_sequences: number of outputs: samples, or the best hypotheses of a beam search.
    beam_width: number of live beams of a beam search, 1 to 16; 1 is no beam search.
    length_penalty: the score of a hypothesis is its log-probability over its length to this power, [-10, 10].
    early_stopping: end of a beam search: "heuristic", at the "first" beam_width hypotheses, or "never" too early.
    repetition_penalty: divides positive logits of tokens produced or given, multiplies negative ones; 1 is off.
    presence_penalty: subtracted once from the logit of a produced token; 0 is off.
    frequency_penalty: subtracted from a token's logit once for each time that it was produced; 0 is off.
    no_repeat_ngram_size: no sequence of n tokens occurs twice; 0 is off.
    logit_bias: added to the logits of token ids.
    prefix_text, prefix_ids: first tokens of the target, given and not returned; set at most one of the two.
    forced_first_id: first token to produce, such as a language code.
    suppressed_ids: tokens that are never chosen.
    allowed_ids: if not empty, the only tokens that are chosen, besides the end token.
    stop_ids: tokens that end an output, like the end token.
    stop_strings: texts that end an output; they are not returned.
    ignore_eos: the end token is never chosen.
    num_logprobs: 0 returns the log-probabilities of the chosen tokens, k also those of k alternatives.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    time_limit_millis: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    num_return_sequences: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Mapping[int, float] | None = None
    prefix_text: str | None = None
    prefix_ids: Sequence[int] | None = None
    forced_first_id: int | None = None
    suppressed_ids: Sequence[int] | None = None
    allowed_ids: Sequence[int] | None = None
    stop_ids: Sequence[int] | None = None
    stop_strings: Sequence[str] | None = None
    ignore_eos: bool | None = None
    num_logprobs: int | None = None


def options_message(options: Options | None) -> inference_pb2.GenerateOptions | None:
    """Return the message of the contract. Raises ValueError naming the option whose value does not fit its field."""
    if options is None:
        return None
    message = inference_pb2.GenerateOptions()
    for control in CONTROLS:
        value = getattr(options, control.name)
        if value is None:
            continue
        try:
            _set(message, control, value)
        except (TypeError, ValueError, KeyError, AttributeError):
            raise ValueError(f"options.{control.name} is {value!r}, which does not fit the field") from None
    return message


def _set(message: inference_pb2.GenerateOptions, control: Control, value: Any) -> None:
    field = getattr(message, control.name)
    match control.kind:
        case Kind.TOKEN_IDS | Kind.TEXTS:
            if isinstance(value, str):  # otherwise each of its characters would become a separate text
                raise TypeError(control.name)
            if isinstance(field, inference_pb2.TokenIds):
                field.SetInParent()  # an empty list differs from an absent one
                field = field.ids
            field.extend(value)
        case Kind.BIASES:
            field.update(value)
        case Kind.CHOICE:
            setattr(message, control.name, _number_of(control, value))
        case _:
            setattr(message, control.name, value)


def _number_of(control: Control, value: str) -> int:
    """Return the number of a choice in the contract's enum, whose names begin with the name of the control."""
    if value not in control.choices:
        raise ValueError(value)
    contract = inference_pb2.GenerateOptions.DESCRIPTOR.fields_by_name[control.name].enum_type
    assert contract is not None
    return int(contract.values_by_name[f"{control.name}_{value}".upper()].number)
