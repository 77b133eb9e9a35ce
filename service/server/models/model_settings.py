"""Settings of one of several models: the directory of its bundle and its own engine limits.

An omitted limit takes the server's setting of the same name. Knows the allowed values, not their use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from antiphon.model.bundle.manifest import NAME_PATTERN

PrecisionChoice = Literal["float32", "int8", "int4"]

Threads = Annotated[int, Field(ge=1, le=1024)]
NumSeqs = Annotated[int, Field(ge=1, le=4096)]
BatchedTokens = Annotated[int, Field(ge=1, le=1_048_576)]
QueuedRequests = Annotated[int, Field(ge=1, le=1_000_000)]
QueueTime = Annotated[float, Field(ge=0.001, le=86_400)]
QueuedTokens = Annotated[int, Field(ge=1, le=100_000_000)]
CacheBlocks = Annotated[int, Field(ge=1, le=100_000_000)]
WorkspaceBytes = Annotated[int, Field(ge=1, le=2**50)]

ModelName = Annotated[str, Field(pattern=NAME_PATTERN)]


class ModelSettings(BaseModel):
    """Settings of one model: the directory of its bundle and its own limits. A plain text is the directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    precision: PrecisionChoice | None = None
    threads: Threads | None = None
    max_num_seqs: NumSeqs | None = None
    max_num_batched_tokens: BatchedTokens | None = None
    max_queued_requests: QueuedRequests | None = None
    max_queued_tokens: QueuedTokens | None = None
    max_queue_time_s: QueueTime | None = None
    kv_cache_blocks: CacheBlocks | None = None
    workspace_limit_bytes: WorkspaceBytes | None = None

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """Everything needed to load one model. name: None takes the bundle's name."""

    name: str | None
    path: Path
    precision: PrecisionChoice | None
    threads: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    max_queue_time_s: float
    kv_cache_blocks: int | None
    workspace_limit_bytes: int | None
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
