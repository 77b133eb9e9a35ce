"""Speed of training and of greedy decoding of trained models on the same texts, in target tokens a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from antiphon.lab.measures.sequence_models import SequenceModel
from antiphon.lab.measures.training_steps import WeightUpdate
from antiphon.lab.times import median_seconds
from antiphon.training.corpus import Pair
from antiphon.training.translation import Batch

TRAINING, DECODING = "training, tokens/s", "decoding, tokens/s"


def speeds(models: Mapping[str, SequenceModel], pairs: Sequence[Pair], num_runs: int) -> dict[str, dict[str, float]]:
    """Return TRAINING and DECODING of each model, with all pairs as one batch, from the median of `num_runs` runs.

    End tokens are counted. The models are trained further, after decoding.
    """
    batches = {name: model.batch(pairs) for name, model in models.items()}
    decoders = {name: _decoder(model, batches[name]) for name, model in models.items()}
    produced = {name: sum(decode()) for name, decode in decoders.items()}
    decoding = median_seconds(decoders, num_runs)
    updates = {name: WeightUpdate(model.loss, batches[name]).run for name, model in models.items()}
    training = median_seconds(updates, num_runs)
    return {
        name: {TRAINING: float(batches[name].counts) / training[name], DECODING: produced[name] / decoding[name]}
        for name in models
    }


def _decoder(model: SequenceModel, batch: Batch) -> Callable[[], list[int]]:
    sources = [row[:length].tolist() for row, length in zip(batch.source, batch.source_lens.tolist(), strict=True)]
    return partial(produced_tokens, model, sources, batch.inputs.shape[1])


def produced_tokens(model: SequenceModel, sources: Sequence[Sequence[int]], limit: int) -> list[int]:
    """Decode sources with at most `limit` tokens each; return the number of tokens of each, with its end token."""
    return [min(len(ids) + 1, limit) for ids in model.decode(sources, limit)]
