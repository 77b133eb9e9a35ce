"""M2M-100 (Fan et al. 2020) and NLLB (NLLB team 2022), which share an architecture and differ in their tokenizers."""

from __future__ import annotations

import re
from pathlib import Path

from antiphon.model.config import ModelConfig
from antiphon.model.families import encoder_decoder
from antiphon.model.families.family import Family
from antiphon.model.families.settings import Settings
from antiphon.model.families.text_files import languages_of, read_json, special_ids_of
from antiphon.model.source_weights import SourceError
from antiphon.model.text_format import TextFormat

_UNKNOWN_ID = 3
_NLLB_LANGUAGE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")


def configure(settings: Settings) -> ModelConfig:
    """fairseq's sines from row 2 on, norms before the layers."""
    ids = encoder_decoder.special_ids(settings, pad=1, begin=2, eos=2, unk=_UNKNOWN_ID)
    return encoder_decoder.configure(settings, **ids, sinusoids="fairseq", positions_offset=2, norm_placement="pre")


def text(folder: Path, settings: Settings, config: ModelConfig) -> TextFormat:
    """The source's language, the text, the end token; the target's language is its first token."""
    described = read_json(folder / "tokenizer_config.json")
    is_nllb = (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file()
    files = _nllb(folder, config) if is_nllb else _m2m100(folder, config)
    codes = {index: code for code, index in files.languages.items()}
    return files.model_copy(
        update=dict(
            default_source_language=described.get("src_lang") or ("eng_Latn" if is_nllb else "en"),
            default_target_language=described.get("tgt_lang") or codes.get(settings.get("forced_bos_token_id", -1)),
        )
    )


def _nllb(folder: Path, config: ModelConfig) -> TextFormat:
    file = folder / "tokenizer.json"
    languages = languages_of(file, _NLLB_LANGUAGE)
    return TextFormat(
        kind="tokenizers",
        source=file.name,
        special_ids=special_ids_of(file, config, *languages.values()),
        template=("$source_language", "$text", config.eos_id),
        languages=languages,
        target_language_place="first",
    )


def _m2m100(folder: Path, config: ModelConfig) -> TextFormat:
    """Languages have the ids behind vocab.json's, in the order of fairseq's list."""
    from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

    for name in ("sentencepiece.bpe.model", "vocab.json"):
        if not (folder / name).is_file():
            raise SourceError(f"{folder} has no {name}, which M2M-100's tokenizer needs")
    described = read_json(folder / "tokenizer_config.json")
    names = FAIRSEQ_LANGUAGE_CODES[described.get("language_codes") or "m2m100"]
    first = len(read_json(folder / "vocab.json"))
    languages = {name: first + index for index, name in enumerate(names) if first + index < config.vocab_size}
    return TextFormat(
        kind="sentencepiece",
        source="sentencepiece.bpe.model",
        source_vocabulary="vocab.json",
        special_ids=tuple(sorted({config.pad_id, 0, config.eos_id, config.unk_id, *languages.values()})),
        template=("$source_language", "$text", config.eos_id),
        languages=languages,
        target_language_place="first",
    )


FAMILY = Family(
    name="M2M-100 and NLLB",
    model_types=("m2m_100",),
    configure=configure,
    settle=encoder_decoder.settle_ties,
    load=encoder_decoder.load,
    text=text,
    reference="AutoModelForSeq2SeqLM",
)
