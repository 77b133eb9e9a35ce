"""Masked-language modelling: which tokens are predicted, and what stands in their place (Devlin et al. 2019, A.1)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from antiphon.model.training.data import IGNORED_LABEL
from antiphon.model.training.recipe import MaskingConfig


class Masking:
    """The 80/10/10 rule for one vocabulary. Special tokens are never chosen and never drawn."""

    def __init__(self, config: MaskingConfig, *, vocab_size: int, special_ids: Iterable[int], mask_id: int) -> None:
        self.config = config
        self.mask_id = mask_id
        self.is_ordinary = torch.ones(vocab_size, dtype=torch.bool)
        self.is_ordinary[list(special_ids)] = False
        self.ordinary_ids = self.is_ordinary.nonzero().flatten()

    def apply(self, ids: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of padded texts; the same seed chooses the same.

        ids [B, S] int64. Of each row's n ordinary tokens round(rate n) are predicted, at least one where there is one:
        labels [B, S] hold them, IGNORED_LABEL elsewhere. Inputs [B, S] differ from ids there only.
        """
        chance = torch.Generator().manual_seed(seed)
        chosen = self._choose(self.is_ordinary[ids], chance)
        draw = torch.rand(ids.shape, generator=chance)
        drawn = self.ordinary_ids[torch.randint(len(self.ordinary_ids), ids.shape, generator=chance)]
        config = self.config
        is_masked = chosen & (draw < config.masked)
        is_random = chosen & (draw >= config.masked) & (draw < config.masked + config.random)
        inputs = ids.masked_fill(is_masked, self.mask_id).where(~is_random, drawn)
        return inputs, ids.where(chosen, IGNORED_LABEL)

    def _choose(self, ordinary: Tensor, chance: torch.Generator) -> Tensor:
        """Which tokens [B, S] are predicted, of those that may be."""
        counts = ordinary.sum(dim=1)
        wanted = (counts * self.config.rate).round().long().clamp(min=1).minimum(counts)
        order = torch.rand(ordinary.shape, generator=chance).masked_fill(~ordinary, 2.0).argsort(dim=1)
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
        return rank < wanted[:, None]
