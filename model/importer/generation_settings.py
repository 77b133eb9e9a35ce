"""A checkpoint's generation_config.json as the defaults of a bundle: the decoding that its authors meant.

What has no counterpart here is left out: forced_eos_token_id, renormalize_logits, diverse beams, constraints of words.
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
# Values that mean "off" or that are our own defaults: nothing need be said of them.
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
    """Settings with the tokens that targets begin with as generation_config.json says them, where it does."""
    stated = read_json(folder / "generation_config.json")
    names = ("decoder_start_token_id", "forced_bos_token_id")
    return {**settings, **{name: stated[name] for name in names if stated.get(name) is not None}}


def generation_defaults(folder: Path, settings: Settings, config: ModelConfig, text: TextFormat) -> GenerationDefaults:
    """Defaults of a checkpoint; an old one keeps them in config.json, whose `settings` these are.

    What no server would take is left out, and told on standard error. Raises SourceError where the file is no JSON.
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
    """`max_length` and `min_length` count the begin token too, which is given and not new; or a prompt nobody knows."""
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
    """Only where the checkpoint says do_sample; a beam search of samples is not known here, and the beams win."""
    if not given.get("do_sample") or given.get("num_beams", 1) > 1:
        return {}
    # transformers' own defaults for what a sampling checkpoint does not say
    return dict(temperature=given.get("temperature", 1.0), top_k=given.get("top_k", 50), top_p=given.get("top_p"))


def _tokens(given: Settings, config: ModelConfig, text: TextFormat) -> dict[str, Any]:
    """Tokens that are forced or forbidden; a forced language is the text format's to place."""
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
    """What ends an output beside the end token: chat models name several."""
    ends = given.get("eos_token_id")
    if not isinstance(ends, list):
        return ()
    return tuple(dict.fromkeys(end for end in ends if 0 <= end < config.vocab_size and end != config.eos_id))
