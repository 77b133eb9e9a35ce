"""Settings of a LoRA adapter: adapter_config.json as `peft` writes it.

Refuses every setting that would change the merged weights in a way that low_rank.py does not compute, also settings of
later versions of peft.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from antiphon.checkpoints.settings import read_json
from antiphon.errors import SourceError

CONFIG_NAME = "adapter_config.json"
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
    given = read_json(path)
    _refuse_unsupported(path, given)
    try:
        return LoraConfig.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "[key]")
        raise SourceError(f"{path}: {field} is {_shown(first['input'])}: {first['msg']}") from None


def _refuse_unsupported(path: Path, given: dict[str, Any]) -> None:
    for name, supported in _SUPPORTED.items():
        value = given.get(name, None if name == "peft_type" else supported[0])
        if value not in supported:
            raise SourceError(f"{path}: {name} is {_shown(value)}; supported: {', '.join(map(_shown, supported))}")
    known = {*LoraConfig.model_fields, *_SUPPORTED, *_WITHOUT_EFFECT, "lora_bias"}
    for name in sorted(given.keys() - known):
        if given[name]:
            raise SourceError(f"{path}: {name} is {_shown(given[name])}; supported: only null, false or empty")


def _shown(value: object) -> str:
    return json.dumps(value, default=str)
