"""Bodies of the page's requests, and their conversion to options of the client."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from antiphon.client import Options
from antiphon.controls.table import CONTROLS
from antiphon.play.problems import BadBody

_CONTROLS = frozenset(control.name for control in CONTROLS)
_B = TypeVar("_B", bound=BaseModel)

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Asked(BaseModel):
    """Fields of every request to a model.

    model: its name; empty is the server's first. source_language, target_language: empty takes the model's default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = ""
    text: str
    source_language: str = ""
    target_language: str = ""


class GenerateBody(Asked):
    """Request for targets.

    options: sampling controls by name, as in docs/CONTROLS.md. A seed may be a string, because numbers of JavaScript
    are exact only up to 2**53. report_beam_steps: report every step of a beam search.
    """

    options: dict[str, Any] = Field(default_factory=dict)
    report_beam_steps: bool = False


class NextTokenBody(Asked):
    """Request for the distribution of the next token, after generated_ids."""

    options: dict[str, Any] = Field(default_factory=dict)
    generated_ids: list[TokenId] = Field(default_factory=list)
    num_tokens: int = Field(default=20, ge=1, le=1000)


class ExplainBody(Asked):
    """Request for attention maps.

    target: None is the model's own answer. pair: second text of an encoder-only model.
    """

    target: str | None = None
    pair: str | None = None


class PositionsBody(BaseModel):
    """Request for the representation of positions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = ""
    num_positions: int = Field(default=64, ge=1, le=512)


class ClassifyBody(Asked):
    """Request for labels.

    pair: second text. next_sentence: predict whether the second text follows the first.
    """

    pair: str | None = None
    next_sentence: bool = False


class FillMaskBody(Asked):
    """Request for tokens of masked places."""

    top_k: int = Field(default=8, ge=1, le=100)


async def read_body(request: Request, kind: type[_B]) -> _B:
    """Return the body of a request. Raises BadBody naming the wrong field."""
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise BadBody(field or "body", first["msg"]) from None


def options_of(given: dict[str, Any], **fixed: Any) -> Options:
    """Return client options. fixed: values that replace the given ones. Raises BadBody for an unknown control."""
    unknown = sorted(given.keys() - _CONTROLS)
    if unknown:
        raise BadBody(f"options.{unknown[0]}", "there is no such control; docs/CONTROLS.md lists them")
    values = {**given, **fixed}
    if isinstance(seed := values.get("seed"), str):
        if not seed.isdecimal():
            raise BadBody("options.seed", f"{seed!r} is not a whole number")
        values["seed"] = int(seed)
    return Options(**values)
