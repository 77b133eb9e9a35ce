"""Marian's own files: models of OPUS-MT, Firefox and Bergamot, without transformers.

A model file holds tensors and the options of its training (marian_files.py). Its directory also has vocabularies, and a
YAML file with the settings of the decoder (marian_folder.py). Formulas are those of Marian's src/models/transformer.h,
whose options are named in errors. Families of transformers' own conversions are in encoder_decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from antiphon.architecture.config import Activation, AverageConfig, ModelConfig
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.marian_files import MarianFile
from antiphon.checkpoints.marian_folder import (
    END,
    UNKNOWN,
    decoder_settings,
    model_path,
    open_model,
    read_tokens,
    text,
    vocabularies,
    write_text,
)
from antiphon.checkpoints.marian_original import MarianOriginal
from antiphon.checkpoints.marian_shortlist import read_shortlist, shortlist_settings
from antiphon.checkpoints.settings import Settings, describe
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.errors import SourceError
from antiphon.text.shortlist import SHORTLIST_NAME
from antiphon.transformer.layers import AverageAttention, DecoderLayer, EncoderLayer, FeedForward, SimpleRecurrence
from antiphon.transformer.transformer import Transformer

# Marian has no maximum length of a target but a multiple of the source's; these are the limits of a bundle, in tokens.
_SOURCE_LEN, _TARGET_LEN = 1024, 512
_NORM_EPS = 1e-9
# Logit of the begin token, which Marian has as a zero vector only: too small to be sampled or to change a softmax.
_BEGIN_LOGIT = -64.0
_ACTIVATIONS: dict[str, Activation] = {"swish": "silu", "relu": "relu", "gelu": "gelu"}
# Options with only some supported values; the first is Marian's default, for files of versions without the option.
_ONLY: dict[str, tuple[object, ...]] = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": ("self-attention", "average-attention", "rnn"),
    "transformer-ffn-activation": tuple(_ACTIVATIONS),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-decoder-dim-ffn": (0,),
    "transformer-aan-activation": tuple(_ACTIVATIONS),
    "transformer-aan-depth": (2, 1),
    "transformer-aan-nogate": (False, True),
    "transformer-no-projection": (False,),
    "transformer-rnn-projection": (False,),
    # transformer-train-position-embeddings has no effect in Marian's translation, which reads this option.
    "transformer-train-positions": (False,),
    "transformer-disable-position-embeddings": (False,),
    "transformer-no-bias": (False,),
    "transformer-no-affine": (False,),
    "transformer-tied-layers": ([],),
    "transformer-pool": (False,),
    "transformer-postprocess-emb": ("d", "", "n", "nd"),
    "layer-normalization": (False,),
    "lemma-dim-emb": (0,),
    "input-types": ([],),
    "right-left": (False,),
    "ulr": (False,),
}
# Where norms are: pre- and postprocessing of sublayers and the processing after the last layer, without dropout ("d").
_PLACEMENTS = {("", "an", ""): "post", ("n", "a", "n"): "pre"}
_DECODERS = {"self-attention": "attention", "average-attention": "average", "rnn": "ssru"}


def recognises(folder: Path) -> bool:
    """Return whether a directory has a model file of Marian, or a decoder's file that names one."""
    return model_path(folder) is not None


def read_settings(folder: Path) -> Settings:
    """Return the options of the model, and settings of the decoder with the names of transformers.

    path: the model file. shapes: of each tensor. vocabularies: paths of the vocabulary files, one or two, and tokens:
    from token to id for each. shortlist: as `shortlist_settings` returns it. word_penalty: of the decoder.
    Raises SourceError naming the file or the option.
    """
    file, decoder = open_model(folder), decoder_settings(folder)
    paths = vocabularies(folder, decoder)
    tokens = [read_tokens(path) for path in paths]
    target = tokens[-1]
    # Marian never generates the unknown token, unless asked with --allow-unk.
    unknown = [target[UNKNOWN]] if UNKNOWN in target and decoder.get("allow-unk") is not True else []
    return {
        "options": file.options,
        "model_type": "marian-files",
        "path": str(file.path),
        "shapes": {name: file.shape(name) for name in file},
        "vocabularies": [str(path) for path in paths],
        "tokens": tokens,
        "shortlist": shortlist_settings(folder, decoder),
        "num_beams": _decoder_number(folder, decoder, "beam-size", int, 1),
        "length_penalty": _decoder_number(folder, decoder, "normalize", float, 0.0),
        "word_penalty": _decoder_number(folder, decoder, "word-penalty", float, 0.0),
        "suppress_tokens": [*unknown, _rows(file)[1]],
    }


def _decoder_number(folder: Path, decoder: Mapping[str, Any], name: str, kind: type, default: float) -> Any:
    value = decoder.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SourceError(f"{folder}: {name} of its decoder's YAML file is {value!r}; it must be a number")
    return kind(value)


def configure(settings: Settings) -> ModelConfig:
    """Return the shape from the options and the tensors' shapes. Raises SourceError naming what is not supported."""
    option = _Options(settings)
    rows = [_shape(settings, name)[0] for name in _embeddings(settings["shapes"])]
    tokens = settings["tokens"]
    for path, ids, count in zip(settings["vocabularies"], tokens, (rows[0], rows[-1])[-len(tokens) :], strict=True):
        if max(ids.values()) >= count:
            raise SourceError(f"{path} has the id {max(ids.values())}; the model embeds {count} tokens")
    is_tied = len(rows) == 1
    target, begin = tokens[-1], rows[-1]
    decoder = _DECODERS[option("transformer-decoder-autoreg")]
    if decoder == "ssru" and (cell := option.any("dec-cell", "gru")) != "ssru":
        raise SourceError(
            f"{settings['path']}: dec-cell is {cell!r}; supported with transformer-decoder-autoreg rnn: ssru"
        )
    return describe(
        vocab_size=begin + 1,
        source_vocab_size=None if is_tied or rows[0] == begin + 1 else rows[0],
        d_model=option.number("dim-emb"),
        encoder_layers=option.number("enc-depth"),
        decoder_layers=option.number("dec-depth"),
        num_heads=option.number("transformer-heads"),
        d_ff=option.number("transformer-dim-ffn"),
        decoder_self=decoder,
        average=_average(option) if decoder == "average" else None,
        norm="layernorm",
        norm_placement=_placement(option, decoder),
        norm_eps=_NORM_EPS,
        activation=_ACTIVATIONS[option("transformer-ffn-activation")],
        positions="sinusoidal",
        sinusoids="fairseq",
        max_source_len=_SOURCE_LEN,
        max_target_len=_TARGET_LEN,
        tie_source_target=is_tied,
        tie_output=_is_output_tied(settings["shapes"]),
        output_bias=True,
        scale_embeddings=True,
        embedding_norm="n" in option("transformer-postprocess-emb"),
        bias=True,
        dropout=0.0,
        pad_id=target[END],
        bos_id=begin,
        eos_id=target[END],
        unk_id=target.get(UNKNOWN, target[END]),
    )


def write_files(folder: Path, settings: Settings, to: Path) -> None:
    """Write the files of the text format that the directory has in another form: `write_text`, and the shortlist."""
    write_text(folder, settings, to)
    if settings["shortlist"] is not None:
        read_shortlist(settings["shortlist"], settings["tokens"], configure(settings)).write(to / SHORTLIST_NAME)


def _average(option: _Options) -> AverageConfig:
    """Return the parts of average attention. A feed-forward as wide as the model has one layer only in Marian."""
    has_inner = option("transformer-aan-depth") == 2
    width = option.number("transformer-dim-aan")
    if has_inner and width == option.number("dim-emb"):
        raise SourceError(f"{option.path}: transformer-dim-aan is {width}; it must differ from dim-emb, {width}")
    return AverageConfig(
        d_ff=width if has_inner else None,
        activation=_ACTIVATIONS[option("transformer-aan-activation")],
        gated=not option("transformer-aan-nogate"),
    )


def _placement(option: _Options, decoder: str) -> str:
    names = [f"transformer-{name}" for name in ("preprocess", "postprocess", "postprocess-top")]
    values = [str(option.any(name, default)) for name, default in zip(names, ("", "dan", ""), strict=True)]
    before, after, top = (value.replace("d", "") for value in values)
    placement = _PLACEMENTS.get((before, after, top))
    described = ", ".join(f"{name} is {value!r}" for name, value in zip(names, values, strict=True))
    if placement is None:
        raise SourceError(
            f"{option.path}: {described}; supported together are '', 'an', '' and 'n', 'a', 'n', each with any 'd'"
        )
    if placement == "pre" and decoder == "average":
        raise SourceError(f"{option.path}: {described}; supported with average-attention are '', 'an', ''")
    return placement


def open_weights(folder: Path, *, on_meta: bool = False) -> SourceWeights:
    """Return the tensors as float32 and in the layout of PyTorch, each converted when it is taken.

    Target embeddings and outputs get a row for the begin token, with zeros, and a bias that is never chosen.
    """
    file = open_model(folder)
    longer = {
        _embeddings(dict.fromkeys(file))[-1],
        "decoder_ff_logit_out_W",
        "decoder_ff_logit_out_Wt",
        "decoder_ff_logit_out_b",
    }
    readers = {name: _reader(file, name, adds_row=name in longer, on_meta=on_meta) for name in file}
    if "decoder_ff_logit_out_b" not in file:  # output-omit-bias
        rows = _rows(file)[1]
        readers["decoder_ff_logit_out_b"] = lambda: torch.cat([torch.zeros(rows), torch.tensor([_BEGIN_LOGIT])])
    return SourceWeights(readers, ExitStack(), on_meta=on_meta)


def original(folder: Path) -> MarianOriginal:
    """Return the model with Marian's formulas, to compare with."""
    return MarianOriginal(open_model(folder))


def load(model: Transformer, weights: SourceWeights, _: Settings) -> None:
    """Fill the model with the tensors of a model file."""
    assert model.encoder is not None
    assert model.decoder is not None
    config = model.config
    if not config.tie_source_target:
        weights.fill(model.encoder.embedding.weight, "encoder_Wemb")
    weights.fill(model.decoder.embedding.weight, weights.first_of("Wemb", "decoder_Wemb"))
    if not config.tie_output:
        weights.fill(model.output.weight, weights.first_of("decoder_ff_logit_out_W", "decoder_ff_logit_out_Wt"))
    weights.fill(model.output.bias, "decoder_ff_logit_out_b")
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if config.embedding_norm:
            _fill_norm(stack.embedding_norm, weights, f"{side}_emb")
        if config.norm_placement == "pre":
            _fill_norm(stack.final_norm, weights, f"{side}_top")
        for index, layer in enumerate(stack.layers):
            assert isinstance(layer, EncoderLayer | DecoderLayer)
            _load_layer(layer, weights, f"{side}_l{index + 1}")


class _Options:
    """Options of a model, with Marian's defaults. Raises SourceError naming an option without support."""

    def __init__(self, settings: Settings) -> None:
        self._options: Mapping[str, Any] = settings["options"]
        self.path: str = settings["path"]
        for name in _ONLY:
            self(name)

    def __call__(self, name: str) -> Any:
        """Return the value of an option of _ONLY."""
        allowed = _ONLY[name]
        value = self._options.get(name, allowed[0])
        if value not in allowed:
            shown = " or ".join(map(repr, allowed))
            raise SourceError(f"{self.path}: {name} is {value!r}; supported: {shown}")
        return value

    def any(self, name: str, default: Any) -> Any:
        """Return the value of another option."""
        return self._options.get(name, default)

    def number(self, name: str) -> int:
        """Return a whole number above 0."""
        value = self._options.get(name)
        if not isinstance(value, int) or value < 1:
            raise SourceError(f"{self.path}: {name} is {value!r}; it must be a whole number from 1 on")
        return value


def _embeddings(shapes: Mapping[str, object]) -> list[str]:
    """Return the names of the embeddings: one of both sides, or of source and target."""
    return ["Wemb"] if "Wemb" in shapes else ["encoder_Wemb", "decoder_Wemb"]


def _rows(file: MarianFile) -> tuple[int, int]:
    names = _embeddings(dict.fromkeys(file))
    return file.shape(names[0])[0], file.shape(names[-1])[0]


def _is_output_tied(shapes: Mapping[str, object]) -> bool:
    return not {"decoder_ff_logit_out_W", "decoder_ff_logit_out_Wt"} & shapes.keys()


def _shape(settings: Settings, name: str) -> tuple[int, ...]:
    try:
        shape: tuple[int, ...] = settings["shapes"][name]
    except KeyError:
        raise SourceError(f"{settings['path']}: the tensor {name} is missing") from None
    return shape


def _reader(file: MarianFile, name: str, *, adds_row: bool, on_meta: bool) -> Callable[[], Tensor]:
    """Return a function that reads a tensor in the layout of PyTorch: matrices [outputs, inputs], vectors [n]."""
    shape = file.shape(name)
    is_vector = len(shape) == 1 or (shape[0] == 1 and "Wemb" not in name)
    # Products have W and a letter or number; those of outputs that are tied to embeddings are stored as these, Wt.
    is_product = not is_vector and "Wemb" not in name and not name.endswith("_Wt")
    size = shape[-1:] if is_vector else shape[::-1] if is_product else shape
    if on_meta:
        longer = (size[0] + adds_row, *size[1:])
        return lambda: torch.empty(longer, device="meta")

    def read() -> Tensor:
        values = torch.from_numpy(file.floats(name))
        values = values.reshape(size) if is_vector else values.T.contiguous() if is_product else values
        if not adds_row:
            return values
        return torch.cat([values, torch.full((1, *size[1:]), _BEGIN_LOGIT if is_vector else 0.0)])

    return read


def _load_layer(layer: EncoderLayer | DecoderLayer, weights: SourceWeights, name: str) -> None:
    if isinstance(layer.self_attention, SimpleRecurrence):
        part, theirs = layer.self_attention, f"{name}_rnn"
        weights.fill(part.input.weight, f"{theirs}_W", f"{theirs}_Wf")
        weights.fill(part.input.bias[part.input.bias.shape[0] // 2 :], f"{theirs}_bf")  # the candidate has no bias
        _fill_norm(layer.self_residual.norm, weights, f"{theirs}_ffn", before=theirs)
    elif isinstance(layer.self_attention, AverageAttention):
        _load_average(layer.self_attention, weights, f"{name}_aan")
        _fill_norm(layer.self_residual.norm, weights, f"{name}_aan_ffn")
    else:
        _fill_products(layer.self_attention.qkv, weights, f"{name}_self", "qkv")
        _fill_products(layer.self_attention.out, weights, f"{name}_self", "o")
        _fill_norm(layer.self_residual.norm, weights, f"{name}_self_Wo")
    if isinstance(layer, DecoderLayer) and layer.cross_attention is not None and layer.cross_residual is not None:
        cross, theirs = layer.cross_attention, f"{name}_context"
        for linear, letters in ((cross.query, "q"), (cross.kv, "kv"), (cross.out, "o")):
            _fill_products(linear, weights, theirs, letters)
        _fill_norm(layer.cross_residual.norm, weights, f"{theirs}_Wo")
    _fill_products(layer.feed_forward.inner, weights, f"{name}_ffn", "1")
    _fill_products(layer.feed_forward.outer, weights, f"{name}_ffn", "2")
    _fill_norm(layer.feed_forward_residual.norm, weights, f"{name}_ffn_ffn")


def _load_average(part: AverageAttention, weights: SourceWeights, name: str) -> None:
    if isinstance(part.feed_forward, FeedForward):
        _fill_products(part.feed_forward.inner, weights, name, "1")
        _fill_products(part.feed_forward.outer, weights, name, "2")
    if part.input_gate is not None and part.average_gate is not None:
        _fill_products(part.input_gate, weights, name, "i")
        _fill_products(part.average_gate, weights, name, "f")


def _fill_products(linear: nn.Linear, weights: SourceWeights, name: str, letters: str) -> None:
    """Fill a product from those with these letters, one after the other."""
    weights.fill(linear.weight, *(f"{name}_W{letter}" for letter in letters))
    weights.fill(linear.bias, *(f"{name}_b{letter}" for letter in letters))


def _fill_norm(norm: nn.Module, weights: SourceWeights, name: str, *, before: str | None = None) -> None:
    """Fill a norm; those before sublayers have the ending _pre, and sometimes another prefix, `before`."""
    for ours, theirs in (("weight", "ln_scale"), ("bias", "ln_bias")):
        names = (f"{name}_{theirs}", f"{before or name}_{theirs}_pre")
        weights.fill(norm.get_parameter(ours), weights.first_of(*names))


MARIAN_FILES = Family(
    name="Marian's own files",
    model_types=(),
    configure=configure,
    load=load,
    text=text,
    recognises=recognises,
    read_settings=read_settings,
    open_weights=open_weights,
    write_text=write_files,
    original=original,
)
