"""A LoRA adapter as `peft` saves it: its tensors by the names of the checkpoint's tensors that they change.

    adapter_config.json          settings, see LoraConfig
    adapter_model.safetensors    or adapter_model.bin, read like a checkpoint's: no pickled code is run

The names of the tensors decide which modules are changed. What the names of peft mean:

    base_model.model.PATH.lora_A.weight, .lora_B.weight      low-rank product for PATH.weight
    base_model.model.PATH.lora_embedding_A, ..._B            the same for an embedding
    base_model.model.PATH.lora_magnitude_vector              magnitudes of DoRA
    base_model.model.PATH.lora_B.bias                        addition to PATH.bias
    base_model.model.NAME, PATH.base_layer.weight            tensors that replace the checkpoint's: heads, biases

Every setting that would change the merged weights in another way is refused, also settings of later versions of peft.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor

from antiphon.checkpoints.settings import read_json
from antiphon.checkpoints.source_weights import Change, SourceWeights, open_tensors
from antiphon.errors import SourceError

CONFIG_NAME = "adapter_config.json"
_STEM = "adapter_model"
_FILES = (f"{_STEM}.safetensors", f"{_STEM}.bin")
PREFIX = "base_model.model."
_LINEAR = ("lora_A.weight", "lora_B.weight")
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
_MAGNITUDE, _BIAS = "lora_magnitude_vector", "lora_B.bias"
_PART = re.compile(rf"(.+)\.({'|'.join(map(re.escape, (*_LINEAR, *_EMBEDDING, _BIAS, _MAGNITUDE)))})(?:\.weight)?")
# Supported values of settings that choose the method. Other ways to start (pissa, olora, corda, loftq, lora_ga) change
# the checkpoint's own weights before the training, so such an adapter does not fit the checkpoint on disk.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", "all", "lora_only"),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
# Settings of the training only, and those that the names of the tensors repeat.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
        "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size",
        "revision", "runtime_config", "target_modules", "task_type",
    }
)  # fmt: skip


def _as_pattern(name: str) -> str:
    """Return a name of rank_pattern or alpha_pattern, which is a regular expression. Raises ValueError."""
    try:
        re.compile(name)
    except re.error as error:
        raise ValueError(f"{name!r} is not a regular expression: {error}") from None
    return name


_Pattern = Annotated[str, BeforeValidator(_as_pattern)]
_Rank = Annotated[int, Field(ge=1)]


class LoraConfig(BaseModel):
    """Settings that the merged weights depend on, with peft's defaults, and those that describe the training.

    rank_pattern, alpha_pattern: rank and alpha of modules whose path ends with a match of the regular expression.
    use_rslora: scaling by alpha / sqrt(rank) (Kalajdzievski 2023) instead of alpha / rank.
    use_dora: the adapter has magnitudes (Liu et al. 2024).
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    r: _Rank = 8
    lora_alpha: float = 8
    rank_pattern: dict[_Pattern, _Rank] = {}
    alpha_pattern: dict[_Pattern, float] = {}
    use_rslora: bool = False
    use_dora: bool = False
    task_type: str | None = None
    auto_mapping: dict[str, Any] | None = None
    base_model_name_or_path: str | None = None

    def rank(self, module: str) -> int:
        """Return the rank of a module of this path in the trained model."""
        return self.rank_pattern.get(_matching(self.rank_pattern, module), self.r)

    def scaling(self, module: str) -> float:
        """Return the factor of a module's low-rank product."""
        rank = self.rank(module)
        alpha = self.alpha_pattern.get(_matching(self.alpha_pattern, module), self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _matching(patterns: Iterable[str], module: str) -> str:
    """Return the first pattern that a path ends with, as peft chooses it; an empty one if none does."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), "")


def read_lora_config(folder: Path) -> LoraConfig:
    """Return the settings of an adapter's directory. Raises SourceError naming the file, the field and its value."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise SourceError(f"{folder} is not an adapter's directory: it has no {CONFIG_NAME}, which peft writes")
    stated = read_json(path)
    _refuse_unsupported(path, stated)
    try:
        return LoraConfig.model_validate({name: value for name, value in stated.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "[key]")
        raise SourceError(f"{path}: {field} is {_shown(first['input'])}: {first['msg']}") from None


def _refuse_unsupported(path: Path, stated: dict[str, Any]) -> None:
    for name, supported in _SUPPORTED.items():
        value = stated.get(name, None if name == "peft_type" else supported[0])
        if value not in supported:
            raise SourceError(f"{path}: {name} is {_shown(value)}; supported: {', '.join(map(_shown, supported))}")
    known = {*LoraConfig.model_fields, *_SUPPORTED, *_WITHOUT_EFFECT, "lora_bias"}
    for name in sorted(stated.keys() - known):
        if stated[name]:
            raise SourceError(f"{path}: {name} is {_shown(stated[name])}; supported: only null, false or empty")


def _shown(value: object) -> str:
    return json.dumps(value, default=str)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LowRankChange:
    """Change of a weight by LoRA (Hu et al. 2022, section 4.1) or DoRA (Liu et al. 2024, equation 5), in float32.

    The weight is [O, I]: outputs, inputs; with input_first=True it is [I, O]. An embedding has its tokens as inputs.

    down: [R, I] float32, lora_A
    up: [O, R] float32, lora_B
    scaling: factor of the product
    magnitude: [O] float32, norms of the rows of the merged weight; None: LoRA without magnitudes
    """

    module: str
    down: Tensor
    up: Tensor
    scaling: float
    magnitude: Tensor | None = None
    input_first: bool = False

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the merged weight, float32, in the order of the given one. Raises SourceError for another shape."""
        base = weight.T if self.input_first and weight.ndim == 2 else weight
        expected = [len(self.up), self.down.shape[1]]
        if list(base.shape) != expected:
            raise SourceError(
                f"the adapter's product for {self.module} is {expected}, and the checkpoint's weight {list(base.shape)}"
            )
        if weight.is_meta:
            return weight
        merged = base + self.scaling * (self.up @ self.down)
        if self.magnitude is not None:
            merged *= (self.magnitude / torch.linalg.norm(merged, dim=1))[:, None]
        return merged.T if self.input_first else merged


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BiasChange:
    """Function from the bias [O] of a module to the bias with the scaled bias of lora_B [O]."""

    module: str
    added: Tensor

    def __call__(self, bias: Tensor) -> Tensor:
        """Return the merged bias, float32. Raises SourceError for another shape."""
        if bias.shape != self.added.shape:
            raise SourceError(
                f"the adapter's bias for {self.module} is {list(self.added.shape)}, "
                f"and the checkpoint's {list(bias.shape)}"
            )
        return bias if bias.is_meta else bias + self.added


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """An adapter in memory, in float32.

    file: file of the tensors.
    products: tensors of each changed module by the last part of their names, such as lora_A.weight.
    replaced: tensors that replace the checkpoint's, by name.
    """

    folder: Path
    file: Path
    config: LoraConfig
    products: Mapping[str, Mapping[str, Tensor]]
    replaced: Mapping[str, Tensor]

    def apply(self, weights: SourceWeights, input_first: Sequence[str]) -> None:
        """Make `weights` return merged tensors; input_first: last parts of names of modules with weights [I, O]."""
        changes: dict[str, Change] = {}
        for module, parts in self.products.items():
            changes[f"{module}.weight"] = self._change(module, parts, input_first)
            if _BIAS in parts:
                changes[f"{module}.bias"] = BiasChange(module=module, added=parts[_BIAS] * self.config.scaling(module))
        weights.adapt(changes, self.replaced)

    def _change(self, module: str, parts: Mapping[str, Tensor], input_first: Sequence[str]) -> LowRankChange:
        is_embedding = _EMBEDDING[0] in parts
        down, up = (parts[part] for part in (_EMBEDDING if is_embedding else _LINEAR))
        return LowRankChange(
            module=module,
            down=down,
            up=up,
            scaling=self.config.scaling(module),
            magnitude=parts.get(_MAGNITUDE),
            input_first=is_embedding or module.rpartition(".")[2] in input_first,
        )

    @property
    def described(self) -> str:
        """Name and content of the adapter for the provenance: the directory's name and the sha256 of its tensors."""
        with self.file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return f"{self.folder.resolve().name} ({self.file.name}, sha256 {digest})"


def open_adapter(folder: Path) -> Adapter:
    """Return the adapter in a directory.

    Raises SourceError naming the file and the setting or tensor if it is no LoRA adapter, if its tensors do not belong
    together, or if a setting is not supported.
    """
    if not folder.is_dir():
        raise SourceError(f"--adapter is {folder}, which is not a directory; peft's save_pretrained writes one")
    config = read_lora_config(folder)
    file = _file(folder)
    products: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    with open_tensors(folder, _STEM, _STEM) as weights:
        for name in sorted(weights.names):
            path = _path(folder, name)
            if match := _PART.fullmatch(path):
                products.setdefault(match[1], {})[match[2]] = weights.take(name)
            else:
                replaced[path] = weights.take(name)
    if not products:
        raise SourceError(f"{folder} has no tensors of LoRA, whose names end with {' or '.join(_LINEAR)}")
    for module, parts in products.items():
        _check_parts(folder, config, module, parts)
    return Adapter(folder=folder, file=file, config=config, products=products, replaced=replaced)


def _file(folder: Path) -> Path:
    """Return the file of the tensors, the one that peft reads too. Raises SourceError if there is none."""
    for name in _FILES:
        if (folder / name).is_file():
            return folder / name
    raise SourceError(f"{folder} has neither {' nor '.join(_FILES)}, which peft writes")


def _path(folder: Path, name: str) -> str:
    """Return the path of a tensor in the trained model. Raises SourceError for a name with an unknown meaning."""
    path = name.removeprefix(PREFIX).replace(".base_layer.", ".")
    if not name.startswith(PREFIX) or ("lora_" in path and not _PART.fullmatch(path)):
        raise SourceError(
            f"{folder}: the tensor {name} has no known meaning; known are {PREFIX}PATH with the endings "
            f"{', '.join((*_LINEAR, *_EMBEDDING, _MAGNITUDE, _BIAS))}, and tensors of the model"
        )
    return path


def _check_parts(folder: Path, config: LoraConfig, module: str, parts: Mapping[str, Tensor]) -> None:
    """Raise SourceError unless a module has exactly the tensors of its method, with its rank."""
    pair = _EMBEDDING if _EMBEDDING[0] in parts else _LINEAR
    needed = {*pair, *([_MAGNITUDE] if config.use_dora else []), *(parts.keys() & {_BIAS})}
    if parts.keys() != needed:
        raise SourceError(
            f"{folder}: the module {module} has the tensors {', '.join(sorted(parts))}; "
            f"{', '.join(sorted(needed))} are needed, because use_dora is {str(config.use_dora).lower()}"
        )
    down, up = parts[pair[0]], parts[pair[1]]
    rank = config.rank(module)
    if down.ndim != 2 or up.ndim != 2 or len(down) != rank or up.shape[1] != rank:
        raise SourceError(
            f"{folder}: the module {module} has tensors of the shapes {list(down.shape)} and {list(up.shape)}, "
            f"which are not of rank {rank}, as r or rank_pattern of {CONFIG_NAME} says"
        )
    for part in (_MAGNITUDE, _BIAS):
        if part in parts and parts[part].shape != up.shape[:1]:
            raise SourceError(f"{folder}: {module}.{part} has the shape {list(parts[part].shape)}, not [{len(up)}]")
