"""Domain exceptions and the one table that turns them into gRPC status codes."""

from __future__ import annotations

import enum


class Status(enum.Enum):
    """Names of the gRPC status codes this service uses; the servicer maps them by name."""

    INVALID_ARGUMENT = enum.auto()
    UNAUTHENTICATED = enum.auto()
    NOT_FOUND = enum.auto()
    ALREADY_EXISTS = enum.auto()
    FAILED_PRECONDITION = enum.auto()
    RESOURCE_EXHAUSTED = enum.auto()
    DEADLINE_EXCEEDED = enum.auto()
    UNAVAILABLE = enum.auto()
    UNIMPLEMENTED = enum.auto()
    CANCELLED = enum.auto()
    INTERNAL = enum.auto()


class AntiphonError(Exception):
    """Base of every error that a client receives. `reason` is the stable ErrorInfo reason (AIP-193)."""

    status = Status.INTERNAL
    reason = "INTERNAL"

    def __reduce__(self) -> tuple[object, ...]:
        return _copied, (type(self), self.args), self.__dict__


def _copied(kind: type[AntiphonError], args: tuple[object, ...]) -> AntiphonError:
    """Return a copy of an error that another process has sent, without a call of its class: that takes other values."""
    return kind.__new__(kind, *args)


class InWords(str):
    """Description of a field's value, for cases in which it is clearer than the value itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class InvalidArgument(AntiphonError):
    """A field of a request is out of range; names the field, the value and the allowed values.

    value: shown as its Python representation, texts in quotes; InWords without quotes.
    """

    status = Status.INVALID_ARGUMENT
    reason = "INVALID_FIELD"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        super().__init__(f"{field} is {shown[:80]}; it must be {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class ModelNotFound(AntiphonError):
    """The request names a model that is not served."""

    status = Status.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


class ModelExists(AntiphonError):
    """A load of a model under a name that another model has."""

    status = Status.ALREADY_EXISTS
    reason = "MODEL_EXISTS"


class BadBundle(AntiphonError):
    """A bundle cannot be served; names the file or field."""

    status = Status.INVALID_ARGUMENT
    reason = "INVALID_BUNDLE"


class OverBudget(AntiphonError):
    """A model does not fit the memory budget; names its parts and the settings to lower."""

    status = Status.RESOURCE_EXHAUSTED
    reason = "OVER_MEMORY_BUDGET"


class LastModel(AntiphonError):
    """An attempt to unload the last model of a server."""

    status = Status.FAILED_PRECONDITION
    reason = "LAST_MODEL"


class Unsupported(AntiphonError):
    """The served model cannot do the requested task; another bundle may."""

    status = Status.UNIMPLEMENTED
    reason = "UNSUPPORTED"


class QueueFull(AntiphonError):
    """The waiting queue is at its bound; try again after `retry_after_s` seconds."""

    status = Status.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowReader(AntiphonError):
    """A client reads its answer too slowly; the server ended the answer before its end."""

    status = Status.RESOURCE_EXHAUSTED
    reason = "SLOW_READER"


class TooManyRpcs(QueueFull):
    """The number of RPCs in flight is at its bound; try again after `retry_after_s` seconds."""

    reason = "TOO_MANY_RPCS"


class MetadataTooLarge(AntiphonError):
    """A call carries more metadata than a server accepts."""

    status = Status.RESOURCE_EXHAUSTED
    reason = "METADATA_TOO_LARGE"


class RequestTimeout(AntiphonError):
    """A client began a call and did not send its request in time."""

    status = Status.DEADLINE_EXCEEDED
    reason = "REQUEST_TIMEOUT"


class TooManyTexts(QueueFull):
    """The bytes of long texts that wait to be tokenised are at their bound; try again after `retry_after_s` seconds."""

    reason = "TOO_MANY_TEXTS"


class Unauthenticated(AntiphonError):
    """A call carries no bearer token. `challenge` is the answer's challenge of RFC 6750, section 3."""

    status = Status.UNAUTHENTICATED
    reason = "TOKEN_MISSING"
    challenge = "Bearer"


class TokenInvalid(Unauthenticated):
    """A call carries a token that no caller has."""

    reason = "TOKEN_INVALID"
    challenge = 'Bearer error="invalid_token"'


class DeadlineExceeded(AntiphonError):
    """The request's deadline passed before its answer was complete."""

    status = Status.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class Unavailable(AntiphonError):
    """The server is starting or draining; another replica may answer."""

    status = Status.UNAVAILABLE
    reason = "UNAVAILABLE"


class Loading(Unavailable):
    """The server has not loaded its models yet; another replica may answer, or this one later."""

    reason = "LOADING"


def refusal_reasons() -> list[str]:
    """Return every ErrorInfo reason, in alphabetical order."""
    reasons, kinds = set(), [AntiphonError]
    while kinds:
        kind = kinds.pop()
        reasons.add(kind.reason)
        kinds += kind.__subclasses__()
    return sorted(reasons)


class EngineFault(AntiphonError):
    """A step of the engine failed; the cause is in the server's log, not in the message."""

    status = Status.INTERNAL
    reason = "ENGINE_FAULT"
