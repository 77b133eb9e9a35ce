"""A LoRA adapter as `peft` saves it: its tensors by the names of the checkpoint's tensors that they change.

    adapter_config.json          lora_config.py
    adapter_model.safetensors    or adapter_model.bin, read like a checkpoint's: no pickled code is run

The names of the tensors decide which modules are changed. What the names of peft mean:

    base_model.model.PATH.lora_A.weight, .lora_B.weight      low-rank product for PATH.weight
    base_model.model.PATH.lora_embedding_A, ..._B            the same for an embedding
    base_model.model.PATH.lora_magnitude_vector              magnitudes of DoRA
    base_model.model.PATH.lora_B.bias                        addition to PATH.bias
    base_model.model.NAME, PATH.base_layer.weight            tensors that replace the checkpoint's: heads, biases
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from antiphon.checkpoints.adapters.lora_config import CONFIG_NAME, LoraConfig, read_lora_config
from antiphon.checkpoints.adapters.low_rank import BiasChange, LowRankChange
from antiphon.checkpoints.source_weights import Change, SourceWeights, open_tensors
from antiphon.errors import SourceError

_STEM = "adapter_model"
_FILES = (f"{_STEM}.safetensors", f"{_STEM}.bin")
PREFIX = "base_model.model."
_LINEAR = ("lora_A.weight", "lora_B.weight")
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
_MAGNITUDE, _BIAS = "lora_magnitude_vector", "lora_B.bias"
_PART = re.compile(rf"(.+)\.({'|'.join(map(re.escape, (*_LINEAR, *_EMBEDDING, _BIAS, _MAGNITUDE)))})(?:\.weight)?")


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
            if found := _PART.fullmatch(path):
                products.setdefault(found[1], {})[found[2]] = weights.take(name)
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
