"""Marian's own files: models of OPUS-MT, Firefox and Bergamot, without transformers.

A model file holds tensors and the options of its training (marian_files.py). The folder also has vocabularies, and a
YAML file with the settings of the decoder. Formulas are those of Marian's src/models/transformer.h, whose options are
named in errors. Families of transformers' own conversions are in encoder_decoder.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from antiphon.architecture.config import Activation, ModelConfig
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.marian_files import MarianFile, is_model_file
from antiphon.checkpoints.settings import Settings, describe
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.errors import SourceError
from antiphon.text.format import TextFormat
from antiphon.text.segmenters import read_pieces
from antiphon.transformer.layers import DecoderLayer, EncoderLayer, SimpleRecurrence
from antiphon.transformer.transformer import Transformer

# Marian has no maximum length of a target but a multiple of the source's; these are the limits of a bundle, in tokens.
_SOURCE_LEN, _TARGET_LEN = 1024, 512
_NORM_EPS = 1e-9
# Logit of the begin token, which Marian has as a zero vector only: too small to be sampled or to change a softmax.
_BEGIN_LOGIT = -64.0
_END, _UNKNOWN = "</s>", "<unk>"
_ACTIVATIONS: dict[str, Activation] = {"relu": "relu", "swish": "silu"}
# Options with only some supported values; the first is Marian's default, for files of versions without the option.
_ONLY: dict[str, tuple[object, ...]] = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": ("self-attention", "rnn"),
    "transformer-ffn-activation": ("swish", *(name for name in _ACTIVATIONS if name != "swish")),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-decoder-dim-ffn": (0,),
    "transformer-no-projection": (False,),
    "transformer-rnn-projection": (False,),
    "transformer-train-position-embeddings": (False,),
    "transformer-no-bias": (False,),
    "transformer-no-affine": (False,),
    "transformer-tied-layers": ([],),
    "transformer-pool": (False,),
    "transformer-postprocess-emb": ("d", "", "n", "nd"),
    "lemma-dim-emb": (0,),
    "right-left": (False,),
    "skip": (False,),
    "ulr": (False,),
}
# Where norms are: pre- and postprocessing of sublayers and the processing after the last layer, without dropout ("d").
_PLACEMENTS = {("", "an", ""): "post", ("n", "a", "n"): "pre"}


def recognises(folder: Path) -> bool:
    """Return whether a directory has a model file of Marian."""
    return _model_path(folder) is not None


def read_settings(folder: Path) -> Settings:
    """Return the options of the model, and settings of the decoder with the names of transformers.

    path: the model file. shapes: of each tensor. decoder: the YAML file of the decoder. vocabularies: names of the
    vocabulary files, one or two, and tokens: from token to id for each.
    Raises SourceError naming the file or the option.
    """
    file, decoder = MarianFile(_path(folder)), _decoder(folder)
    names = _vocabularies(folder, decoder)
    tokens = [_tokens(folder / name) for name in names]
    for name, ids in zip(names, tokens, strict=True):
        if _END not in ids:
            raise SourceError(f"{folder / name} has no {_END}")
    target = tokens[-1]
    begin = _rows(file)[1]
    return {
        "options": file.options,
        "model_type": "marian-files",
        "path": str(file.path),
        "shapes": {name: file.shape(name) for name in file},
        "decoder": decoder,
        "vocabularies": names,
        "tokens": tokens,
        "num_beams": int(decoder.get("beam-size", 1)),
        "length_penalty": float(decoder.get("normalize", 0.0)),
        # Marian never generates the unknown token, unless asked with --allow-unk.
        "suppress_tokens": [
            *([target[_UNKNOWN]] if _UNKNOWN in target and not decoder.get("allow-unk") else []),
            begin,
        ],
    }


def configure(settings: Settings) -> ModelConfig:
    """Return the shape from the options and the tensors' shapes. Raises SourceError naming what is not supported."""
    option = _Options(settings)
    rows = [_shape(settings, name)[0] for name in _embeddings(settings["shapes"])]
    tokens = settings["tokens"]
    for name, ids, count in zip(settings["vocabularies"], tokens, (rows[0], rows[-1])[-len(tokens) :], strict=True):
        if max(ids.values()) >= count:
            raise SourceError(f"{name} has the id {max(ids.values())}; the model embeds {count} tokens")
    is_tied = len(rows) == 1
    target, begin = tokens[-1], rows[-1]
    recurrent = option("transformer-decoder-autoreg") == "rnn"
    if recurrent and (cell := option.any("dec-cell", "gru")) != "ssru":
        raise SourceError(f"{settings['path']}: dec-cell is {cell!r}; supported with transformer-decoder-autoreg: ssru")
    return describe(
        vocab_size=begin + 1,
        source_vocab_size=None if is_tied or rows[0] == begin + 1 else rows[0],
        d_model=option.number("dim-emb"),
        encoder_layers=option.number("enc-depth"),
        decoder_layers=option.number("dec-depth"),
        num_heads=option.number("transformer-heads"),
        d_ff=option.number("transformer-dim-ffn"),
        decoder_self="ssru" if recurrent else "attention",
        norm="layernorm",
        norm_placement=_placement(settings, option),
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
        pad_id=target[_END],
        bos_id=begin,
        eos_id=target[_END],
        unk_id=target.get(_UNKNOWN, target[_END]),
    )


def open_weights(folder: Path, *, on_meta: bool = False) -> SourceWeights:
    """Return the tensors as float32 and in the layout of PyTorch, each converted when it is taken.

    Target embeddings and outputs get a row for the begin token, with zeros, and a bias that is never chosen.
    """
    file = MarianFile(_path(folder))
    shapes = {name: file.shape(name) for name in file}
    longer = {_embeddings(shapes)[-1], "decoder_ff_logit_out_W", "decoder_ff_logit_out_Wt", "decoder_ff_logit_out_b"}
    readers = {name: _reader(file, name, adds_row=name in longer, on_meta=on_meta) for name in file}
    if "decoder_ff_logit_out_b" not in file:  # output-omit-bias
        rows = _rows(file)[1]
        readers["decoder_ff_logit_out_b"] = lambda: torch.cat([torch.zeros(rows), torch.tensor([_BEGIN_LOGIT])])
    return SourceWeights(readers, ExitStack(), on_meta=on_meta)


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


def text(folder: Path, settings: Settings, config: ModelConfig) -> TextFormat:
    """Return the text format: SentencePiece models, with the ids of the vocabularies where these are other files."""
    names, pieces = settings["vocabularies"], _pieces(folder)
    common: dict[str, Any] = dict(special_ids=(config.eos_id, config.bos_id), template=("$text", config.eos_id))
    if names[0].endswith(".spm"):
        return TextFormat(kind="sentencepiece", source=names[0], target=names[-1], **common)
    written = _written(settings, "json" if pieces else "txt")
    if pieces:
        common |= dict(source_vocabulary=written[0], target_vocabulary=written[-1])
        return TextFormat(kind="sentencepiece", source=pieces[0], target=pieces[-1], **common)
    return TextFormat(kind="words", source=written[0], target=written[-1], **common)


def write_text(folder: Path, settings: Settings, to: Path) -> None:
    """Write vocabularies that are YAML files: one token a line, or JSON from piece to id for SentencePiece models."""
    if settings["vocabularies"][0].endswith(".spm"):
        return
    is_json = bool(_pieces(folder))
    for name, ids in zip(_written(settings, "json" if is_json else "txt"), settings["tokens"], strict=True):
        by_id = {index: token for token, index in ids.items()}
        lines = "".join(f"{by_id.get(index, '')}\n" for index in range(max(by_id) + 1))
        content = json.dumps(ids, ensure_ascii=False) if is_json else lines
        (to / name).write_text(content, encoding="utf-8", newline="\n")


class _Options:
    """Options of a model, with Marian's defaults. Raises SourceError naming an option without support."""

    def __init__(self, settings: Settings) -> None:
        self._options: Mapping[str, Any] = settings["options"]
        self._path = settings["path"]
        for name in _ONLY:
            self(name)

    def __call__(self, name: str) -> Any:
        """Return the value of an option of _ONLY."""
        allowed = _ONLY[name]
        value = self._options.get(name, allowed[0])
        if value not in allowed:
            shown = " or ".join(repr(each) for each in allowed)
            raise SourceError(f"{self._path}: {name} is {value!r}; supported: {shown}")
        return value

    def any(self, name: str, default: Any) -> Any:
        """Return the value of another option."""
        return self._options.get(name, default)

    def number(self, name: str) -> int:
        """Return a whole number above 0."""
        value = self._options.get(name)
        if not isinstance(value, int) or value < 1:
            raise SourceError(f"{self._path}: {name} is {value!r}; it must be a whole number from 1 on")
        return value


def _placement(settings: Settings, option: _Options) -> str:
    names = [f"transformer-{name}" for name in ("preprocess", "postprocess", "postprocess-top")]
    values = [str(option.any(name, default)) for name, default in zip(names, ("", "dan", ""), strict=True)]
    placement = _PLACEMENTS.get(tuple(value.replace("d", "") for value in values))  # type: ignore[call-overload]
    if placement is None:
        given = ", ".join(f"{name} {value!r}" for name, value in zip(names, values, strict=True))
        raise SourceError(
            f"{settings['path']}: {given} is not supported; supported are '', 'an', '' and 'n', 'a', 'n', each with 'd'"
        )
    return placement


def _model_path(folder: Path) -> Path | None:
    """Return the model that the decoder's YAML file names, or the only one of the directory; None without one."""
    named = [Path(str(name)).name for name in _decoder(folder).get("models", [])]
    found = [folder / name for name in named] or sorted(
        path for path in folder.iterdir() if path.suffix in (".npz", ".bin") and is_model_file(path)
    )
    if len(found) > 1:
        raise SourceError(f"{folder} has several Marian models: {', '.join(path.name for path in found)}; keep one")
    return found[0] if found and is_model_file(found[0]) else None


def _path(folder: Path) -> Path:
    path = _model_path(folder)
    if path is None:
        raise SourceError(f"{folder} has no Marian model, a .npz or .bin file")
    return path


def _decoder(folder: Path) -> dict[str, Any]:
    """Return the settings of the decoder: the first YAML file with a list of models; empty without one."""
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".yml", ".yaml")):
        if "vocab" in path.name:
            continue
        try:
            content = yaml.safe_load(path.read_bytes())
        except (OSError, yaml.YAMLError) as error:
            raise SourceError(f"{path} cannot be read: {error}") from None
        if isinstance(content, dict) and isinstance(content.get("models"), list):
            return content
    return {}


def _vocabularies(folder: Path, decoder: Mapping[str, Any]) -> list[str]:
    """Return the names of the vocabulary files: one for both sides, or source and target."""
    named = [Path(str(name)).name for name in decoder.get("vocabs") or []]
    names = named or [path.name for path in sorted(folder.iterdir()) if path.suffix == ".spm" or _is_yaml_vocab(path)]
    names = list(dict.fromkeys(names))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise SourceError(f"{folder} has no {missing[0]}, a vocabulary that its decoder's YAML file names")
    if not 1 <= len(names) <= 2:
        raise SourceError(f"{folder} has {len(names)} vocabularies (.spm, *vocab*.yml); it must have 1 or 2")
    if any(name.endswith(".fsv") for name in names):
        raise SourceError(f"{folder}: factored vocabularies (.fsv) are not supported")
    return names


def _is_yaml_vocab(path: Path) -> bool:
    return path.suffix in (".yml", ".yaml") and "vocab" in path.name


def _tokens(path: Path) -> dict[str, int]:
    """Return the id of each token of a vocabulary. Raises SourceError naming the file."""
    if path.suffix == ".spm":
        pieces = read_pieces(path)
        return {pieces.id_to_piece(index): index for index in reversed(range(pieces.get_piece_size()))}
    try:
        # BaseLoader reads every scalar as text: a token may look like a number, a date or a truth value.
        content = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
        return {str(token): int(index) for token, index in content.items()}
    except (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None


def _pieces(folder: Path) -> list[str]:
    """Return the SentencePiece models beside YAML vocabularies: source.spm and target.spm, or one for both sides."""
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".spm")


def _written(settings: Settings, suffix: str) -> list[str]:
    sides: Sequence[str] = ("shared",) if len(settings["vocabularies"]) == 1 else ("source", "target")
    return [f"{side}_vocabulary.{suffix}" for side in sides]


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
    is_vector = len(shape) == 2 and shape[0] == 1 and "Wemb" not in name
    # Products have W and a letter or number; those of outputs that are tied to embeddings are stored as these, Wt.
    is_product = not is_vector and "Wemb" not in name and not name.endswith("_Wt")
    size = shape[1:] if is_vector else shape[::-1] if is_product else shape
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
        _fill_norm(layer.self_residual.norm, weights, f"{theirs}_ffn")
    else:
        _fill_attention(layer.self_attention.qkv, weights, f"{name}_self", "qkv")
        _fill_attention(layer.self_attention.out, weights, f"{name}_self", "o")
        _fill_norm(layer.self_residual.norm, weights, f"{name}_self_Wo")
    if isinstance(layer, DecoderLayer) and layer.cross_attention is not None and layer.cross_residual is not None:
        cross, theirs = layer.cross_attention, f"{name}_context"
        for linear, letters in ((cross.query, "q"), (cross.kv, "kv"), (cross.out, "o")):
            _fill_attention(linear, weights, theirs, letters)
        _fill_norm(layer.cross_residual.norm, weights, f"{theirs}_Wo")
    _fill_attention(layer.feed_forward.inner, weights, f"{name}_ffn", "1")
    _fill_attention(layer.feed_forward.outer, weights, f"{name}_ffn", "2")
    _fill_norm(layer.feed_forward_residual.norm, weights, f"{name}_ffn_ffn")


def _fill_attention(linear: nn.Linear, weights: SourceWeights, name: str, letters: str) -> None:
    """Fill a product from those with these letters, one after the other."""
    weights.fill(linear.weight, *(f"{name}_W{letter}" for letter in letters))
    weights.fill(linear.bias, *(f"{name}_b{letter}" for letter in letters))


def _fill_norm(norm: nn.Module, weights: SourceWeights, name: str) -> None:
    """Fill a norm; those before sublayers have the ending _pre."""
    for ours, theirs in (("weight", "ln_scale"), ("bias", "ln_bias")):
        weights.fill(norm.get_parameter(ours), weights.first_of(f"{name}_{theirs}", f"{name}_{theirs}_pre"))


MARIAN_FILES = Family(
    name="Marian's own files",
    model_types=(),
    configure=configure,
    load=load,
    text=text,
    recognises=recognises,
    read_settings=read_settings,
    open_weights=open_weights,
    write_text=write_text,
)
