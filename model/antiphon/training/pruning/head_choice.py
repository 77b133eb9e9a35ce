"""Choice of the heads that a pruned model keeps: as many in each attention module, or a share of all heads.

Reads importance and configuration only; prune.py removes the other heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.architecture.config import ModelConfig
from antiphon.errors import PruneError

Heads = Mapping[str, Sequence[int]]
"""Heads of each attention module, by its name in the Transformer, in ascending order."""


@dataclass(frozen=True, slots=True)
class Each:
    """Keep num_heads heads in each attention module: its most important ones, or all if it has fewer."""

    num_heads: int

    def check(self, config: ModelConfig) -> None:
        """Raise PruneError unless the model can be pruned like this."""
        _check_kind(config)
        most = max(_counts(config))
        if not 1 <= self.num_heads < most:
            raise PruneError(f"--heads is {self.num_heads}; it must be from 1 to {most - 1}, fewer than the model has")

    def heads_to_keep(self, config: ModelConfig, importance: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Return the kept heads. importance: [H] for each attention module. If two are equal, the first one is kept.

        All layers of a stack share T5's relative bias, which has a column for each head. So the self-attention of all
        layers keeps the same heads: those with the largest sum over the layers.
        """
        ranked = dict(importance)
        if config.positions == "t5_relative":
            for stack in ("encoder", "decoder"):
                shared = [name for name in ranked if name.startswith(stack) and name.endswith("self_attention")]
                total = torch.stack([importance[name] for name in shared]).sum(dim=0)
                ranked.update(dict.fromkeys(shared, total))
        return {
            name: sorted(values.argsort(descending=True, stable=True)[: self.num_heads].tolist())
            for name, values in ranked.items()
        }


@dataclass(frozen=True, slots=True)
class Share:
    """Remove this share of all heads, rounded to whole heads: the least important ones of all modules together.

    The importance of each module is divided by its l2 norm first (Michel et al. 2019, section 4.1, after Molchanov et
    al. 2017): gradients of different layers have different scales, so that a layer of small ones would lose all heads.
    Each module keeps at least its most important head, because no operator computes an attention without heads.
    """

    removed: float

    def check(self, config: ModelConfig) -> None:
        """Raise PruneError unless the model can be pruned like this."""
        _check_kind(config)
        if config.positions == "t5_relative":
            raise PruneError(
                "positions='t5_relative' cannot be pruned by --share: the layers of a stack share the bias of their "
                "heads; give --heads"
            )
        total, num_modules = sum(_counts(config)), len(_counts(config))
        removable = total - num_modules
        if not 0 < self.removed < 1 or not 1 <= round(self.removed * total) <= removable:
            raise PruneError(
                f"--share is {self.removed:g}; it must be from 1/{total} to {removable}/{total} of the {total} heads: "
                f"each of the {num_modules} attention modules keeps at least one"
            )

    def heads_to_keep(self, config: ModelConfig, importance: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Return the kept heads. importance: [H] for each attention module. If two are equal, the first one is kept."""
        scores = {
            (name, head): score
            for name, values in importance.items()
            for head, score in enumerate((values / values.norm().clamp(min=1e-30)).tolist())
        }
        protected = {(name, int(values.argmax())) for name, values in importance.items()}
        most_first = sorted((one for one in scores if one not in protected), key=scores.__getitem__, reverse=True)
        kept = protected.union(most_first[: len(most_first) - round(self.removed * len(scores))])
        return {
            name: [head for head in range(len(values)) if (name, head) in kept] for name, values in importance.items()
        }


Choice = Each | Share


def _check_kind(config: ModelConfig) -> None:
    """Raise PruneError for models that cannot be pruned at all."""
    if config.architecture != "encoder-decoder":
        raise PruneError(f"architecture={config.architecture!r} cannot be pruned; only encoder-decoder models can")
    if config.positions == "alibi":
        raise PruneError(
            "positions='alibi' cannot be pruned: the slopes of the kept heads would change with the number of heads"
        )


def _counts(config: ModelConfig) -> list[int]:
    """Return the number of heads of each attention module of an encoder-decoder model."""
    return [count for _, heads in config.resolved_module_heads for count in heads]
