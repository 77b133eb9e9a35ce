"""BERT, RoBERTa, DistilBERT and ALBERT, and what DeBERTa shares with them: an encoder and its heads.

A family gives the names of its tensors (EncoderNames) and of all heads that its checkpoints can have (HeadNames). The
tensors of a checkpoint show which heads it has: a fill-mask checkpoint can also have the next-sentence head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import HeadActivation, Scores, Task
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import (
    Settings,
    activation,
    describe,
    read_json,
    refuse_head,
    refuse_unless,
    setting,
    token_id,
)
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.checkpoints.text_formats import tokenizers_format
from antiphon.errors import SourceError
from antiphon.text.format import TextFormat
from antiphon.transformer.heads import Head
from antiphon.transformer.layers import EncoderLayer, SelfAttention
from antiphon.transformer.transformer import Transformer

# Key that `resolve` adds to the settings: indices of those EncoderNames.heads whose tensors exist.
_HEADS_KEY = "antiphon_heads"
_OUTPUTS: Mapping[str, Task] = {"ForSequenceClassification": "classify", "ForTokenClassification": "tag"}
_WITHOUT_LABELS: tuple[Task, ...] = ("fill_mask", "next_sentence", "pool")
_HEADS = (*_OUTPUTS, "ForMaskedLM", "ForPreTraining", "ForNextSentencePrediction")
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


LoadAttention = Callable[[SelfAttention, SourceWeights, str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNames:
    """Module names of one head.

    activation: activation of the transform; None: that of the encoder's layers.
    output_biases: names of the output bias, if it is not in the output module.
    labels: labels of a task with fixed labels; empty: config.json has them.
    """

    task: Task
    transform: str | None = None
    activation: HeadActivation | None = None
    norm: str | None = None
    output: str | None = None
    output_biases: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def marker(self) -> str:
        """Name of the tensor that exists exactly if the checkpoint has this head.

        The output of fill_mask can be tied, and other heads can share a transform.
        """
        return f"{self.output if self.task not in ('fill_mask', 'pool') else self.transform}.weight"

    @property
    def modules(self) -> set[str]:
        """Names of all modules of this head."""
        biases = (name.rpartition(".")[0] for name in self.output_biases)
        return {name for name in (self.transform, self.norm, self.output, *biases) if name}


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderNames:
    """Module names of a family's checkpoints, without `prefix`; the defaults are BERT's names.

    heads: all heads that a checkpoint can have; for each task the first existing one is used.
    ignored: patterns of tensors that our model does not need.
    """

    prefix: str
    heads: tuple[HeadNames, ...]
    ignored: tuple[str, ...] = ("embeddings.position_ids",)  # a buffer of 0, 1, 2, ...
    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    widen: str | None = None
    layer: str = "encoder.layer.{index}"
    qkv: tuple[str, str, str] = ("attention.self.query", "attention.self.key", "attention.self.value")
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    inner: str = "intermediate.dense"
    outer: str = "output.dense"
    norm: str = "output.LayerNorm"


def resolve(settings: Settings, weights: SourceWeights, names: EncoderNames) -> Settings:
    """Return the settings with the existing heads, and whether the output over the vocabulary is the embedding.

    Raises SourceError if config.json names an architecture with an unsupported head.
    """
    _rename(weights, names)
    architecture = str((settings.get("architectures") or [""])[0])
    refuse_head(settings, _HEADS)
    asked = _asked(settings)
    existing: dict[Task, int] = {}
    for index, head in enumerate(names.heads):
        if head.marker in weights and head.task in ({"pool", asked} if asked else _WITHOUT_LABELS):
            existing.setdefault(head.task, index)
    if asked is not None and asked not in existing:
        raise SourceError(f"config.json: architectures names {architecture}, but there are no tensors of its head")
    outputs = [head.output for head in names.heads if head.task == "fill_mask"]
    tied = not any(weights.differ(f"{names.words}.weight", f"{output}.weight") for output in outputs)
    return {**settings, _HEADS_KEY: tuple(existing.values()), "tie_word_embeddings": tied}


def _asked(settings: Settings) -> Task | None:
    """Return the task with labels that config.json names; None without one."""
    architecture = str((settings.get("architectures") or [""])[0])
    return next((task for ending, task in _OUTPUTS.items() if architecture.endswith(ending)), None)


def _other_heads(settings: Settings, names: EncoderNames) -> list[str]:
    """Return tensor names of heads that a model with labels does not have.

    The checkpoint has them if an adapter gave it labels: those of masked tokens and next sentences.
    """
    if _asked(settings) is None:
        return []
    modules = {module for head in names.heads for module in head.modules}
    modules -= {module for head in _heads_in(settings, names) for module in head.modules}
    return [f"{module}.{part}" for module in modules for part in ("weight", "bias")]


def _heads_in(settings: Settings, names: EncoderNames) -> list[HeadNames]:
    return [names.heads[index] for index in settings[_HEADS_KEY]]


def _rename(weights: SourceWeights, names: EncoderNames) -> None:
    """Remove the prefix from names, and replace TensorFlow's gamma and beta of norms by PyTorch's names."""
    weights.strip_prefix(names.prefix)
    weights.rename_ending("LayerNorm.gamma", "LayerNorm.weight")
    weights.rename_ending("LayerNorm.beta", "LayerNorm.bias")


def configure(settings: Settings, names: EncoderNames, **choices: Any) -> ModelConfig:
    """Return a ModelConfig from the common settings and a family's choices, which take precedence."""
    refuse_unless(settings, "position_embedding_type", only="absolute", default="absolute")
    refuse_unless(settings, "is_decoder", only=False, default=False)
    offset: int = choices.get("positions_offset", 0)
    pad = token_id(settings, "pad_token_id", default=0)
    shared: dict[str, Any] = dict(
        architecture="encoder",
        decoder_layers=0,
        positions="learned",
        embedding_norm=True,
        scale_embeddings=False,
        pad_id=pad,
        # The template adds begin and end tokens to a source. These fields have no effect, but must be valid ids.
        bos_id=token_id(settings, "bos_token_id", default=pad),
        eos_id=token_id(settings, "eos_token_id", default=pad),
        unk_id=pad,
    )
    if "max_source_len" not in choices:
        shared["max_source_len"] = setting(settings, "max_position_embeddings", int) - offset
    fields = shared | choices
    fields["token_types"] = _token_types(settings, fields["positions"])
    fields["heads"] = [_head(head, settings, fields) for head in _heads_in(settings, names)]
    return describe(**fields)


def bert_fields(settings: Settings) -> dict[str, Any]:
    """Return the fields of ModelConfig for the setting names of BERT's config.json."""
    return dict(
        vocab_size=setting(settings, "vocab_size", int),
        d_model=setting(settings, "hidden_size", int),
        encoder_layers=setting(settings, "num_hidden_layers", int),
        num_heads=setting(settings, "num_attention_heads", int),
        d_ff=setting(settings, "intermediate_size", int),
        activation=activation(settings, "hidden_act"),
        norm_eps=setting(settings, "layer_norm_eps", float, default=1e-12),
        dropout=setting(settings, "hidden_dropout_prob", float, default=0.1),
    )


def _token_types(settings: Settings, positions: str) -> int:
    """Return the rows of the token type table; a single type is added to learned positions by `_load_embeddings`."""
    types = setting(settings, "type_vocab_size", int, default=0)
    return 0 if types == 1 and positions == "learned" else types


def _head(names: HeadNames, settings: Settings, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of HeadConfig for a head."""
    labels = names.labels or (_labels(settings) if names.task in _OUTPUTS.values() else ())
    width: int = fields["d_model"]
    if names.task == "fill_mask":
        width = fields.get("embedding_width") or width
    return dict(
        task=names.task,
        labels=labels,
        transform_width=width if names.transform else None,
        activation=(names.activation or fields["activation"]) if names.transform else "none",
        norm=names.norm is not None,
        tied=names.task == "fill_mask" and settings["tie_word_embeddings"],
        scores=_scores(settings, len(labels)) if names.task == "classify" else "softmax",
    )


def _labels(settings: Settings) -> tuple[str, ...]:
    """Return the labels in order; labels that config.json lacks have transformers' names LABEL_0, LABEL_1, ..."""
    named = settings.get("id2label") or {}
    count = len(named) or setting(settings, "num_labels", int, default=2)
    try:
        labels = {int(index): str(label) for index, label in named.items()}
    except (AttributeError, ValueError):
        raise SourceError(f"config.json: id2label is {named!r}, expected an object from numbers to names") from None
    return tuple(labels.get(index, f"LABEL_{index}") for index in range(count))


def _scores(settings: Settings, count: int) -> Scores:
    """Return the function from logits to scores, as transformers' pipeline chooses it.

    Raises SourceError for an unknown problem_type.
    """
    problem = settings.get("problem_type")
    if problem is not None and problem not in _PROBLEMS:
        raise SourceError(f"config.json: problem_type is {problem!r}; supported are {', '.join(_PROBLEMS)}")
    if problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" or count == 1 else "softmax"


def load(
    model: Transformer,
    weights: SourceWeights,
    settings: Settings,
    names: EncoderNames,
    load_attention: LoadAttention | None = None,
) -> None:
    """Fill encoder and heads; load_attention replaces the filling of queries, keys and values from `names.qkv`."""
    _rename(weights, names)
    assert model.encoder is not None
    for pattern in (*names.ignored, *_other_heads(settings, names)):
        weights.ignore(pattern)
    _load_embeddings(model, weights, settings, names)
    layers = {id(layer): layer for layer in model.encoder.layers if isinstance(layer, EncoderLayer)}
    for index, layer in enumerate(layers.values()):
        prefix = names.layer.format(index=index)
        _load_layer(layer, weights, names, prefix)
        if load_attention is not None:
            load_attention(layer.self_attention, weights, prefix)
        else:
            weights.fill_module(layer.self_attention.qkv, *(f"{prefix}.{name}" for name in names.qkv))
    for head in _heads_in(settings, names):
        _load_head(model, weights, head)


def _load_embeddings(model: Transformer, weights: SourceWeights, settings: Settings, names: EncoderNames) -> None:
    """Fill the tables of words, positions and types, and the norm. A single type is added to the positions."""
    stack = model.encoder
    assert stack is not None
    heads = _heads_in(settings, names) if _asked(settings) else names.heads
    tied = [head.output for head in heads if head.task == "fill_mask" and settings["tie_word_embeddings"]]
    weights.fill_tied(stack.embedding.weight, f"{names.words}.weight", *(f"{output}.weight" for output in tied))
    if stack.positions.table is not None:
        weights.fill_start(stack.positions.table, f"{names.positions}.weight")
    if stack.token_types is not None:
        weights.fill_module(stack.token_types, names.types)
    elif setting(settings, "type_vocab_size", int, default=0) == 1 and stack.positions.table is not None:
        weights.add(stack.positions.table, f"{names.types}.weight")
    weights.fill_module(stack.embedding_norm, names.embedding_norm)
    if names.widen is not None:
        weights.fill_module(stack.widen, names.widen)


def _load_layer(layer: EncoderLayer, weights: SourceWeights, names: EncoderNames, prefix: str) -> None:
    """Fill one layer except its queries, keys and values."""
    modules: list[tuple[nn.Module, str]] = [
        (layer.self_attention.out, names.out),
        (layer.self_residual.norm, names.attention_norm),
        (layer.feed_forward.inner, names.inner),
        (layer.feed_forward.outer, names.outer),
        (layer.feed_forward_residual.norm, names.norm),
    ]
    for module, theirs in modules:
        weights.fill_module(module, f"{prefix}.{theirs}")


def _load_head(model: Transformer, weights: SourceWeights, names: HeadNames) -> None:
    """Fill one head; a tied output already has the embedding's weight."""
    head = model.heads[names.task]
    assert isinstance(head, Head)
    for module, theirs in ((head.transform, names.transform), (head.norm, names.norm)):
        if module is not None and theirs is not None:
            weights.fill_module(module, theirs)
    if head.output is None:
        return
    if not head.config.tied:
        weights.fill(head.output.weight, f"{names.output}.weight")
    weights.fill_tied(head.output.bias, *(names.output_biases or (f"{names.output}.bias",)))


def text(folder: Path, config: ModelConfig, mask: str) -> TextFormat:
    """Return the text format of a tokenizer.json; `mask` is the mask token if no file names one."""
    format_ = tokenizers_format(folder)
    changes: dict[str, Any] = {} if config.token_types else {"pair_start": None}
    if format_.mask_id is None:
        added = read_json(folder / "tokenizer.json").get("added_tokens") or []
        changes["mask_id"] = next((token["id"] for token in added if token["content"] == mask), None)
    return format_.model_copy(update=changes)


def family(
    name: str,
    names: EncoderNames,
    configure: Callable[[Settings], ModelConfig],
    *model_types: str,
    mask: str = "[MASK]",
) -> Family:
    """Return the family of an encoder with these tensor names; `mask` is the mask token if no file names one."""
    return Family(
        name=name,
        model_types=model_types,
        configure=configure,
        resolve=partial(resolve, names=names),
        load=partial(load, names=names),
        text=lambda folder, _, config: text(folder, config, mask),
        reference="AutoModel",
    )


BERT_MASKED_HEAD = HeadNames(
    task="fill_mask",
    transform="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    output="cls.predictions.decoder",
    output_biases=("cls.predictions.decoder.bias", "cls.predictions.bias"),
)
_BERT_NAMES = EncoderNames(
    prefix="bert.",
    heads=(
        BERT_MASKED_HEAD,
        HeadNames(
            task="next_sentence",
            transform="pooler.dense",
            activation="tanh",
            output="cls.seq_relationship",
            labels=("is_next", "not_next"),
        ),
        HeadNames(task="classify", transform="pooler.dense", activation="tanh", output="classifier"),
        HeadNames(task="tag", output="classifier"),
        HeadNames(task="pool", transform="pooler.dense", activation="tanh"),
    ),
)


def _configure_bert(settings: Settings) -> ModelConfig:
    """Return the shape of BERT (Devlin et al. 2019): learned positions and token types, post-norm layers."""
    return configure(settings, _BERT_NAMES, **bert_fields(settings))


BERT = family("BERT", _BERT_NAMES, _configure_bert, "bert")


_ROBERTA_NAMES = EncoderNames(
    prefix="roberta.",
    heads=(
        HeadNames(
            task="fill_mask",
            transform="lm_head.dense",
            activation="gelu",
            norm="lm_head.layer_norm",
            output="lm_head.decoder",
            output_biases=("lm_head.decoder.bias", "lm_head.bias"),
        ),
        HeadNames(task="classify", transform="classifier.dense", activation="tanh", output="classifier.out_proj"),
        HeadNames(task="tag", output="classifier"),
        HeadNames(task="pool", transform="pooler.dense", activation="tanh"),
    ),
)


def _configure_roberta(settings: Settings) -> ModelConfig:
    """Return the shape of RoBERTa (Liu et al. 2019), CamemBERT (Martin et al. 2020) and XLM-R (Conneau et al. 2020).

    It is BERT's; the first position is the row after the padding id, which is -1 if there is no padding.
    """
    pad = setting(settings, "pad_token_id", int, default=1)
    fields = bert_fields(settings)
    return configure(settings, _ROBERTA_NAMES, **fields, pad_id=max(pad, 0), positions_offset=pad + 1)


ROBERTA = family("RoBERTa", _ROBERTA_NAMES, _configure_roberta, "roberta", "xlm-roberta", "camembert", mask="<mask>")


_DISTILBERT_NAMES = EncoderNames(
    prefix="distilbert.",
    layer="transformer.layer.{index}",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    inner="ffn.lin1",
    outer="ffn.lin2",
    norm="output_layer_norm",
    heads=(
        HeadNames(task="fill_mask", transform="vocab_transform", norm="vocab_layer_norm", output="vocab_projector"),
        HeadNames(task="classify", transform="pre_classifier", activation="relu", output="classifier"),
        HeadNames(task="tag", output="classifier"),
    ),
)


def _configure_distilbert(settings: Settings) -> ModelConfig:
    """Return the shape of DistilBERT (Sanh et al. 2019): BERT's without token types and pooler.

    Sinusoidal positions are stored like learned ones.
    """
    return configure(
        settings,
        _DISTILBERT_NAMES,
        vocab_size=setting(settings, "vocab_size", int),
        d_model=setting(settings, "dim", int),
        encoder_layers=setting(settings, "n_layers", int),
        num_heads=setting(settings, "n_heads", int),
        d_ff=setting(settings, "hidden_dim", int),
        activation=activation(settings, "activation"),
        norm_eps=1e-12,
        dropout=setting(settings, "dropout", float, default=0.1),
    )


DISTILBERT = family("DistilBERT", _DISTILBERT_NAMES, _configure_distilbert, "distilbert")


_ALBERT_NAMES = EncoderNames(
    prefix="albert.",
    widen="encoder.embedding_hidden_mapping_in",
    layer="encoder.albert_layer_groups.0.albert_layers.{index}",
    qkv=("attention.query", "attention.key", "attention.value"),
    out="attention.dense",
    attention_norm="attention.LayerNorm",
    inner="ffn",
    outer="ffn_output",
    norm="full_layer_layer_norm",
    heads=(
        HeadNames(
            task="fill_mask",
            transform="predictions.dense",
            norm="predictions.LayerNorm",
            output="predictions.decoder",
            output_biases=("predictions.decoder.bias", "predictions.bias"),
        ),
        # Sentence order prediction (Lan et al. 2020, section 3.1): are two texts in their original order or swapped?
        # BERT's task is to recognise unrelated texts.
        HeadNames(
            task="next_sentence",
            transform="pooler",
            activation="tanh",
            output="sop_classifier.classifier",
            labels=("in_order", "swapped"),
        ),
        HeadNames(task="classify", transform="pooler", activation="tanh", output="classifier"),
        HeadNames(task="tag", output="classifier"),
        HeadNames(task="pool", transform="pooler", activation="tanh"),
    ),
)


def _configure_albert(settings: Settings) -> ModelConfig:
    """Return the shape of ALBERT (Lan et al. 2020): BERT's with narrow embeddings and the same weights in all layers.

    More than one group of layers is refused; no published model has it.
    """
    for name in ("num_hidden_groups", "inner_group_num"):
        refuse_unless(settings, name, only=1, default=1)
    return configure(
        settings,
        _ALBERT_NAMES,
        **bert_fields(settings),
        embedding_width=setting(settings, "embedding_size", int),
        share_layers=True,
    )


ALBERT = family("ALBERT", _ALBERT_NAMES, _configure_albert, "albert")
