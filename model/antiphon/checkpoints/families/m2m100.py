"""M2M-100 (Fan et al. 2020) and NLLB (NLLB team 2022): one architecture with different tokenizers."""

from __future__ import annotations

from pathlib import Path

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.architectures import encoder_decoder
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings, read_json, with_default_languages
from antiphon.checkpoints.text_formats import Languages, sentencepiece_format, tokenizers_format
from antiphon.text.format import TextFormat

_UNKNOWN_ID = 3


def configure(settings: Settings) -> ModelConfig:
    """Return the shape: fairseq's sinusoidal positions from row 2 on, pre-norm layers."""
    ids = encoder_decoder.special_ids(settings, pad=1, begin=2, eos=2, unk=_UNKNOWN_ID)
    return encoder_decoder.configure(settings, **ids, sinusoids="fairseq", positions_offset=2, norm_placement="pre")


def text(folder: Path, settings: Settings, config: ModelConfig) -> TextFormat:
    """Return the text format: source language, text, end token; a target starts with its language token.

    NLLB's tokenizer.json has the template: with `legacy_behaviour` the language follows the end token.
    """
    template, languages = ("$source_language", "$text", "</s>"), Languages(place="first")
    forced = settings.get("forced_bos_token_id")
    if not (folder / "vocab.json").is_file():
        nllb = tokenizers_format(folder, languages=languages)
        named = str(read_json(folder / "tokenizer_config.json").get("tokenizer_class"))
        if named.startswith("Nllb") and "$source_language" not in nllb.template:
            nllb = tokenizers_format(folder, languages=languages, template=template)
        return with_default_languages(nllb, "eng_Latn", forced)
    found = sentencepiece_format(
        folder,
        "sentencepiece.bpe.model",
        vocabulary="vocab.json",
        template=template,
        special_tokens=("<s>", "<pad>", "</s>", "<unk>", *_language_tokens(folder)),
        languages=languages,
    )
    return with_default_languages(found, "en", forced)


def _language_tokens(folder: Path) -> list[str]:
    """Return M2M-100's language tokens in the order of fairseq's list; their ids follow those of vocab.json."""
    from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

    named = read_json(folder / "tokenizer_config.json").get("language_codes") or "m2m100"
    return [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES[named]]


FAMILY = Family(
    name="M2M-100 and NLLB",
    model_types=("m2m_100",),
    configure=configure,
    resolve=encoder_decoder.resolve_ties,
    load=encoder_decoder.load,
    text=text,
    reference="AutoModelForSeq2SeqLM",
)
