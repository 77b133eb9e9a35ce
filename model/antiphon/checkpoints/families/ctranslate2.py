"""CTranslate2 directories: encoder-decoder Transformers in float32, float16, bfloat16 or with integer weights.

Scalars in model.bin hold the settings that other families have in config.json (CTranslate2's python/ctranslate2/specs).
Newer file versions have some of them in config.json. The directory also has vocabularies and sometimes SentencePiece
models.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from antiphon.architecture.config import Activation, ModelConfig
from antiphon.checkpoints.ctranslate2_files import (
    ModelFile,
    is_model_file,
    is_shared,
    read_vocabularies,
    text,
    write_text,
)
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings, describe
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.errors import SourceError
from antiphon.transformer.layers import DecoderLayer, EncoderLayer, self_attention_of
from antiphon.transformer.transformer import Stack, Transformer

_HEADS = {"TransformerBase": 8, "TransformerBig": 16, "TransformerSpec": 8}  # for revisions without num_heads
_NEWEST_REVISION = 7
_CONFIG_FILE = 6  # first file version with a config.json

# Values of CTranslate2's ops::ActivationType; our model does not have the other activations.
_ACTIVATIONS: dict[int, Activation] = {0: "relu", 1: "gelu_tanh", 2: "silu", 3: "gelu", 4: "gelu_sigmoid"}
# Sinusoidal and relative positions have no maximum, so these are the maximum lengths of a bundle, in tokens.
_SOURCE_LEN, _TARGET_LEN = 1024, 512
# Logit of a begin token outside the vocabulary: too small to be sampled or to change a softmax.
_BEGIN_LOGIT = -64.0

_SIDES = r"(?:encoder|decoder)/"
_PARTS = (
    r"embeddings/weight|projection/(?:weight|bias)|position_encodings/encodings|layer(?:_norm|norm_embedding)/\w+|"
    r"layer_\d+/(?:(?:self_)?attention|ffn)/(?:layer_norm/(?:gamma|beta)|linear_\d(?:_noact)?/(?:weight|bias))|"
    r"layer_\d+/self_attention/relative_attention_bias"
)
_TENSOR = re.compile(_SIDES + f"(?:{_PARTS})")
_STRINGS = ("unk_token", "bos_token", "eos_token")
# Scalars that are read below, scalars without effect here, and scalars with only one supported value.
_READ = {
    "pre_norm", "activation", "num_heads", "scale_embeddings", "multiply_by_sqrt_depth", "start_from_zero_embedding",
    "queries_scale", "relative_attention_max_distance", "head_dim", "rotary_base", "scale_outputs",
    "with_source_bos", "with_source_eos", "with_target_bos", "user_decoder_start_tokens", "num_heads_kv", "rotary_dim",
}  # fmt: skip
_UNUSED = {"alignment_layer", "alignment_heads", "embeddings_merge", "alibi_use_positive_positions", "scale_alibi"}
_ONLY = {"alibi": 0, "multi_query_attention": 0, "rotary_interleave": 0}


def recognises(folder: Path) -> bool:
    """Return whether a directory has a model.bin in CTranslate2's format."""
    return is_model_file(folder / "model.bin")


def read_settings(folder: Path) -> Settings:
    """Return the settings of config.json, if it exists, and of model.bin, without the tensors' data.

    scalars: for each name all values in all layers of encoder and decoder.
    shapes: shape of each tensor.
    tokens: source and target vocabulary, with the tokens that CTranslate2 adds when it loads a model.
    Raises SourceError naming the file.
    """
    file = _open(folder)
    scalars: dict[str, set[float]] = {}
    for name in file:
        if not file.shape(name) and not name.endswith("weight_scale"):
            scalars.setdefault(name.rsplit("/", 1)[-1], set()).add(_scalar(file, name))
    names = {_renamed(name): name for name in _tensors(file)}
    described = _tokens(file, _config_file(folder, file))
    starts_from_zero = scalars.get("start_from_zero_embedding") == {1.0}
    return {
        **described,
        "model_type": "ctranslate2",
        "path": str(file.path),
        "heads": _HEADS[file.specification],
        "scalars": scalars,
        "shapes": {renamed: file.shape(name) for renamed, name in names.items()},
        "tie_source_target": _is_source_tied(folder, file),
        "tie_output": _is_embedding(file, "decoder/projection/weight") and "scale_outputs" not in scalars,
        "tokens": (tokens := read_vocabularies(folder, described, adds_begin=starts_from_zero)),
        # CTranslate2's default min_decoding_length, and the begin token that it can never generate.
        "min_new_tokens": 1,
        "suppress_tokens": [len(tokens[1]) - 1] if starts_from_zero else [],
    }


def configure(settings: Settings) -> ModelConfig:
    """Return the shape from the scalars and the tensors' shapes. Raises SourceError naming what is not supported."""
    _refuse_unknown(settings)
    shapes, scalars = settings["shapes"], _Scalars(settings)
    width = _shape(settings, "decoder/embeddings/weight")[1]
    layer = "encoder/layer_0"
    heads = int(scalars.of("num_heads", settings["heads"]))
    head_dim = _shape(settings, f"{layer}/self_attention/linear_0/weight")[0] // (3 * heads)
    if (kv_heads := scalars.of("num_heads_kv", heads)) != heads:
        raise SourceError(f"{settings['path']}: num_heads_kv is {kv_heads:g}; only num_heads, {heads}, is supported")
    has_norm_bias = f"{layer}/self_attention/layer_norm/beta" in shapes
    gated = f"{layer}/ffn/linear_0_noact/weight" in shapes
    if (kind := int(scalars.of("activation", 0))) not in _ACTIVATIONS:
        raise SourceError(f"{settings['path']}: activation is {kind}; supported are {sorted(_ACTIVATIONS)}")
    begins_with_zeros = scalars.of("start_from_zero_embedding", 0) == 1
    return describe(
        **_vocabularies(settings),
        d_model=width,
        encoder_layers=_count_layers(shapes, "encoder"),
        decoder_layers=_count_layers(shapes, "decoder"),
        num_heads=heads,
        head_dim=None if head_dim * heads == width else head_dim,
        d_ff=_shape(settings, f"{layer}/ffn/linear_0/weight")[0],
        norm="layernorm" if has_norm_bias else "rmsnorm",
        norm_placement="pre" if scalars.of("pre_norm", 1) else "post",
        norm_eps=settings.get("layer_norm_epsilon") or (1e-5 if has_norm_bias else 1e-6),
        activation=_ACTIVATIONS[kind],
        gated=gated,
        **_positions(settings, scalars, head_dim),
        tie_source_target=settings["tie_source_target"],
        tie_output=settings["tie_output"],
        output_bias=begins_with_zeros or "decoder/projection/bias" in shapes,
        scale_embeddings=_scales_embeddings(settings, scalars, width),
        embedding_norm="encoder/layernorm_embedding/gamma" in shapes,
        attention_scale=scalars.of("queries_scale", 0) or None,
        bias=f"{layer}/self_attention/linear_0/bias" in shapes,
        dropout=0.0,
    )


def open_weights(folder: Path, *, on_meta: bool = False) -> SourceWeights:
    """Return the tensors as float32, each converted when it is taken; a missing row of the begin token is added."""
    file = _open(folder)
    adds_row = any(_scalar(file, name) for name in file if name.endswith("start_from_zero_embedding"))
    names = {_renamed(name): name for name in _tensors(file)}
    longer = {"decoder/embeddings/weight", "decoder/projection/weight", "decoder/projection/bias"}
    longer |= {"encoder/embeddings/weight"} if _is_source_tied(folder, file) else set()
    factor = file.scalar("decoder/scale_outputs", 1.0)
    readers: dict[str, Callable[[], Tensor]] = {}
    for renamed, name in names.items():
        extra = None if not adds_row or renamed not in longer else _BEGIN_LOGIT if renamed.endswith("bias") else 0.0
        readers[renamed] = _reader(
            file, name, extra, factor if renamed == "decoder/projection/weight" else 1.0, on_meta
        )
    if adds_row and "decoder/projection/bias" not in names:
        rows = file.shape(names["decoder/projection/weight"])[0]
        readers["decoder/projection/bias"] = lambda: torch.cat([torch.zeros(rows), torch.tensor([_BEGIN_LOGIT])])
    return SourceWeights(readers, ExitStack(), on_meta=on_meta)


def _open(folder: Path) -> ModelFile:
    file = ModelFile(folder / "model.bin")
    if file.specification not in _HEADS or not 2 <= file.revision <= _NEWEST_REVISION:
        known = ", ".join(_HEADS)
        raise SourceError(
            f"{file.path}: its specification is {file.specification!r} revision {file.revision}; "
            f"supported are {known}, revisions 2 to {_NEWEST_REVISION}"
        )
    return file


def _config_file(folder: Path, file: ModelFile) -> dict[str, Any]:
    path = folder / "config.json"
    if file.version < _CONFIG_FILE or not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
        return dict(content)
    except (OSError, ValueError, TypeError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None


def _tokens(file: ModelFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json, completed from the scalars of older files: special tokens and where they are added."""
    names = {
        key: config.get(key) or file.text(key, default)
        for key, default in zip(_STRINGS, ("<unk>", "<s>", "</s>"), strict=True)
    }
    begin = names["bos_token"] if file.scalar("with_target_bos", 1) else names["eos_token"]
    if file.scalar("user_decoder_start_tokens", 0):
        begin = None
    older = {
        "decoder_start_token": begin,
        "add_source_bos": bool(file.scalar("with_source_bos", 0)),
        "add_source_eos": bool(file.scalar("with_source_eos", 0)),
    }
    return {**older, **config, **names}


def _tensors(file: ModelFile) -> list[str]:
    return [name for name in file if file.shape(name) and not name.endswith("weight_scale") and name not in _STRINGS]


def _is_source_tied(folder: Path, file: ModelFile) -> bool:
    """Return whether source and target share one vocabulary and one embedding."""
    names = ("encoder/embeddings_0/weight", "encoder/embeddings/weight")
    return is_shared(folder) and any(_is_embedding(file, name) for name in names)


def _is_embedding(file: ModelFile, name: str) -> bool:
    """Return whether a tensor is equal to the target embedding."""
    embedding = "decoder/embeddings/weight"
    return name in file and embedding in file and file.is_same(name, embedding)


def _renamed(name: str) -> str:
    """Return the tensor name of newer revisions; some revisions number the only source embedding."""
    return name.replace("encoder/embeddings_0/", "encoder/embeddings/")


def _scalar(file: ModelFile, name: str) -> float:
    """Return a scalar; a flag to scale embeddings by sqrt(d_model) becomes -1, since 1 is a factor."""
    value = file.scalar(name, 0)
    is_flag = name.endswith(("scale_embeddings", "multiply_by_sqrt_depth")) and file.dtype(name) == "int8"
    return -value if is_flag else value


def _reader(file: ModelFile, name: str, extra: float | None, factor: float, on_meta: bool) -> Callable[[], Tensor]:  # noqa: FBT001
    shape = file.shape(name)
    if on_meta:
        size = (shape[0] + (extra is not None), *shape[1:])
        return lambda: torch.empty(size, device="meta")

    def read() -> Tensor:
        values = torch.from_numpy(file.floats(name)) * factor
        return values if extra is None else torch.cat([values, torch.full((1, *shape[1:]), extra)])

    return read


class _Scalars:
    """Scalars that must have the same value in the whole model."""

    def __init__(self, settings: Settings) -> None:
        self._values: Mapping[str, set[float]] = settings["scalars"]
        self._path = settings["path"]

    def of(self, name: str, default: float) -> float:
        """Return the only value of a name, or `default` without one. Raises SourceError if layers differ."""
        values = self._values.get(name, {default})
        if len(values) > 1:
            raise SourceError(f"{self._path}: {name} is {sorted(values)}; only one value for all layers is supported")
        return next(iter(values))


def _refuse_unknown(settings: Settings) -> None:
    for name in settings["shapes"]:
        if not _TENSOR.fullmatch(name):
            raise SourceError(f"{settings['path']}: {name} belongs to a part that is not supported")
    for name, values in settings["scalars"].items():
        if name in _ONLY and values != {_ONLY[name]}:
            raise SourceError(f"{settings['path']}: {name} is {sorted(values)}; only {_ONLY[name]} is supported")
        if name not in _READ | _UNUSED | _ONLY.keys():
            raise SourceError(f"{settings['path']}: {name} is {sorted(values)}, which is not supported")
    if settings.get("quantization_type"):
        kind = settings["quantization_type"]
        raise SourceError(f"config.json: quantization_type is {kind!r}; no value of it is supported")


def _shape(settings: Settings, name: str) -> tuple[int, ...]:
    try:
        shape: tuple[int, ...] = settings["shapes"][name]
    except KeyError:
        raise SourceError(f"{settings['path']}: the tensor {name} is missing") from None
    return shape


def _count_layers(shapes: Mapping[str, object], side: str) -> int:
    return len({name.split("/")[1] for name in shapes if name.startswith(f"{side}/layer_") and name.count("/") > 2})


def _vocabularies(settings: Settings) -> dict[str, Any]:
    """Return the vocabulary sizes and the target's special token ids."""
    source, target = settings["tokens"]
    rows = {side: _shape(settings, f"{side}/embeddings/weight")[0] for side in ("encoder", "decoder")}
    begins_with_zeros = settings["scalars"].get("start_from_zero_embedding") == {1.0}
    for side, tokens in (("encoder", source), ("decoder", target)):
        added = begins_with_zeros and (side == "decoder" or settings["tie_source_target"])
        if len(tokens) != rows[side] + added:
            raise SourceError(
                f"{settings['path']}: the {side} embeds {rows[side]} tokens; its vocabulary has {len(tokens) - added}"
            )
    ids = {token: index for index, token in reversed(list(enumerate(target)))}
    begin, end = settings["decoder_start_token"], settings["eos_token"]
    if begin is None:
        raise SourceError(
            "decoder_start_token is null, so each caller must give the begin token, which is not supported: "
            "import the original checkpoint from before the conversion"
        )
    for token in (begin, end):
        if token not in ids:
            raise SourceError(f"the target vocabulary has no {token}")
    padding = next((ids[token] for token in ("<pad>", "<blank>") if token in ids), ids[end])
    return dict(
        vocab_size=len(target),
        source_vocab_size=None if len(source) == len(target) else len(source),
        bos_id=len(target) - 1 if begins_with_zeros else ids[begin],
        eos_id=ids[end],
        unk_id=ids[settings["unk_token"]],
        pad_id=padding,
    )


def _positions(settings: Settings, scalars: _Scalars, head_dim: int) -> dict[str, Any]:
    shapes, names = settings["shapes"], ("encoder", "decoder")
    tables = [shapes.get(f"{side}/position_encodings/encodings") for side in names]
    lengths = dict(max_source_len=_SOURCE_LEN, max_target_len=_TARGET_LEN)
    bias = shapes.get("encoder/layer_0/self_attention/relative_attention_bias")
    if bias is not None:
        reach = int(scalars.of("relative_attention_max_distance", 128))
        return dict(positions="t5_relative", relative_buckets=bias[0], relative_max_distance=reach, **lengths)
    if "rotary_dim" in settings["scalars"]:
        if (width := scalars.of("rotary_dim", 0)) not in (0, head_dim):
            raise SourceError(
                f"{settings['path']}: rotary_dim is {width:g}; only the head width {head_dim} is supported"
            )
        return dict(positions="rope", rope_theta=scalars.of("rotary_base", 10000), **lengths)
    if all(table is not None for table in tables):
        return dict(positions="learned", max_source_len=tables[0][0], max_target_len=tables[1][0])
    if any(table is not None for table in tables):
        raise SourceError(f"{settings['path']}: only one of encoder and decoder has position_encodings, expected both")
    # layers/common.cc of CTranslate2 counts positions from 1.
    return dict(positions="sinusoidal", sinusoids="fairseq", positions_offset=1, **lengths)


def _scales_embeddings(settings: Settings, scalars: _Scalars, width: int) -> bool:
    factor = scalars.of("scale_embeddings", scalars.of("multiply_by_sqrt_depth", -1))
    if factor in (0, 1):
        return False
    if factor != -1 and not math.isclose(factor, math.sqrt(width), rel_tol=1e-6):
        raise SourceError(f"{settings['path']}: scale_embeddings is {factor:g}; only 1 and sqrt(d_model) are supported")
    return True


def load(model: Transformer, weights: SourceWeights, _: Settings) -> None:
    """Fill the model with the tensors of a model.bin."""
    assert model.encoder is not None
    assert model.decoder is not None
    config = model.config
    target = ["decoder/embeddings/weight"]
    if config.tie_source_target:
        target.append("encoder/embeddings/weight")
    else:
        weights.fill(model.encoder.embedding.weight, "encoder/embeddings/weight")
    if config.tie_output:
        target.append("decoder/projection/weight")
    else:
        weights.fill(model.output.weight, "decoder/projection/weight")
    weights.fill_tied(model.decoder.embedding.weight, *target)
    if config.output_bias:
        weights.fill(model.output.bias, "decoder/projection/bias")
    # Every layer can have the bias table; the first layer's table is used.
    weights.ignore("*/layer_[1-9]*/self_attention/relative_attention_bias")
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        _load_stack(stack, weights, name, config)


def _load_stack(stack: Stack, weights: SourceWeights, name: str, config: ModelConfig) -> None:
    if config.positions == "learned" and stack.positions.table is not None:
        weights.fill(stack.positions.table, f"{name}/position_encodings/encodings")
    if config.positions == "t5_relative":
        weights.fill(stack.relative_bias.weight, f"{name}/layer_0/self_attention/relative_attention_bias")
    if config.embedding_norm:
        _fill_norm(stack.embedding_norm, weights, f"{name}/layernorm_embedding")
    if config.norm_placement == "pre":
        _fill_norm(stack.final_norm, weights, f"{name}/layer_norm")
    for index, layer in enumerate(stack.layers):
        assert isinstance(layer, EncoderLayer | DecoderLayer)
        _load_layer(layer, weights, f"{name}/layer_{index}")


def _load_layer(layer: EncoderLayer | DecoderLayer, weights: SourceWeights, name: str) -> None:
    theirs = f"{name}/self_attention"
    _fill_linear(self_attention_of(layer).qkv, weights, f"{theirs}/linear_0")
    _fill_linear(self_attention_of(layer).out, weights, f"{theirs}/linear_1")
    _fill_norm(layer.self_residual.norm, weights, f"{theirs}/layer_norm")
    if isinstance(layer, DecoderLayer) and layer.cross_attention is not None and layer.cross_residual is not None:
        cross, theirs = layer.cross_attention, f"{name}/attention"
        for index, linear in enumerate((cross.query, cross.kv, cross.out)):
            _fill_linear(linear, weights, f"{theirs}/linear_{index}")
        _fill_norm(layer.cross_residual.norm, weights, f"{theirs}/layer_norm")
    theirs, part = f"{name}/ffn", layer.feed_forward
    _fill_linear(part.inner, weights, f"{theirs}/linear_0", *([f"{theirs}/linear_0_noact"] if part.gated else []))
    _fill_linear(part.outer, weights, f"{theirs}/linear_1")
    _fill_norm(layer.feed_forward_residual.norm, weights, f"{theirs}/layer_norm")


def _fill_linear(linear: nn.Linear, weights: SourceWeights, *names: str) -> None:
    weights.fill(linear.weight, *(f"{name}/weight" for name in names))
    if linear.bias is not None:
        weights.fill(linear.bias, *(f"{name}/bias" for name in names))


def _fill_norm(norm: nn.Module, weights: SourceWeights, name: str) -> None:
    for ours, theirs in (("weight", "gamma"), ("bias", "beta")):
        if isinstance(values := getattr(norm, ours, None), Tensor):
            weights.fill(values, f"{name}/{theirs}")


CTRANSLATE2 = Family(
    name="CTranslate2",
    model_types=(),
    configure=configure,
    load=load,
    text=text,
    recognises=recognises,
    read_settings=read_settings,
    open_weights=open_weights,
    write_text=write_text,
)
