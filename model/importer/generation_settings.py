"""Conversion of a checkpoint's generation_config.json to the generation defaults of a bundle.

Settings without a counterpart here are ignored: forced_eos_token_id, renormalize_logits, diverse beams, constraints.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from antiphon.model.bundle.manifest import GenerationDefaults
from antiphon.model.checkpoints.settings import read_json
from antiphon.model.config import ModelConfig
from antiphon.model.text.format import TextFormat

Settings = Mapping[str, Any]

_EARLY_STOPPING = {True: "first", False: "heuristic", "never": "never"}
# Values that mean "off" or are equal to our own defaults; the bundle does not need them.
_OFF: dict[str, tuple[object, ...]] = {
    "beam_width": (1,),
    "length_penalty": (1.0,),
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "min_new_tokens": (0,),
    "top_p": (1.0,),
    "top_k": (0,),
}


def with_start_tokens(folder: Path, settings: Settings) -> Settings:
    """Return the settings with decoder_start_token_id and forced_bos_token_id of generation_config.json, if set."""
    stated = read_json(folder / "generation_config.json")
    names = ("decoder_start_token_id", "forced_bos_token_id")
    return {**settings, **{name: stated[name] for name in names if stated.get(name) is not None}}


def generation_defaults(folder: Path, settings: Settings, config: ModelConfig, text: TextFormat) -> GenerationDefaults:
    """Return the generation defaults of a checkpoint; old checkpoints have them in config.json (`settings`).

    Invalid values are left out and reported on standard error. Raises SourceError if the file is not JSON.
    """
    stated = read_json(folder / "generation_config.json")
    given = {name: value for name, value in (stated or settings).items() if value is not None}
    fields = {**_lengths(given, config), **_search(given), **_sampling(given), **_tokens(given, config, text)}
    kept = {name: value for name, value in fields.items() if value is not None and value not in _OFF.get(name, ())}
    try:
        return GenerationDefaults.model_validate(kept)
    except ValidationError as error:
        refused = {str(problem["loc"][0]): problem for problem in error.errors()}
    for name, problem in refused.items():
        print(f"{folder}: {name} of its generation settings is left out: {problem['msg']}", file=sys.stderr)
    return GenerationDefaults.model_validate({name: kept[name] for name in kept.keys() - refused.keys()})


def _lengths(given: Settings, config: ModelConfig) -> dict[str, Any]:
    """Return limits of new tokens from max_new_tokens and min_new_tokens, or from max_length and min_length.

    max_length and min_length also count the begin token. In a decoder-only model they count a prompt of unknown length,
    so they are ignored.
    """
    if config.architecture == "decoder":
        given = {name: value for name, value in given.items() if name not in ("max_length", "min_length")}
    most = given.get("max_new_tokens") or (given["max_length"] - 1 if "max_length" in given else None)
    least = given.get("min_new_tokens") or (given["min_length"] - 1 if "min_length" in given else None)
    most = min(most, config.max_target_len) if most and most > 0 else None
    least = least if least and least > 0 and least <= (most or config.max_target_len) else None
    return dict(max_new_tokens=most, min_new_tokens=least)


def _search(given: Settings) -> dict[str, Any]:
    width = given.get("num_beams", 1)
    fields = dict(
        repetition_penalty=given.get("repetition_penalty"), no_repeat_ngram_size=given.get("no_repeat_ngram_size")
    )
    if width == 1:
        return fields
    early = given.get("early_stopping", False)
    return fields | dict(
        beam_width=width,
        length_penalty=given.get("length_penalty"),
        early_stopping=_EARLY_STOPPING.get(early, early) if early is not False else None,
    )


def _sampling(given: Settings) -> dict[str, Any]:
    """Return the sampling parameters if do_sample is set; beam search with sampling becomes beam search."""
    if not given.get("do_sample") or given.get("num_beams", 1) > 1:
        return {}
    # transformers' defaults for settings that the checkpoint does not have
    return dict(temperature=given.get("temperature", 1.0), top_k=given.get("top_k", 50), top_p=given.get("top_p"))


def _tokens(given: Settings, config: ModelConfig, text: TextFormat) -> dict[str, Any]:
    """Return forced, suppressed and stop tokens; a forced language token is left out, TextFormat has it."""
    forced = given.get("forced_bos_token_id")
    if forced in text.languages.values():
        forced = None
    banned = [words[0] for words in given.get("bad_words_ids", ()) if len(words) == 1]
    banned += given.get("suppress_tokens", ())
    known = sorted({index for index in banned if 0 <= index < config.vocab_size and index != config.eos_id})
    return dict(
        forced_first_id=forced, suppressed_ids=tuple(known) or None, stop_ids=_further_ends(given, config) or None
    )


def _further_ends(given: Settings, config: ModelConfig) -> tuple[int, ...]:
    """Return end tokens other than eos_id; chat models have several."""
    ends = given.get("eos_token_id")
    if not isinstance(ends, list):
        return ()
    return tuple(dict.fromkeys(end for end in ends if 0 <= end < config.vocab_size and end != config.eos_id))
