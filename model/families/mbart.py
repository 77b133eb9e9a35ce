"""mBART (Liu et al. 2020) and mBART-50 (Tang et al. 2020): BART over many languages, norms before the layers."""

from __future__ import annotations

import re
from pathlib import Path

from antiphon.model.config import ModelConfig
from antiphon.model.families import encoder_decoder
from antiphon.model.families.family import Family
from antiphon.model.families.settings import Settings
from antiphon.model.families.text_files import languages_of, read_json, special_ids_of, tokenizers_file
from antiphon.model.text_format import TextFormat

_UNKNOWN_ID = 3
_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z]{2}")


def configure(settings: Settings) -> ModelConfig:
    """BART's choices with norms before; the first decoder input is a language in mBART, the end token in mBART-50."""
    ids = encoder_decoder.special_ids(settings, pad=1, begin=2, eos=2, unk=_UNKNOWN_ID)
    return encoder_decoder.configure(
        settings,
        **ids,
        positions="learned",
        positions_offset=2,
        embedding_norm=True,
        norm_placement="pre",
        output_bias=True,
    )


def text(folder: Path, settings: Settings, config: ModelConfig) -> TextFormat:
    """Where the languages stand: behind text and end, and as the begin token, in mBART; before both in mBART-50."""
    file = tokenizers_file(folder, "mBART")
    described = read_json(folder / "tokenizer_config.json")
    languages = languages_of(file, _LANGUAGE)
    is_50 = "50" in str(described.get("tokenizer_class", settings.get("tokenizer_class", "")))
    forced = settings.get("forced_bos_token_id")
    codes = {index: code for code, index in languages.items()}
    return TextFormat(
        kind="tokenizers",
        source=file.name,
        special_ids=special_ids_of(file, config, *languages.values()),
        template=("$source_language", "$text", config.eos_id)
        if is_50
        else ("$text", config.eos_id, "$source_language"),
        languages=languages,
        default_source_language=described.get("src_lang") or "en_XX",
        default_target_language=described.get("tgt_lang")
        or codes.get(forced if is_50 and forced is not None else config.bos_id),
        target_language_place="first" if is_50 else "begin",
    )


FAMILY = Family(
    name="mBART",
    model_types=("mbart",),
    configure=configure,
    settle=encoder_decoder.settle_ties,
    load=encoder_decoder.load,
    text=text,
    reference="AutoModelForSeq2SeqLM",
)
