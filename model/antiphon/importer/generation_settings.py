"""Conversion of a checkpoint's generation settings, as transformers resolves them, to the defaults of a bundle."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import GenerationDefaults
from antiphon.checkpoints.gguf_files import SPECIAL_IDS, is_gguf, read_settings
from antiphon.checkpoints.settings import in_one_line, read_json
from antiphon.controls.rules import RULES
from antiphon.controls.table import SAMPLING_CONTROLS, EarlyStopping, SamplingFields, TextFields
from antiphon.errors import SourceError
from antiphon.text.format import TextFormat

Settings = Mapping[str, Any]

_FILE = "generation_config.json"
_EARLY_STOPPING = {True: "first", False: "heuristic", "never": "never"}
# Values that change nothing; a bundle does not need them.
_OFF: dict[str, object] = {control.field: control.off for control in SAMPLING_CONTROLS if control.off is not None}
_OFF |= {"length_penalty": 1.0, "early_stopping": "heuristic", "num_return_sequences": 1, "min_new_tokens": 0}
# Settings that change answers in transformers and have no counterpart here, with their neutral values.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0.0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0.0,),
    "stop_strings": ([],),
    "top_h": (),
    "watermarking_config": (),
    "word_penalty": (0.0,),  # of Marian
}
# Settings that are compared as the checkpoint has them.
_COMPARED = ("early_stopping", "length_penalty", "repetition_penalty", "no_repeat_ngram_size")
_REASONS = {
    "forced_eos_token_id": "an answer that reaches the maximum length ends there, without a forced end token",
    "stop_strings": "in transformers an answer contains the stop string, here not; a request can set stop_strings",
}


def resolved_generation(folder: Path) -> Any:
    """Return the GenerationConfig that transformers gives to the model of a checkpoint.

    It is read from generation_config.json alone, or from config.json if that file does not exist. A GGUF file has only
    the ids of special tokens.
    Raises SourceError naming the file.
    """
    from transformers import GenerationConfig

    if is_gguf(folder):
        stated = read_settings(folder)
        make: Any = GenerationConfig
        return make(**{name: stated[name] for name in SPECIAL_IDS if name in stated})
    own: dict[str, Any] = {}
    if not read_json(folder / _FILE):
        own = {"config_file_name": "config.json", "_from_model_config": True}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return GenerationConfig.from_pretrained(folder, local_files_only=True, **own)
    except Exception as error:  # OSError for a damaged file, ValueError for values that contradict each other
        name = own.get("config_file_name", _FILE)
        raise SourceError(f"{folder / str(name)}: transformers refuses its settings: {in_one_line(error)}") from None


def with_start_and_end(settings: Settings, generation: Settings, notes: list[str]) -> Settings:
    """Return the settings of config.json with the ids of generation settings, which alone decide in `generate`.

    These are the first decoder input, which is the begin token if none is named, the forced first token and the end
    tokens. Without any end token that of config.json is kept, and reported in `notes`.
    """
    begin = generation.get("bos_token_id")
    start = generation.get("decoder_start_token_id")
    if start is None and settings.get("is_encoder_decoder"):
        start = begin
    chosen = {
        "bos_token_id": begin,
        "decoder_start_token_id": start,
        "eos_token_id": generation.get("eos_token_id"),
    }
    if chosen["eos_token_id"] is None and (end := settings.get("eos_token_id")) is not None:
        notes.append(
            f"the generation settings name no end token, so transformers never stops; the end token of config.json, "
            f"{end}, ends an answer here"
        )
    present = {name: value for name, value in chosen.items() if value is not None}
    return {**settings, **present, "forced_bos_token_id": generation.get("forced_bos_token_id")}


def generation_defaults(
    generation: Settings, config: ModelConfig, text: TextFormat, notes: list[str]
) -> GenerationDefaults:
    """Return the generation defaults of a checkpoint; settings that are left out are reported in `notes`.

    generation: settings of a GenerationConfig of transformers, without those that are None.
    """
    _report_unsupported(generation, notes)
    fields = {
        **_lengths(generation, config, notes),
        **_search(generation, notes),
        **_sampling(generation, notes),
        **_tokens(generation, config, text, notes),
    }
    fields = {name: value for name, value in fields.items() if value is not None and value != _OFF.get(name)}
    fields = _in_range(fields, notes)
    return GenerationDefaults.model_validate(_compatible(fields, notes))


def comparable_generation(
    generation: Settings, config: ModelConfig, text: TextFormat, defaults: GenerationDefaults
) -> dict[str, Any]:
    """Return settings for transformers' `generate` of which an answer equals ours: those of the checkpoint, greedy.

    Settings that `generation_defaults` leaves out are not among them, and the lengths are those of compared_tokens.
    Default languages are given as in a request that names them.
    """
    kept = {name: value for name, value in generation.items() if name in _COMPARED}
    if defaults.beam_width is None:
        kept = {name: value for name, value in kept.items() if name not in ("early_stopping", "length_penalty")}
    language = text.languages.get(text.default_target_language or "")
    first = language if text.target_language_place == "first" else None
    begin = language if text.target_language_place == "begin" else None
    return kept | dict(
        num_beams=defaults.beam_width or 1,
        max_new_tokens=compared_tokens(defaults, config),
        min_new_tokens=min(defaults.min_new_tokens or 0, compared_tokens(defaults, config)),
        suppress_tokens=[*defaults.suppressed_ids, *([config.eos_id] if defaults.ignore_eos else [])] or None,
        sequence_bias={(token_id,): bias for token_id, bias in defaults.logit_bias} or None,
        forced_bos_token_id=defaults.forced_first_id if first is None else first,
        decoder_start_token_id=config.bos_id if begin is None else begin,
        eos_token_id=[config.eos_id, *defaults.stop_ids],
        pad_token_id=config.pad_id,
        do_sample=False,
    )


def sampling_settings(generation: Settings, defaults: GenerationDefaults) -> dict[str, Any]:
    """Return the settings with which the checkpoint samples its tokens; empty if its answers are not random."""
    if defaults.temperature is None:
        return {}
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p")
    return {"do_sample": True, **{name: generation[name] for name in names if name in generation}}


def compared_tokens(defaults: GenerationDefaults, config: ModelConfig) -> int:
    """Return the maximum number of new tokens of an answer that is compared with the original's."""
    most = max(16, min(64, (defaults.min_new_tokens or 0) + 8))
    return min(most, defaults.max_new_tokens or most, config.max_target_len // 2)


def _report_unsupported(generation: Settings, notes: list[str]) -> None:
    for name, neutral in UNSUPPORTED.items():
        value = generation.get(name)
        if value is not None and value not in neutral:
            reason = _REASONS.get(name, "it has no counterpart")
            notes.append(f"{name}={value!r} of its generation settings is left out: {reason}")


def _in_range(fields: Settings, notes: list[str]) -> dict[str, Any]:
    """Return the fields whose values have the type and range of a default; report the others."""
    try:
        GenerationDefaults.model_validate(fields)
    except ValidationError as error:
        refused = {str(problem["loc"][0]): problem["msg"] for problem in error.errors()}
    else:
        return dict(fields)
    notes += [f"{name}={fields[name]!r} of its generation settings is left out: {refused[name]}" for name in refused]
    return {name: value for name, value in fields.items() if name not in refused}


def _compatible(fields: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the fields without those that break a rule between controls, by which a server would refuse them."""
    while broken := next((rule for rule in RULES if rule.is_broken(_controls(fields), TextFields())), None):
        value = fields.pop(broken.field)
        notes.append(
            f"{broken.field}={value!r} of its generation settings is left out: it must be {broken.allowed} if "
            f"{broken.condition}: {broken.reason}"
        )
    return fields


def _controls(fields: Settings) -> SamplingFields:
    early = fields.get("early_stopping")
    return SamplingFields(**{**fields, **({"early_stopping": EarlyStopping[early.upper()]} if early else {})})


def _lengths(generation: Settings, config: ModelConfig, notes: list[str]) -> dict[str, Any]:
    """Return limits of new tokens from max_new_tokens and min_new_tokens, or from max_length and min_length.

    max_length and min_length also count the begin token. In a decoder-only model they count a prompt of unknown length,
    so they are left out.
    """
    if config.architecture == "decoder":
        for name in ("max_length", "min_length"):
            instead = name.replace("length", "new_tokens")
            if generation.get(name) and instead not in generation:
                notes.append(
                    f"{name}={generation[name]} of its generation settings is left out: it counts the tokens of the "
                    f"prompt too; a request can set {instead}"
                )
        generation = {name: value for name, value in generation.items() if name not in ("max_length", "min_length")}
    most = generation.get("max_new_tokens") or (generation["max_length"] - 1 if generation.get("max_length") else None)
    least = generation.get("min_new_tokens") or (generation["min_length"] - 1 if generation.get("min_length") else None)
    most = min(most, config.max_target_len) if most and most > 0 else None
    longest = most or config.max_target_len
    if least is not None and least > longest:
        notes.append(
            f"min_new_tokens={least} of its generation settings becomes {longest}, the most that an answer can have"
        )
        least = longest
    time_limit_s = generation.get("max_time")
    return dict(max_new_tokens=most, min_new_tokens=least if least and least > 0 else None, time_limit_s=time_limit_s)


def _search(generation: Settings, notes: list[str]) -> dict[str, Any]:
    """Return penalties, and the settings of a beam search if there are several beams; without them they do nothing."""
    fields = {name: generation.get(name) for name in ("repetition_penalty", "no_repeat_ngram_size")}
    fields["num_return_sequences"] = generation.get("num_return_sequences")
    width = generation.get("num_beams", 1)
    if width == 1:
        return fields
    if generation.get("renormalize_logits"):
        notes.append(
            "renormalize_logits of its generation settings is left out: the scores of hypotheses keep the share of "
            "suppressed tokens, which is tiny in a trained model"
        )
    early = generation.get("early_stopping", False)
    return fields | dict(
        beam_width=width,
        length_penalty=generation.get("length_penalty"),
        early_stopping=_EARLY_STOPPING.get(early, early),
    )


def _sampling(generation: Settings, notes: list[str]) -> dict[str, Any]:
    """Return the sampling parameters if do_sample is set; without it they do nothing in transformers either."""
    if not generation.get("do_sample"):
        return {}
    if generation.get("num_beams", 1) > 1:
        notes.append("do_sample of its generation settings is left out: a beam search does not sample here")
        return {}
    # transformers' defaults for settings that the checkpoint does not have
    fields = dict(temperature=generation.get("temperature", 1.0), top_k=generation.get("top_k", 50))
    return fields | {name: generation.get(name) for name in ("top_p", "min_p", "typical_p")}


def _tokens(generation: Settings, config: ModelConfig, text: TextFormat, notes: list[str]) -> dict[str, Any]:
    """Return forced, suppressed, biased and stop tokens; a forced language token is left out, TextFormat has it."""
    forced = generation.get("forced_bos_token_id")
    words: Sequence[Sequence[int]] = generation.get("bad_words_ids") or ()
    suppressed: Sequence[int] = generation.get("suppress_tokens") or ()
    biases = _biases(generation.get("sequence_bias") or ())
    for name, sequences in (("bad_words_ids", words), ("sequence_bias", biases)):
        if several := [list(ids) for ids in sequences if len(ids) != 1]:
            notes.append(f"{name} of its generation settings leaves out {several[:3]}: only single tokens are possible")
    banned = [ids[0] for ids in words if len(ids) == 1 and ids[0] != config.eos_id] + [*suppressed]
    return dict(
        forced_first_id=None if forced in text.languages.values() else forced,
        suppressed_ids=tuple(sorted({*_known(banned, config)} - {config.eos_id})) or None,
        logit_bias=tuple(sorted((ids[0], bias) for ids, bias in biases.items() if len(ids) == 1)) or None,
        stop_ids=_stop_ids(generation.get("eos_token_id"), config),
        ignore_eos=True if config.eos_id in suppressed else None,
    )


def _biases(stated: Any) -> dict[tuple[int, ...], float]:
    """Return a sequence_bias, which JSON files have as a list of [ids, bias], as a mapping."""
    pairs: Iterable[Any] = stated.items() if isinstance(stated, Mapping) else stated
    return {tuple(ids): float(bias) for ids, bias in pairs}


def _stop_ids(ends: Any, config: ModelConfig) -> tuple[int, ...] | None:
    """Return end tokens other than eos_id; chat models have several."""
    listed = ends if isinstance(ends, list) else []
    return tuple(dict.fromkeys(end for end in _known(listed, config) if end != config.eos_id)) or None


def _known(ids: Iterable[int], config: ModelConfig) -> list[int]:
    return [token_id for token_id in ids if 0 <= token_id < config.vocab_size]
