"""Options of requests (sampling controls) and of calls (deadline, priority, metadata that identifies the caller)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from google.protobuf.message import Message

from antiphon.client.connection import MAX_FILE_BYTES, Connection, read_regular
from antiphon.controls.control import Control, Kind
from antiphon.controls.table import CONTROLS
from antiphon.v1 import inference_pb2

EarlyStopping = Literal["heuristic", "first", "never"]

Priority = Literal["interactive", "batch"]
"""Priority of a request: "interactive" if a person waits for the answer, else "batch"."""

PRIORITIES: dict[Priority, inference_pb2.Priority.ValueType] = {
    "interactive": inference_pb2.PRIORITY_INTERACTIVE,
    "batch": inference_pb2.PRIORITY_BATCH,
}
"""Priorities of the contract by their names here and in flags."""

M = TypeVar("M", bound=Message)


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
    use_shortlist: only the tokens that the model's shortlist lists for the source, and the end token, are chosen.
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
    use_shortlist: bool | None = None
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


class CallArguments(TypedDict):
    """Keyword arguments of a stub's call."""

    timeout: float | None
    metadata: tuple[tuple[str, str], ...]


class CallOptions:
    """Deadline, priority, retries and metadata of the calls of one client."""

    def __init__(
        self, connection: Connection, *, timeout_s: float | None = None, priority: Priority | None = None
    ) -> None:
        """timeout_s: default deadline of a call; None is no deadline. Raises ValueError."""
        if priority is not None and priority not in PRIORITIES:
            raise ValueError(f"priority is {priority!r}; it must be one of {', '.join(PRIORITIES)}")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}; it must be above 0")
        self.retry = connection.retry
        self._timeout_s = timeout_s
        self._priority = priority
        self._metadata = tuple(connection.metadata.items())
        self._token = _TokenFile(connection.token_file) if connection.token_file is not None else connection.token

    @property
    def timeout_s(self) -> float | None:
        """Default time limit of a request; None is none."""
        return None if self._timeout_s == math.inf else self._timeout_s

    def set_priority(self, request: M) -> M:
        """Set the priority of the request, if there is one, and return the request."""
        if self._priority is not None:
            request.priority = PRIORITIES[self._priority]  # type: ignore[attr-defined]
        return request

    def arguments(self, timeout_s: float | None = None) -> CallArguments:
        """Return the arguments of a call. timeout_s: None is the client's default, infinity no deadline.

        Raises ValueError.
        """
        seconds = self._timeout_s if timeout_s is None else timeout_s
        metadata = self._metadata
        if self._token is not None:
            token = self._token if isinstance(self._token, str) else self._token()
            metadata += (("authorization", f"Bearer {token}"),)
        return {"timeout": None if seconds == math.inf else seconds, "metadata": metadata}


class _TokenFile:
    """Current token in a file. Orchestrators renew the file in place."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._state: tuple[int, int, int] | None = None
        self._token = ""
        self()

    def __call__(self) -> str:
        try:
            status = self._path.stat()
            state = (status.st_mtime_ns, status.st_ino, status.st_size)
            if state != self._state:
                self._token = read_regular(self._path, MAX_FILE_BYTES).decode("ascii").strip()
                self._state = state
        except OSError as error:
            raise ValueError(f"token_file is {self._path}, which cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"token_file is {self._path}, which must contain ASCII characters only") from None
        if not self._token:
            raise ValueError(f"token_file is {self._path}, which is empty")
        return self._token
