"""Masked-language modelling: selection and replacement of predicted tokens (Devlin et al. 2019, appendix A.1)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from antiphon.training.data.translation_data import IGNORED_LABEL
from antiphon.training.recipe import MaskingConfig


class Masking:
    """The 80/10/10 rule for one vocabulary. Special tokens are never predicted and never used as replacement."""

    def __init__(self, config: MaskingConfig, *, vocab_size: int, special_ids: Iterable[int], mask_id: int) -> None:
        self.config = config
        self.mask_id = mask_id
        self.is_ordinary = torch.ones(vocab_size, dtype=torch.bool)
        self.is_ordinary[list(special_ids)] = False
        self.ordinary_ids = self.is_ordinary.nonzero().flatten()

    def apply(self, ids: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, both [B, S] int64, of padded texts ids [B, S] int64; the seed decides all choices.

        In a row with n ordinary tokens round(rate n) of them are predicted, at least one if n > 0. Labels have their
        ids, and IGNORED_LABEL elsewhere. Inputs differ from ids only at predicted tokens.
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
        """Return a mask [B, S] bool of the predicted tokens, a random choice from the ordinary ones."""
        counts = ordinary.sum(dim=1)
        num_predicted = (counts * self.config.rate).round().long().clamp(min=1).minimum(counts)
        order = torch.rand(ordinary.shape, generator=chance).masked_fill(~ordinary, 2.0).argsort(dim=1)
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
        return rank < num_predicted[:, None]
