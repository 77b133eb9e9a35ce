"""Other maximum lengths for a trained model, which may be longer than those of its training.

Kinds of positions differ in what they do there: some extrapolate and some do not (Press et al. 2022).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import ValidationError

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.errors import CheckpointError
from antiphon.transformer.transformer import Transformer

_TABLES = {"max_source_len": "encoder.positions.table", "max_target_len": "decoder.positions.table"}


def with_lengths(
    checkpoint: Checkpoint, *, max_source_len: int | None = None, max_target_len: int | None = None
) -> Checkpoint:
    """Return the checkpoint with other maximum lengths in tokens; None keeps a length.

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
