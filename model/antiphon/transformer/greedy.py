"""Greedy decoding in PyTorch with batches and caches: the reference for exported graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from antiphon.transformer.layers import KV
from antiphon.transformer.transformer import Transformer


def empty_cache(model: Transformer, rows: int, capacity: int) -> list[KV]:
    """Return zero self caches: for each decoder layer keys and values [rows, H, capacity, D] float32.

    For a recurrence its state [rows, 1, 1, M], and no values.
    """
    if model.config.decoder_self != "attention":
        state = torch.zeros(rows, 1, 1, model.config.d_model)
        return [(state, state[..., :0])] * model.config.decoder_layers
    width = model.config.resolved_head_dim
    shapes = [(rows, heads, capacity, width) for heads in model.config.resolved_module_heads.decoder_self]
    return [(torch.zeros(shape), torch.zeros(shape)) for shape in shapes]


@torch.no_grad()
def greedy(
    model: Transformer, sources: Sequence[Sequence[int]], max_new_tokens: int, *, ends: bool = True
) -> list[list[int]]:
    """Decode sources (with end token, any lengths) as one batch, with the most likely token in each step.

    Returns the target ids of each source without begin and end tokens. At most max_new_tokens tokens are generated for
    each source, the end token included. ends: False gives the end token no effect.
    """
    config = model.config
    lens = torch.tensor([len(source) for source in sources], dtype=torch.int32)
    padded = torch.zeros(
        (len(sources), int(lens.max())), dtype=torch.int64
    )  # any id can pad, because padding is masked
    for row, source in enumerate(sources):
        padded[row, : len(source)] = torch.tensor(source)
    cross_kv = model.project_memory(model.encode(padded, lens))
    produced = _decode(model, cross_kv, lens, min(max_new_tokens, config.max_target_len), ends=ends)
    return [_until_end(row.tolist(), config.eos_id) if ends else row.tolist() for row in produced]


def _decode(model: Transformer, cross_kv: Sequence[KV], lens: Tensor, limit: int, *, ends: bool) -> Tensor:
    rows = lens.shape[0]
    self_kv: Sequence[KV] = empty_cache(model, rows, limit)
    token = torch.full((rows, 1), model.config.bos_id)
    ended = torch.zeros(rows, dtype=torch.bool)
    produced = []
    for step in range(limit):
        past = torch.full((rows,), step, dtype=torch.int32)
        hidden, self_kv = model.step(token, past, self_kv, cross_kv, lens)
        token = model.logits(hidden).argmax(dim=-1)
        produced.append(token)
        ended |= token[:, 0] == model.config.eos_id
        if ends and ended.all():
            break
    return torch.cat(produced, dim=1)


def _until_end(ids: list[int], eos_id: int) -> list[int]:
    return ids[: ids.index(eos_id)] if eos_id in ids else ids
