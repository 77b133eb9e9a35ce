"""PEGASUS (Zhang et al. 2020)."""

from __future__ import annotations

from pathlib import Path

from antiphon.model.config import ModelConfig
from antiphon.model.families import encoder_decoder
from antiphon.model.families.family import Family
from antiphon.model.families.settings import Settings
from antiphon.model.families.text_files import sentencepiece_or_tokenizers, special_ids_of
from antiphon.model.text_format import TextFormat

# Before the pieces of its SentencePiece model come padding, end, two masks and 99 tokens without use.
_OFFSET = 103
_UNKNOWN_ID = _OFFSET + 2


def configure(settings: Settings) -> ModelConfig:
    """Sines in one half and cosines in the other, norms before the layers."""
    ids = encoder_decoder.special_ids(settings, pad=0, begin=0, eos=1, unk=0)
    fields = encoder_decoder.common_fields(settings)
    ids["unk_id"] = min(_UNKNOWN_ID, fields["vocab_size"] - 1)
    return encoder_decoder.configure(settings, **ids, sinusoids="halves", norm_placement="pre", output_bias=True)


def text(folder: Path, settings: Settings, config: ModelConfig) -> TextFormat:
    """The end token behind a text."""
    kind, file = sentencepiece_or_tokenizers(folder, "spiece.model", "PEGASUS")
    return TextFormat(
        kind=kind,
        source=file.name,
        id_offset=_OFFSET if kind == "sentencepiece" else 0,
        special_ids=special_ids_of(file, config),
        template=("$text", config.eos_id),
    )


FAMILY = Family(
    name="PEGASUS",
    model_types=("pegasus",),
    configure=configure,
    settle=encoder_decoder.settle_ties,
    load=encoder_decoder.load,
    text=text,
    reference="AutoModelForSeq2SeqLM",
)
