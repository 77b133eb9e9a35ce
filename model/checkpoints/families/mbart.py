"""mBART (Liu et al. 2020) and mBART-50 (Tang et al. 2020): BART over many languages, norms before the layers."""

from __future__ import annotations

from pathlib import Path

from antiphon.model.checkpoints.families import encoder_decoder
from antiphon.model.checkpoints.families.family import Family
from antiphon.model.checkpoints.families.text_formats import Languages, tokenizers_format
from antiphon.model.checkpoints.settings import Settings, read_json, with_default_languages
from antiphon.model.config import ModelConfig
from antiphon.model.text.format import TextFormat

_UNKNOWN_ID = 3


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
    described = read_json(folder / "tokenizer_config.json")
    is_50 = "50" in str(described.get("tokenizer_class", settings.get("tokenizer_class", "")))
    found = tokenizers_format(
        folder,
        languages=Languages(place="first" if is_50 else "begin"),
        template=("$source_language", "$text", "</s>") if is_50 else ("$text", "</s>", "$source_language"),
    )
    return with_default_languages(found, "en_XX", settings.get("forced_bos_token_id") if is_50 else config.bos_id)


FAMILY = Family(
    name="mBART",
    model_types=("mbart",),
    configure=configure,
    settle=encoder_decoder.settle_ties,
    load=encoder_decoder.load,
    text=text,
    reference="AutoModelForSeq2SeqLM",
)
