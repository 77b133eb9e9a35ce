"""Every limit of a request, stated independently of the code: the last valid and the first invalid values.

The key is the field, so that a field of the contract without an entry fails its test. The model is the shipped bundle,
with ROWS rows.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

ROWS = 17  # one above the widest beam
VOCABULARY = 10_000
MAX_SOURCE_LEN = MAX_TARGET_LEN = 256
EOS_ID = 2
WORD_ID = 100
MAX_TEXT_BYTES = 65_536
HIGHEST_INT32 = 2**31 - 1
HIGHEST_UINT32 = 2**32 - 1
LEAST_FLOAT32 = 2.0**-149


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Accepted values of a field, refused values, and the other fields that the request must set.

    blamed: the field that the refusal names, if it is another one.
    """

    taken: tuple[Any, ...]
    refused: tuple[Any, ...] = ()
    beside: dict[str, Any] = field(default_factory=dict)
    blamed: str | None = None


def whole_numbers(low: int, high: int, *, beside: dict[str, Any] | None = None) -> Limit:
    """Return the limit from low to high, both included. Values outside int32 cannot be sent."""
    refused = tuple(value for value in (low - 1, high + 1, -HIGHEST_INT32) if value < low or value > high)
    sendable = tuple(value for value in refused if -HIGHEST_INT32 <= value <= HIGHEST_INT32)
    return Limit(taken=(low, low + 1, high - 1, high), refused=sendable, beside=beside or {})


def numbers(low: float, high: float, *, beside: dict[str, Any] | None = None, above: bool = False) -> Limit:
    """Return the limit from low to high as float32, low excluded if `above`. NaN is refused."""
    least = LEAST_FLOAT32 if above else low
    taken = (least, math.nextafter(least, math.inf), math.nextafter(high, low), high)
    lower = LEAST_FLOAT32 / 2 if above else math.nextafter(low, -math.inf)  # half of it is rounded to 0
    refused = (lower, low - 1, math.nextafter(high, math.inf), math.nan, math.inf, -math.inf)
    return Limit(taken=taken, refused=refused, beside=beside or {})


def entries(most: int, one: Any, *, bad: Iterable[Any] = (), beside: dict[str, Any] | None = None) -> Limit:
    """Return the limit of a list by its maximum length; bad: entries that are refused in any list."""
    taken = tuple([one] * count for count in (0, 1, most - 1, most))
    return Limit(taken=taken, refused=([one] * (most + 1), *([value] for value in bad)), beside=beside or {})


def ids(count: int, *, ended: bool = False) -> dict[str, Any]:
    """Return a TokenIds of the given length; ended: the last one is the end token."""
    return {"ids": [WORD_ID] * (count - ended) + [EOS_ID] * ended}


_BEAMS = {"beam_width": 2}
_SAMPLING = {"temperature": 1.0}
_IDS_OUTSIDE = (VOCABULARY, HIGHEST_UINT32)

OPTIONS: dict[str, Limit] = {
    # Above the model's own limit, that limit applies.
    "max_new_tokens": Limit(taken=(1, 2, MAX_TARGET_LEN - 1, MAX_TARGET_LEN, HIGHEST_INT32), refused=(0, -1)),
    "min_new_tokens": Limit(taken=(0, 1, 4, 5), refused=(-1, 6), beside={"max_new_tokens": 5}),
    "time_limit_millis": Limit(taken=(1, 2, HIGHEST_INT32), refused=(0, -1)),
    "temperature": numbers(0, 100),
    "top_k": Limit(taken=(0, 1, VOCABULARY, HIGHEST_INT32), refused=(-1,), beside=_SAMPLING),
    "top_p": numbers(0, 1, above=True, beside=_SAMPLING),
    "seed": Limit(taken=(0, 1, 2**64 - 1)),
    "min_p": numbers(0, 1, beside=_SAMPLING),
    "typical_p": numbers(0, 1, above=True, beside=_SAMPLING),
    "num_return_sequences": whole_numbers(1, ROWS, beside=_SAMPLING),
    "beam_width": whole_numbers(1, 16),
    "length_penalty": numbers(-10, 10, beside=_BEAMS),
    "early_stopping": Limit(taken=(0, 1, 2, 3), refused=(4, -1), beside=_BEAMS),
    "repetition_penalty": numbers(0, 100, above=True),
    "presence_penalty": numbers(-100, 100),
    "frequency_penalty": numbers(-100, 100),
    "no_repeat_ngram_size": Limit(taken=(0, 1, HIGHEST_INT32), refused=(-1,)),
    "logit_bias": Limit(
        taken=({}, {0: 1e6}, {VOCABULARY - 1: -1e6}, dict.fromkeys(range(1024), 0.5)),
        refused=(
            {0: 1000000.0625}, {0: -1000000.0625}, {0: math.nan}, {0: math.inf}, {VOCABULARY: 1.0},
            dict.fromkeys(range(1025), 0.5),
        ),
    ),
    "prefix_text": Limit(taken=("", "wort"), refused=("wort " * MAX_TARGET_LEN,)),
    "prefix_ids": Limit(
        taken=(ids(0), ids(1), ids(MAX_TARGET_LEN - 2), ids(MAX_TARGET_LEN - 1), {"ids": [VOCABULARY - 1]}),
        refused=(ids(MAX_TARGET_LEN), {"ids": [VOCABULARY]}, *({"ids": [WORD_ID, index]} for index in (0, 1, EOS_ID))),
    ),
    "forced_first_id": Limit(taken=(0, 1, VOCABULARY - 1), refused=_IDS_OUTSIDE),
    "suppressed_ids": entries(1024, WORD_ID, bad=_IDS_OUTSIDE),
    "allowed_ids": entries(1024, WORD_ID, bad=_IDS_OUTSIDE),
    "stop_ids": entries(16, WORD_ID, bad=_IDS_OUTSIDE),
    "stop_strings": Limit(
        taken=(["x"], ["x" * 255], ["x" * 256], ["x"] * 15, ["x"] * 16), refused=([""], ["x" * 257], ["x"] * 17)
    ),
    "ignore_eos": Limit(taken=(False, True)),
    "use_shortlist": Limit(taken=(False,), refused=(True,)),  # the shipped model has no shortlist
    "num_logprobs": whole_numbers(0, 20),
}  # fmt: skip

_PRIORITY = Limit(taken=(0, 1, 2), refused=(3, -1))
_LANGUAGE = Limit(taken=("",), refused=("de", "x" * 1000))


# The server adds the end token to a source without it.
_SOURCE_IDS = Limit(
    taken=(
        ids(1), ids(MAX_SOURCE_LEN - 2), ids(MAX_SOURCE_LEN - 1), ids(MAX_SOURCE_LEN, ended=True),
        {"ids": [VOCABULARY - 1]},
    ),
    refused=(
        ids(0), ids(MAX_SOURCE_LEN), ids(MAX_SOURCE_LEN + 1, ended=True), {"ids": [VOCABULARY]},
        {"ids": [HIGHEST_UINT32]},
    ),
)  # fmt: skip
_TARGET_IDS = Limit(
    taken=(ids(0), ids(1), ids(MAX_TARGET_LEN - 2), ids(MAX_TARGET_LEN - 1)),
    refused=(ids(MAX_TARGET_LEN), {"ids": [VOCABULARY]}, {"ids": [HIGHEST_UINT32]}),
)
_SOURCE = {"text": "wort"}


def texts(longest: int, *, empty: bool = False) -> Limit:
    """Return the limit of texts by their number of tokens; empty: whether an empty text is accepted."""
    taken = tuple(map(text_of, (1, longest - 1, longest)))
    nothing = ("", " ", "\t\n ")
    if empty:
        return Limit(taken=(*taken, *nothing), refused=(text_of(longest + 1),))
    return Limit(taken=taken, refused=(text_of(longest + 1), *nothing))


def text_of(num_tokens: int) -> str:
    """Return a text with exactly this number of tokens, which a test checks."""
    return " ".join(["the"] * num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Valid request, and the limits of each of its fields except the model's name."""

    base: dict[str, Any]
    fields: dict[str, Limit]


def _ask(base: dict[str, Any], **fields: Limit) -> Ask:
    return Ask(base=base, fields=fields)


_SOURCE_FIELDS = {"text": texts(MAX_SOURCE_LEN - 1), "token_ids": _SOURCE_IDS}
_TARGET_FIELDS = {"target_text": texts(MAX_TARGET_LEN - 1, empty=True), "target_token_ids": _TARGET_IDS}
_LANGUAGES = {"source_language": _LANGUAGE, "target_language": _LANGUAGE}
_ANY_TEXT = Limit(
    taken=(
        "",
        "x",
        "\x00",
        "\u0301",
        "x" * (MAX_TEXT_BYTES - 1),
        "x" * MAX_TEXT_BYTES,
        "\u00e9" * (MAX_TEXT_BYTES // 2),
    ),
    refused=("x" * (MAX_TEXT_BYTES + 1), " " * (MAX_TEXT_BYTES + 1), "\u00e9" * (MAX_TEXT_BYTES // 2 + 1)),
)
_SHORT = {"max_new_tokens": 2}
_OPTIONS = Limit(taken=({}, _SHORT))  # its fields are in OPTIONS

GENERATION = {
    **_SOURCE_FIELDS, **_LANGUAGES, "options": _OPTIONS, "priority": _PRIORITY,
    # The base of these requests has no beams.
    "report_beam_steps": Limit(taken=(False,), refused=(True,)),
}  # fmt: skip

# Limits by request message. Those that only an encoder answers are in `ENCODER`.
REQUESTS: dict[str, Ask] = {
    "GenerateRequest": Ask(base={**_SOURCE, "options": _SHORT}, fields=GENERATION),
    "GenerateUnaryRequest": Ask(base={**_SOURCE, "options": _SHORT}, fields=GENERATION),
    "ScoreRequest": _ask(
        {**_SOURCE, "target_text": "wort"},
        **_SOURCE_FIELDS, **_TARGET_FIELDS, **_LANGUAGES, num_alternatives=whole_numbers(0, 20), priority=_PRIORITY,
    ),
    "EmbedRequest": _ask(
        _SOURCE,
        **_SOURCE_FIELDS,
        pooling=Limit(taken=(0, 1, 2, 3, 5), refused=(6, -1)),
        normalize=Limit(taken=(False, True)),
        text_pair=Limit(taken=(), refused=("wort",)),
        source_language=_LANGUAGE,
        priority=_PRIORITY,
    ),
    "ExplainRequest": _ask(
        {**_SOURCE, "target_text": "wort"},
        **_SOURCE_FIELDS,
        **_LANGUAGES,
        target_text=texts(MAX_TARGET_LEN - 1, empty=True),
        # The maps begin with the begin token, so there is one token less than Score accepts with its end token.
        target_token_ids=_TARGET_IDS,
        text_pair=Limit(taken=(), refused=("wort",)),
        priority=_PRIORITY,
    ),
    "NextTokenRequest": _ask(
        _SOURCE,
        **_SOURCE_FIELDS,
        **_LANGUAGES,
        options=_OPTIONS,
        priority=_PRIORITY,
        # The next token is part of the target, and no generated token ends it.
        generated_ids=Limit(
            taken=(ids(0), ids(1), ids(MAX_TARGET_LEN - 2), ids(MAX_TARGET_LEN - 1), {"ids": [VOCABULARY - 1]}),
            refused=(ids(MAX_TARGET_LEN), ids(2, ended=True), {"ids": [VOCABULARY]}, {"ids": [HIGHEST_UINT32]}),
        ),
        num_tokens=Limit(taken=(0, 1, 999, 1000), refused=(1001, HIGHEST_UINT32)),
    ),
    "GetPositionsRequest": _ask(
        {}, num_positions=Limit(taken=(0, 1, 255, 256), refused=(257, HIGHEST_UINT32))
    ),
    "TokenizeRequest": _ask({"text": "wort"}, text=_ANY_TEXT),
    "DetokenizeRequest": _ask(
        {"token_ids": [WORD_ID]},
        token_ids=Limit(
            taken=([], [0], [VOCABULARY - 1], [WORD_ID] * MAX_TEXT_BYTES),
            refused=([VOCABULARY], [HIGHEST_UINT32], [WORD_ID] * (MAX_TEXT_BYTES + 1)),
        ),
    ),
    "GetModelRequest": _ask({}),
    "ListModelsRequest": _ask({}),
}  # fmt: skip

MODEL = Limit(taken=("", "en-de"), refused=("nobody", "en-de ", "EN-DE", "x" * 1000))
