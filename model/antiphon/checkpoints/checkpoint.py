"""Checkpoints of this project: directories of safetensors and JSON files, without pickle.

    config.json            ModelConfig
    model.safetensors      weights
    tokenizer.json         or the files that text.json names
    text.json              TextFormat; optional, for models other than our translation models
    provenance.json        origin of the data; optional
    state.json, optimizer.safetensors    state of a training run, to resume it; optional

A directory is written completely or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import GenerationDefaults, Provenance
from antiphon.errors import CheckpointError
from antiphon.text.format import TextFormat
from antiphon.text.tokenizer import Tokenizer, byte_bpe_format, open_tokenizer
from antiphon.transformer.transformer import Transformer

CHECKPOINT_VERSION = 1
TEXT_NAME = "text.json"
_TABLES = {"max_source_len": "encoder.positions.table", "max_target_len": "decoder.positions.table"}


Described = TypeVar("Described", bound=BaseModel)


class Shape(Protocol):
    """Shape of a model as its checkpoint stores it: ModelConfig, or that of a model that is only trained."""

    @property
    def d_model(self) -> int:
        """Width of the states, on which the default learning rate depends."""
        ...

    def model_dump(self) -> dict[str, Any]:
        """Return the fields for config.json."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A model in evaluation mode with its tokenizer and text format.

    text_folder: directory of the files that `text` names.
    """

    config: ModelConfig
    model: Transformer
    tokenizer: Tokenizer
    text: TextFormat
    text_folder: Path
    provenance: Provenance | None
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; tied ones once, because safetensors refuses shared storage."""
    seen: set[int] = set()
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            weights[name] = tensor.detach().contiguous()
    return weights


def save_checkpoint(
    path: Path,
    *,
    config: Shape,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    text: TextFormat | None = None,
    text_folder: Path | None = None,
    provenance: Provenance | None = None,
    extra: dict[str, dict[str, Tensor]] | None = None,
    state: dict[str, object] | None = None,
) -> None:
    """Write a checkpoint directory. A reader sees the old directory, the new one, or none.

    text: text format; None: that of our translation models (byte_bpe_format).
    text_folder: directory of the files that `text` names; None: the tokenizer writes its file.
    extra: further safetensors files by stem (optimiser state).
    state: progress of a run, written as JSON.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    described = {"version": CHECKPOINT_VERSION, "model": config.model_dump()}
    (temporary / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    save_file(weights, temporary / "model.safetensors")
    if text is None or text_folder is None:
        tokenizer.save(temporary / "tokenizer.json")
    else:
        for name in text.files:
            shutil.copyfile(text_folder / name, temporary / name)
    if text is not None:
        (temporary / TEXT_NAME).write_text(text.model_dump_json(indent=2) + "\n", encoding="utf-8")
    if provenance is not None:
        (temporary / "provenance.json").write_text(provenance.model_dump_json(indent=2) + "\n", encoding="utf-8")
    for stem, tensors in (extra or {}).items():
        save_file(tensors, temporary / f"{stem}.safetensors")
    if state is not None:
        (temporary / "state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
    shutil.rmtree(path, ignore_errors=True)
    temporary.replace(path)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint directory. Raises CheckpointError or TokenizerError naming the file."""
    config = read_config(path / "config.json", ModelConfig)
    model = Transformer(config)
    load_weights(model, path / "model.safetensors")
    text = _read_optional(path / TEXT_NAME, TextFormat)
    tokenizer = Tokenizer.load(path / "tokenizer.json") if text is None else open_tokenizer(path, text)
    is_own = text is None or text.kind == "byte_bpe"  # imported models can have padded vocabularies
    if tokenizer.vocab_size > config.vocab_size or (is_own and tokenizer.vocab_size != config.vocab_size):
        raise CheckpointError(
            f"{path / 'tokenizer.json'} has {tokenizer.vocab_size} tokens, "
            f"but config.json has vocab_size={config.vocab_size}"
        )
    return Checkpoint(
        config=config,
        model=model.eval(),
        tokenizer=tokenizer,
        text=text or byte_bpe_format(tokenizer),
        text_folder=path,
        provenance=_read_optional(path / "provenance.json", Provenance),
    )


def _read_optional(path: Path, kind: type[Described]) -> Described | None:
    if not path.is_file():
        return None
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def read_config(path: Path, kind: type[Described]) -> Described:
    """Read the shape of a model, of this kind, from config.json. Raises CheckpointError naming file and field."""
    try:
        described = json.loads(path.read_bytes())
        if described.get("version") != CHECKPOINT_VERSION:
            raise CheckpointError(f"{path}: version is {described.get('version')!r}, expected {CHECKPOINT_VERSION}")
        return kind.model_validate(described["model"])
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is not a checkpoint: {path.name} is missing") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name. Raises CheckpointError naming the file."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Copy the tensors of a safetensors file into a model.

    The file must have exactly the model's tensors, with tied ones once. Raises CheckpointError naming file and tensor.
    """
    weights = read_tensors(path)
    expected = weights_of(model)
    if expected.keys() != weights.keys():
        missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
        raise CheckpointError(f"{path}: missing tensors {missing[:3]}, unknown tensors {unknown[:3]}")
    with torch.no_grad():
        for name, tensor in expected.items():
            if tensor.shape != weights[name].shape:
                raise CheckpointError(
                    f"{path}: {name} has shape {list(weights[name].shape)}, expected {list(tensor.shape)}"
                )
            tensor.copy_(weights[name])


def average_weights(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Return the mean of the weights of several checkpoints of one run (Vaswani et al. 2017, section 6.1).

    Sums are float64, the result is float32. Raises CheckpointError for an empty list or a file that cannot be read.
    """
    if not paths:
        raise CheckpointError("there is no checkpoint to average; at least one is needed")
    total: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in read_tensors(path / "model.safetensors").items():
            total[name] = total.get(name, torch.zeros_like(tensor, dtype=torch.float64)) + tensor.double()
    return {name: (tensor / len(paths)).float() for name, tensor in total.items()}


def with_lengths(
    checkpoint: Checkpoint, *, max_source_len: int | None = None, max_target_len: int | None = None
) -> Checkpoint:
    """Return the checkpoint with other maximum lengths in tokens; None keeps a length.

    Kinds of positions differ in what they do beyond the lengths of the training (Press et al. 2022).
    Learned positions can only become fewer: the table has no rows beyond them. Raises CheckpointError naming the field.
    """
    asked = {"max_source_len": max_source_len, "max_target_len": max_target_len}
    changed = {name: value for name, value in asked.items() if value is not None}
    if not changed:
        return checkpoint
    before = checkpoint.config
    for name, value in changed.items():
        if before.positions == "learned" and value > getattr(before, name):
            raise CheckpointError(
                f"{name}={value} is above {getattr(before, name)}: learned positions have no vectors beyond it"
            )
    try:
        config = ModelConfig.model_validate({**before.model_dump(), **changed})
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return replace(checkpoint, config=config, model=_copied(checkpoint.model, config))


def _copied(model: Transformer, config: ModelConfig) -> Transformer:
    weights = model.state_dict()
    for name, table in _TABLES.items():
        if table in weights:
            weights[table] = weights[table][: getattr(config, name) + config.positions_offset]
    with torch.random.fork_rng(devices=[]):
        longer = Transformer(config)
    longer.load_state_dict(weights)
    return longer.eval()
