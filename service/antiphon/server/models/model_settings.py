"""Settings of one of several models: the directory of its bundle and its own engine limits.

An omitted limit takes the server's setting of the same name. Defaults and allowed values of the limits are those of
`EngineLimits`; their use is unknown here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from antiphon.bundle.manifest import NAME_PATTERN
from antiphon.domain.limits import ALLOWED, DEFAULT_LIMITS, EngineLimits

PrecisionChoice = Literal["float32", "int8", "int4", "bfloat16", "float16"]

Threads = Annotated[int, Field(ge=1, le=1024)]

Lanes = Annotated[int, Field(ge=1, le=64)] | Literal["auto"]

ModelName = Annotated[str, Field(pattern=NAME_PATTERN)]


def server_limit(name: str) -> Any:
    """Return the field of a limit in the server's settings, with the limit's default, allowed values and meaning."""
    return _limit(name, getattr(DEFAULT_LIMITS, name))


def model_limit(name: str) -> Any:
    """Return the field of a limit in a model's own settings; None takes the server's."""
    return _limit(name, None)


def _limit(name: str, default: float | None) -> Any:
    allowed = ALLOWED[name]
    return Field(default=default, ge=allowed.low, le=allowed.high, description=allowed.meaning)


class ModelSettings(BaseModel):
    """Settings of one model: the directory of its bundle and its own limits. A plain text is the directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    precision: PrecisionChoice | None = None
    threads: Threads | None = None
    lanes: Lanes | None = None
    max_num_seqs: int | None = model_limit("max_num_seqs")
    max_num_batched_tokens: int | None = model_limit("max_num_batched_tokens")
    max_queued_requests: int | None = model_limit("max_queued_requests")
    max_queued_tokens: int | None = model_limit("max_queued_tokens")
    max_queue_time_s: float | None = model_limit("max_queue_time_s")
    kv_cache_blocks: int | None = model_limit("kv_cache_blocks")
    workspace_limit_bytes: int | None = model_limit("workspace_limit_bytes")

    @property
    def own_limits(self) -> Mapping[str, Any]:
        """Limits that this model has set itself, by name."""
        given = {name: getattr(self, name) for name in ALLOWED}
        return {name: value for name, value in given.items() if value is not None}

    @model_validator(mode="before")
    @classmethod
    def _plain_text_as_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """Everything needed to load one model.

    name: None takes the bundle's name. lanes: "auto" takes the fastest number in a short measurement.
    """

    name: str | None
    path: Path
    precision: PrecisionChoice | None
    threads: int
    lanes: int | Literal["auto"]
    limits: EngineLimits
    max_message_bytes: int
    max_text_bytes: int


def read_model_flags(flags: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
    """Return the settings of all `--model NAME=PATH` flags. Raises ValueError naming the wrong flag."""
    given: dict[str, Mapping[str, str]] = {}
    for flag in flags:
        name, separator, path = flag.partition("=")
        if not (name and separator and path):
            raise ValueError(f"--model is {flag!r}; it must be NAME=PATH, a name and the directory of a bundle")
        if name in given:
            raise ValueError(f"--model names {name!r} twice")
        given[name] = {"path": path}
    return given
