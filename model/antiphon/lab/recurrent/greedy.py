"""Greedy decoding of the LSTM in batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from antiphon.lab.recurrent.lstm import RecurrentModel


@torch.no_grad()
def recurrent_greedy(model: RecurrentModel, sources: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Decode sources (with end token, any lengths) as one batch, with the most likely token in each step.

    Returns the target ids of each source without begin and end tokens. At most max_new_tokens tokens are generated for
    each source, the end token included. The model must be in evaluation mode.
    """
    lens = torch.tensor([len(source) for source in sources], dtype=torch.int32)
    padded = torch.full((len(sources), int(lens.max())), model.config.pad_id)
    for row, source in enumerate(sources):
        padded[row, : len(source)] = torch.tensor(source)
    eos_id = model.config.eos_id
    return [ids[: ids.index(eos_id)] if eos_id in ids else ids for ids in _produce(model, padded, lens, max_new_tokens)]


def _produce(model: RecurrentModel, sources: Tensor, lens: Tensor, max_new_tokens: int) -> list[list[int]]:
    memory = model.encode(sources, lens)
    state = model.start_state(memory)
    token = torch.full((len(lens), 1), model.config.bos_id)
    ended = torch.zeros(len(lens), dtype=torch.bool)
    produced = []
    for _ in range(max_new_tokens):
        hidden, state = model.step(token, state, memory)
        token = model.logits(hidden).argmax(dim=-1)
        produced.append(token)
        ended |= token[:, 0] == model.config.eos_id
        if ended.all():
            break
    found: list[list[int]] = torch.cat(produced, dim=1).tolist()
    return found
