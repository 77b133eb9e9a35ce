"""Table of sampling controls: one field for each control, with its type, default, range and description.

A new control needs a row here, a field of the same name in `GenerateOptions` of inference.proto and in the client's
`Options`, and the code that implements it. Validation, flags, parameters of the Open Inference Protocol and the tables
of docs/CONTROLS.md are made from this table; tests compare the contract and `Options` with it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.controls.control import Kind, Range, above_zero, at_least, between, control, rows_of

MAX_SEED = 2**64 - 1
MAX_BEAM_WIDTH = 16
MAX_NUM_LOGPROBS = 20
MAX_BIAS = 1_000_000
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 256


class EarlyStopping(enum.Enum):
    """Condition that ends a beam search; the values are those of transformers' `early_stopping`."""

    HEURISTIC = False  # no live beam scores better, at its present length, than the worst finished hypothesis
    FIRST = True  # beam_width hypotheses are finished
    NEVER = "never"  # no live beam could score better even at its best length


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingFields:
    """Controls of the choice of the target's tokens, as the service stores them."""

    max_new_tokens: int | None = control(
        None,
        Kind.WHOLE_NUMBER,
        "maximum number of tokens of an output, the end token included",
        range=at_least(1),
        default_text="the model's limit",
        transformers="`max_new_tokens`",
    )
    min_new_tokens: int = control(
        0,
        Kind.WHOLE_NUMBER,
        "minimum number of tokens before the end token or a stop id; stop strings can end an output earlier",
        range=at_least(0, words="0 (none) or more"),
        transformers="`min_new_tokens`",
    )
    time_limit_s: float | None = control(
        None,
        Kind.WHOLE_NUMBER,
        "time in milliseconds from arrival, including waiting, after which the output so far is returned",
        name="time_limit_millis",
        range=Range("above 0", lambda value: value > 0.0),
        range_text="at least 1",
        metavar="MS",
        transformers="`max_time`",
    )
    temperature: float = control(
        0.0,
        Kind.NUMBER,
        "0 chooses the most likely token; above 0, logits are divided by it before sampling",
        range=between(0, 100),
        is_for_sampling=True,
        metavar="T",
        transformers="`do_sample`, `temperature`",
    )
    top_k: int = control(
        0,
        Kind.WHOLE_NUMBER,
        "keep the K most likely tokens",
        range=at_least(0, words="0 (off) or more"),
        off=0,
        is_for_sampling=True,
        metavar="K",
        transformers="`top_k`",
    )
    top_p: float = control(
        1.0,
        Kind.NUMBER,
        "keep the most likely tokens whose probabilities together reach P",
        range=above_zero(1),
        off=1,
        is_for_sampling=True,
        metavar="P",
        transformers="`top_p`",
    )
    min_p: float = control(
        0.0,
        Kind.NUMBER,
        "keep tokens with at least P times the probability of the most likely one",
        range=between(0, 1),
        off=0,
        is_for_sampling=True,
        metavar="P",
        transformers="`min_p`",
    )
    typical_p: float = control(
        1.0,
        Kind.NUMBER,
        "keep the locally typical tokens whose probabilities together reach P",
        range=above_zero(1),
        off=1,
        is_for_sampling=True,
        metavar="P",
        transformers="`typical_p`",
    )
    seed: int = control(
        0,
        Kind.WHOLE_NUMBER,
        "key of the random numbers: the same seed gives the same tokens",
        range=Range(f"between 0 and {MAX_SEED}", lambda value: 0 <= value <= MAX_SEED),
        range_text="between 0 and 2^64 - 1",
        default_text="random, reported",
        transformers="none: its generator is shared",
    )
    num_return_sequences: int = control(
        1,
        Kind.WHOLE_NUMBER,
        "number of outputs: samples, or the best hypotheses, best first",
        range=at_least(1),
        transformers="`num_return_sequences`",
    )
    beam_width: int = control(
        1,
        Kind.WHOLE_NUMBER,
        "number of live hypotheses of a beam search",
        range=between(1, MAX_BEAM_WIDTH),
        off=1,
        transformers="`num_beams`",
    )
    length_penalty: float = control(
        1.0,
        Kind.NUMBER,
        "score of a hypothesis: its log-probability divided by its length to this power",
        range=between(-10, 10),
        transformers="`length_penalty`",
    )
    early_stopping: EarlyStopping = control(  # noqa: RUF009  returns a dataclass field, as for the others
        EarlyStopping.HEURISTIC,
        Kind.CHOICE,
        "condition for the end of a beam search",
        transformers='`early_stopping`: `False`, `True`, `"never"`',
    )
    repetition_penalty: float = control(
        1.0,
        Kind.NUMBER,
        "divides positive logits of earlier tokens, multiplies negative ones; begin token and prefix count",
        range=above_zero(100),
        off=1,
        transformers="`repetition_penalty`",
    )
    presence_penalty: float = control(
        0.0,
        Kind.NUMBER,
        "subtracted once from the logit of a token that was produced; the prefix does not count",
        range=between(-100, 100),
        off=0,
    )
    frequency_penalty: float = control(
        0.0,
        Kind.NUMBER,
        "subtracted from a token's logit once for each time it was produced; the prefix does not count",
        range=between(-100, 100),
        off=0,
    )
    no_repeat_ngram_size: int = control(
        0,
        Kind.WHOLE_NUMBER,
        "no sequence of N tokens occurs twice, begin token and prefix included",
        range=at_least(0, words="0 (off) or more"),
        off=0,
        transformers="`no_repeat_ngram_size`",
    )
    logit_bias: tuple[tuple[int, float], ...] = control(
        (),
        Kind.BIASES,
        "added to a token's logit",
        range=Range(
            f"between {-MAX_BIAS:,} and {MAX_BIAS:,} for each token id", lambda value: -MAX_BIAS <= value <= MAX_BIAS
        ),
        max_entries=1024,
        transformers="`sequence_bias` of single tokens",
    )
    forced_first_id: int | None = control(
        None,
        Kind.TOKEN_ID,
        "first token to produce: the language code of mBART, NLLB and M2M-100",
        transformers="`forced_bos_token_id`",
    )
    suppressed_ids: tuple[int, ...] = control(
        (), Kind.TOKEN_IDS, "tokens that are never chosen", max_entries=1024, transformers="`suppress_tokens`"
    )
    allowed_ids: tuple[int, ...] = control(
        (),
        Kind.TOKEN_IDS,
        "the only tokens that can be chosen, in addition to the end token",
        max_entries=1024,
        default_text="all",
        transformers="`prefix_allowed_tokens_fn`",
    )
    use_shortlist: bool = control(
        False,
        Kind.SWITCH,
        "choose only among the likely target tokens of the source's tokens, by the model's shortlist",
    )
    stop_ids: tuple[int, ...] = control(
        (),
        Kind.TOKEN_IDS,
        "tokens that end an output like the end token",
        max_entries=16,
        transformers="`eos_token_id`, a list",
    )
    ignore_eos: bool = control(False, Kind.SWITCH, "never choose the end token", transformers="`suppress_tokens`")
    num_logprobs: int | None = control(
        None,
        Kind.WHOLE_NUMBER,
        "return log-probabilities of the chosen tokens, and of K alternatives for each",
        range=between(0, MAX_NUM_LOGPROBS),
        default_text="absent, none",
        metavar="K",
        transformers="`output_scores`",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFields:
    """Controls that need a tokenizer: the beginning of a target, and texts that end it. None or empty is not set."""

    prefix_text: str | None = control(
        None,
        Kind.TEXT,
        "first words of the target, which are not generated and not returned",
        range_text="below the model's limit",
        transformers="`decoder_input_ids`",
    )
    prefix_ids: Sequence[int] | None = control(
        None,
        Kind.TOKEN_IDS,
        "first target tokens as ids, without begin, padding and end tokens; for decoder-only models without end token",
        range_text="below the model's limit",
        transformers="`decoder_input_ids`",
    )
    stop_strings: Sequence[str] = control(
        (),
        Kind.TEXTS,
        "texts that end an output and are not returned",
        range_text=f"{MAX_STOP_STRINGS} of 1 to {MAX_STOP_STRING_LEN} characters",
        max_entries=MAX_STOP_STRINGS,
        transformers="`stop_strings`",
    )


SAMPLING_CONTROLS = rows_of(SamplingFields)
TEXT_CONTROLS = rows_of(TextFields)
CONTROLS = SAMPLING_CONTROLS + TEXT_CONTROLS
