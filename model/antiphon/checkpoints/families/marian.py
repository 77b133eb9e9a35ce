"""Marian: the translation models of OPUS-MT (Junczys-Dowmunt et al. 2018)."""

from __future__ import annotations

from pathlib import Path

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.architectures import encoder_decoder
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings, setting
from antiphon.checkpoints.text_formats import Languages, sentencepiece_format
from antiphon.text.format import TextFormat

_UNKNOWN_ID = 1


def configure(settings: Settings) -> ModelConfig:
    """Return the shape: sinusoids "halves", post-norm layers.

    With separate vocabularies `vocab_size` is the size of the source's and `decoder_vocab_size` that of the target's.
    """
    fields = encoder_decoder.common_fields(settings)
    target = settings.get("decoder_vocab_size")
    if target not in (None, fields["vocab_size"]) and not fields["tie_source_target"]:
        fields |= dict(source_vocab_size=fields["vocab_size"], vocab_size=setting(settings, "decoder_vocab_size", int))
    ids = encoder_decoder.special_ids(settings, pad=None, begin=None, eos=0, unk=_UNKNOWN_ID)
    return encoder_decoder.configure(settings, **fields, **ids, sinusoids="halves", output_bias=True)


def text(folder: Path, _: Settings, config: ModelConfig) -> TextFormat:
    """Return the text format: one SentencePiece model for each side, with the ids of vocab.json.

    With separate vocabularies target_vocab.json has the target's ids. Models with several target languages have >>xxx<<
    before the text.
    """
    own = "target_vocab.json" if (folder / "target_vocab.json").is_file() else "vocab.json"
    found = sentencepiece_format(
        folder,
        "source.spm",
        target_model="target.spm",
        vocabulary="vocab.json",
        target_vocabulary=own,
        template=("$text", "</s>"),
        special_tokens=("</s>", "<unk>", "<pad>"),
        languages=Languages(),
    )
    if not found.languages:
        return found
    return found.model_copy(update=dict(template=("$target_language", *found.template)))


FAMILY = Family(
    name="Marian",
    model_types=("marian",),
    configure=configure,
    resolve=encoder_decoder.resolve_ties,
    load=encoder_decoder.load,
    text=text,
    reference="AutoModelForSeq2SeqLM",
)
