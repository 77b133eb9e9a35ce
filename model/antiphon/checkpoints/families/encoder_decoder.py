"""BART, mBART, PEGASUS, Marian and M2M-100: encoder-decoders of one architecture (Lewis et al. 2020, section 2).

The families differ in positions, norm placements, special tokens and text formats, which their two functions at the end
of this module select. Tensor names and settings of config.json are common code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.family import Family, FamilyText, default_text
from antiphon.checkpoints.settings import (
    Settings,
    activation,
    describe,
    is_tied,
    read_json,
    refuse_head,
    refuse_unequal,
    setting,
    token_id,
    with_default_languages,
)
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.checkpoints.text_formats import Languages, sentencepiece_format, tokenizers_format
from antiphon.text.format import TextFormat
from antiphon.transformer.layers import DecoderLayer, EncoderLayer, self_attention_of
from antiphon.transformer.transformer import Stack, Transformer

SHARED = "shared.weight"
OUTPUT = "lm_head.weight"
# A bias of minus infinity suppresses a token. This one does too, and stays a number in every precision.
_LEAST_BIAS = -1e4
# Padding, end, two mask tokens and 99 unused tokens come before the pieces of PEGASUS' SentencePiece model.
_PEGASUS_UNKNOWN_ID = 103 + 2


def _resolve_ties(settings: Settings, weights: SourceWeights) -> Settings:
    """Return the settings with tied embeddings as the tensors show: tied ones are stored once or are equal.

    transformers also ties equal tensors. config.json is often wrong here.
    """
    refuse_head(settings, ["ForConditionalGeneration"])
    weights.strip_prefix("model.")
    source, target = (weights.first_of(f"{side}.embed_tokens.weight", SHARED) for side in ("encoder", "decoder"))
    return {
        **settings,
        "share_encoder_decoder_embeddings": not weights.differ(source, target),
        "tie_word_embeddings": is_tied(settings, weights, target, OUTPUT),
    }


def _common_fields(settings: Settings) -> dict[str, Any]:
    """Return the fields of ModelConfig for settings that have the same names in all these families."""
    refuse_unequal(settings, "encoder_attention_heads", "decoder_attention_heads")
    refuse_unequal(settings, "encoder_ffn_dim", "decoder_ffn_dim")
    longest = setting(settings, "max_position_embeddings", int)
    return dict(
        vocab_size=setting(settings, "vocab_size", int),
        d_model=setting(settings, "d_model", int),
        encoder_layers=setting(settings, "encoder_layers", int),
        decoder_layers=setting(settings, "decoder_layers", int),
        num_heads=setting(settings, "encoder_attention_heads", int),
        d_ff=setting(settings, "encoder_ffn_dim", int),
        activation=activation(settings, "activation_function"),
        scale_embeddings=setting(settings, "scale_embedding", bool, default=False),
        tie_source_target=setting(settings, "share_encoder_decoder_embeddings", bool, default=True),
        tie_output=setting(settings, "tie_word_embeddings", bool, default=True),
        dropout=setting(settings, "dropout", float, default=0.1),
        max_source_len=longest,
        max_target_len=longest,
    )


def special_ids(settings: Settings, *, pad: int | None, begin: int | None, eos: int, unk: int) -> dict[str, int]:
    """Return special token ids of config.json, or the family's defaults; `begin` is the first decoder input."""
    return dict(
        pad_id=token_id(settings, "pad_token_id", default=pad),
        bos_id=token_id(settings, "decoder_start_token_id", default=begin),
        eos_id=token_id(settings, "eos_token_id", default=eos),
        unk_id=unk,
    )


def _configure(settings: Settings, **choices: Any) -> ModelConfig:
    """Return a ModelConfig from the common settings and a family's choices, which take precedence."""
    return describe(**{**_common_fields(settings), **choices})


def _load(model: Transformer, weights: SourceWeights, _: Settings) -> None:
    """Fill the model; tensor names are those of BartForConditionalGeneration, with or without the prefix `model.`."""
    assert model.encoder is not None
    assert model.decoder is not None
    config = model.config
    weights.strip_prefix("model.")
    source = ["encoder.embed_tokens.weight", SHARED]
    target = ["decoder.embed_tokens.weight", SHARED] + ([OUTPUT] if config.tie_output else [])
    if config.tie_source_target:
        target += source
    else:
        weights.fill_tied(model.encoder.embedding.weight, *source)
    weights.fill_tied(model.decoder.embedding.weight, *target)
    if not config.tie_output:
        weights.fill(model.output.weight, OUTPUT)
    if config.output_bias and "final_logits_bias" in weights:
        weights.fill(model.output.bias[None], "final_logits_bias")
        model.output.bias.data.clamp_(min=_LEAST_BIAS)
    weights.ignore("*coder.version")  # fairseq's version number in old files
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        _load_stack(stack, weights, name, config)


def _load_stack(stack: Stack, weights: SourceWeights, name: str, config: ModelConfig) -> None:
    positions = f"{name}.embed_positions.weight"
    assert stack.positions.table is not None
    if config.positions == "learned" or weights.has_rows(positions, stack.positions.table):
        # transformers reads stored sines and cosines, which are rounded in files of half precision.
        weights.fill_start(stack.positions.table, positions)
    else:
        weights.ignore(f"{positions}*")
    if config.embedding_norm:
        weights.fill_module(stack.embedding_norm, f"{name}.layernorm_embedding")
    if config.norm_placement == "pre":
        weights.fill_module(stack.final_norm, f"{name}.layer_norm")
    for index, layer in enumerate(stack.layers):
        assert isinstance(layer, EncoderLayer | DecoderLayer)
        _load_layer(layer, weights, f"{name}.layers.{index}")


def _load_layer(layer: EncoderLayer | DecoderLayer, weights: SourceWeights, name: str) -> None:
    attention, theirs = self_attention_of(layer), f"{name}.self_attn"
    weights.fill_module(attention.qkv, *(f"{theirs}.{part}_proj" for part in "qkv"))
    weights.fill_module(attention.out, f"{theirs}.out_proj")
    weights.fill_module(layer.self_residual.norm, f"{name}.self_attn_layer_norm")
    if isinstance(layer, DecoderLayer) and layer.cross_attention is not None and layer.cross_residual is not None:
        cross, theirs = layer.cross_attention, f"{name}.encoder_attn"
        weights.fill_module(cross.query, f"{theirs}.q_proj")
        weights.fill_module(cross.kv, f"{theirs}.k_proj", f"{theirs}.v_proj")
        weights.fill_module(cross.out, f"{theirs}.out_proj")
        weights.fill_module(layer.cross_residual.norm, f"{name}.encoder_attn_layer_norm")
    weights.fill_module(layer.feed_forward.inner, f"{name}.fc1")
    weights.fill_module(layer.feed_forward.outer, f"{name}.fc2")
    weights.fill_module(layer.feed_forward_residual.norm, f"{name}.final_layer_norm")


def _family(
    name: str, model_type: str, configure: Callable[[Settings], ModelConfig], text: FamilyText = default_text
) -> Family:
    return Family(
        name=name,
        model_types=(model_type,),
        configure=configure,
        resolve=_resolve_ties,
        load=_load,
        text=text,
        reference="AutoModelForSeq2SeqLM",
    )


def _configure_bart(settings: Settings) -> ModelConfig:
    """Return the shape of BART: learned positions from row 2 on, a norm after the embeddings, post-norm layers."""
    ids = special_ids(settings, pad=1, begin=2, eos=2, unk=3)
    return _configure(settings, **ids, positions="learned", positions_offset=2, embedding_norm=True, output_bias=True)


def _configure_mbart(settings: Settings) -> ModelConfig:
    """Return the shape of mBART (Liu et al. 2020) and mBART-50 (Tang et al. 2020): BART's with pre-norm layers.

    The first decoder input is a language token in mBART and the end token in mBART-50.
    """
    ids = special_ids(settings, pad=1, begin=2, eos=2, unk=3)
    return _configure(
        settings,
        **ids,
        positions="learned",
        positions_offset=2,
        embedding_norm=True,
        norm_placement="pre",
        output_bias=True,
    )


def _mbart_text(folder: Path, settings: Settings, config: ModelConfig) -> TextFormat:
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


def _configure_pegasus(settings: Settings) -> ModelConfig:
    """Return the shape of PEGASUS (Zhang et al. 2020): sinusoids "halves", pre-norm layers."""
    ids = special_ids(settings, pad=0, begin=0, eos=1, unk=0)
    fields = _common_fields(settings)
    ids["unk_id"] = min(_PEGASUS_UNKNOWN_ID, fields["vocab_size"] - 1)
    return _configure(settings, **ids, sinusoids="halves", norm_placement="pre", output_bias=True)


def _configure_marian(settings: Settings) -> ModelConfig:
    """Return the shape of OPUS-MT's models (Junczys-Dowmunt et al. 2018): sinusoids "halves", post-norm layers.

    With separate vocabularies `vocab_size` is the size of the source's and `decoder_vocab_size` that of the target's.
    """
    fields = _common_fields(settings)
    target = settings.get("decoder_vocab_size")
    if target not in (None, fields["vocab_size"]) and not fields["tie_source_target"]:
        fields |= dict(source_vocab_size=fields["vocab_size"], vocab_size=setting(settings, "decoder_vocab_size", int))
    ids = special_ids(settings, pad=None, begin=None, eos=0, unk=1)
    return _configure(settings, **fields, **ids, sinusoids="halves", output_bias=True)


def _marian_text(folder: Path, _: Settings, config: ModelConfig) -> TextFormat:
    """Return the text format: one SentencePiece model for each side, with the ids of vocab.json.

    With separate vocabularies target_vocab.json has the target's ids. Models with several target languages have >>xxx<<
    before the text.
    """
    own = "target_vocab.json" if (folder / "target_vocab.json").is_file() else "vocab.json"
    format_ = sentencepiece_format(
        folder,
        "source.spm",
        target_model="target.spm",
        vocabulary="vocab.json",
        target_vocabulary=own,
        template=("$text", "</s>"),
        special_tokens=("</s>", "<unk>", "<pad>"),
        languages=Languages(),
    )
    if not format_.languages:
        return format_
    return format_.model_copy(update=dict(template=("$target_language", *format_.template)))


def _configure_m2m100(settings: Settings) -> ModelConfig:
    """Return the shape of M2M-100 (Fan et al. 2020) and NLLB (NLLB team 2022), which have different tokenizers.

    Positions are fairseq's sinusoids from row 2 on, layers are pre-norm.
    """
    ids = special_ids(settings, pad=1, begin=2, eos=2, unk=3)
    return _configure(settings, **ids, sinusoids="fairseq", positions_offset=2, norm_placement="pre")


def _m2m100_text(folder: Path, settings: Settings, config: ModelConfig) -> TextFormat:
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
    format_ = sentencepiece_format(
        folder,
        "sentencepiece.bpe.model",
        vocabulary="vocab.json",
        template=template,
        special_tokens=("<s>", "<pad>", "</s>", "<unk>", *_language_tokens(folder)),
        languages=languages,
    )
    return with_default_languages(format_, "en", forced)


def _language_tokens(folder: Path) -> list[str]:
    """Return M2M-100's language tokens in the order of fairseq's list; their ids follow those of vocab.json."""
    from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

    named = read_json(folder / "tokenizer_config.json").get("language_codes") or "m2m100"
    return [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES[named]]


BART = _family("BART", "bart", _configure_bart)
MBART = _family("mBART", "mbart", _configure_mbart, _mbart_text)
PEGASUS = _family("PEGASUS", "pegasus", _configure_pegasus)
MARIAN = _family("Marian", "marian", _configure_marian, _marian_text)
M2M100 = _family("M2M-100 and NLLB", "m2m_100", _configure_m2m100, _m2m100_text)
