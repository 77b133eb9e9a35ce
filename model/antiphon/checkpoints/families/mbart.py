"""mBART (Liu et al. 2020) and mBART-50 (Tang et al. 2020): multilingual BART with pre-norm layers."""

from __future__ import annotations

from pathlib import Path

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.architectures import encoder_decoder
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings, read_json, with_default_languages
from antiphon.checkpoints.text_formats import Languages, tokenizers_format
from antiphon.text.format import TextFormat

_UNKNOWN_ID = 3


def configure(settings: Settings) -> ModelConfig:
    """Return BART's shape with pre-norm layers.

    The first decoder input is a language token in mBART and the end token in mBART-50.
    """
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
    """Return the text format with its language tokens.

    mBART: text, end token, source language; the target language is the begin token.
    mBART-50: source language, text, end token; the target language follows the begin token. tokenizer_class names
    either. Where it is a generic class, the template of tokenizer.json and a forced first token show which one it is.
    """
    described = read_json(folder / "tokenizer_config.json")
    name = str(described.get("tokenizer_class") or settings.get("tokenizer_class") or "")
    forced = settings.get("forced_bos_token_id")
    format_ = tokenizers_format(folder, languages=Languages(place="begin"))
    is_50 = "50" in name
    if not name.startswith("MBart"):
        is_50 = format_.template[0] == "$source_language" or forced in format_.languages.values()
    if name.startswith("MBart") and "$source_language" not in format_.template:
        template = ("$source_language", "$text", "</s>") if is_50 else ("$text", "</s>", "$source_language")
        format_ = tokenizers_format(folder, languages=Languages(place="begin"), template=template)
    if is_50 and format_.languages:
        format_ = format_.model_copy(update=dict(target_language_place="first"))
    return with_default_languages(format_, "en_XX", forced if is_50 else config.bos_id)


FAMILY = Family(
    name="mBART",
    model_types=("mbart",),
    configure=configure,
    resolve=encoder_decoder.resolve_ties,
    load=encoder_decoder.load,
    text=text,
    reference="AutoModelForSeq2SeqLM",
)
