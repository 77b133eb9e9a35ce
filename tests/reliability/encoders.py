"""Heads of a fake encoder with every task, and the limits of requests that an encoder answers in its own way."""

from antiphon.architecture.heads import HeadConfig
from tests.reliability.limits import Ask, Limit

HEADS = (
    HeadConfig(task="classify", labels=("low", "middle", "high")),
    HeadConfig(task="tag", labels=("O", "B-X", "I-X")),
    HeadConfig(task="fill_mask"),
)
# Values of the fake model.
VOCABULARY = 280
MAX_SOURCE_LEN = 32
AROUND = 2  # <s> before a text, </s> after it
WORD_ID = 70
MASK = "<mask>"
HIGHEST_UINT32 = 2**32 - 1

_PRIORITY = Limit(taken=(0, 1, 2), refused=(3, -1))
_LANGUAGE = Limit(taken=("",), refused=("de",))
_PAIR = Limit(taken=("the mat",), refused=("x y z " * 100,), blamed="text")


def _ids(count: int, first: int) -> dict[str, list[int]]:
    return {"ids": [first] + [WORD_ID] * (count - 1)}


def _source_ids(first: int = WORD_ID) -> Limit:
    room = MAX_SOURCE_LEN - AROUND
    return Limit(
        taken=(_ids(1, first), _ids(room - 1, first), _ids(room, first), {"ids": [first, VOCABULARY - 1]}),
        refused=({"ids": []}, _ids(room + 1, first), {"ids": [first, VOCABULARY]}, {"ids": [HIGHEST_UINT32, first]}),
    )


_TEXT = Limit(taken=("x", "the cat"), refused=("", " ", "\t\n", "x y z " * 100))


def encoder_requests(mask_id: int) -> dict[str, Ask]:
    """Return the limits by request message. mask_id: of the mask token."""
    return {
        "ClassifyRequest": Ask(
            base={"text": "the cat"},
            fields={
                "text": _TEXT,
                "token_ids": _source_ids(),
                "text_pair": _PAIR,
                "task": Limit(taken=(0, 2), refused=(1, 3, 5, 6, -1)),
                "top_k": Limit(taken=(0, 1, 3, 4, HIGHEST_UINT32)),
                "priority": _PRIORITY,
            },
        ),
        "ExplainRequest": Ask(
            base={"text": "the cat"},
            fields={
                "text": _TEXT,
                "token_ids": _source_ids(),
                "target_text": Limit(taken=(), refused=("", "the mat")),
                "target_token_ids": Limit(taken=(), refused=({"ids": []}, {"ids": [WORD_ID]})),
                "text_pair": _PAIR,
                "source_language": _LANGUAGE,
                "target_language": _LANGUAGE,
                "priority": _PRIORITY,
            },
        ),
        "TagRequest": Ask(base={"text": "the cat"}, fields={"text": _TEXT, "priority": _PRIORITY}),
        "FillMaskRequest": Ask(
            base={"text": f"the {MASK}"},
            fields={
                "text": Limit(taken=(MASK, f"the {MASK} sat"), refused=("", "the cat", f"{MASK} x y z " * 100)),
                "token_ids": _source_ids(mask_id),
                "top_k": Limit(taken=(0, 1, 99, 100), refused=(101, HIGHEST_UINT32)),
                "priority": _PRIORITY,
            },
        ),
    }
