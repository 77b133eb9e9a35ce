"""Norms of gradients and entropies in the log of a training run, and runs whose loss is not finite."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from antiphon.architecture.config import preset
from antiphon.errors import TrainingDiverged
from antiphon.ops.attention import attention_weights
from antiphon.training.attention_entropy import recorded_entropies
from antiphon.transformer.layers import SelfAttention
from antiphon.transformer.random_model import random_transformer
from antiphon.transformer.transformer import Transformer
from tests.unit.training.test_train import make_trainer

torch.set_num_threads(1)


def first_attention() -> tuple[Transformer, SelfAttention]:
    model = random_transformer(preset("tiny"))
    attention = model.get_submodule("encoder.layers.0.self_attention")
    assert isinstance(attention, SelfAttention)
    return model, attention


def test_entropy_of_attention_that_sees_equal_keys_is_the_logarithm_of_their_number() -> None:
    model, attention = first_attention()
    hidden = torch.randn(1, 1, 32).expand(3, 7, 32)
    with recorded_entropies(model) as entropies:
        attention(hidden, torch.arange(7)[None], torch.tensor([7, 7, 7]), None)
    assert entropies.mean()["encoder_self"] == pytest.approx(math.log(7), abs=1e-5)


def test_recording_changes_no_output_and_ends_with_its_context() -> None:
    model = random_transformer(preset("tiny"))
    source, target = torch.randint(4, 96, (2, 9)), torch.randint(4, 96, (2, 5))
    lens = torch.tensor([9, 4], dtype=torch.int32)
    before = model(source, target, lens)
    with recorded_entropies(model) as entropies:
        assert torch.equal(model(source, target, lens), before)
    assert set(entropies.mean()) == {"encoder_self", "decoder_self", "decoder_cross"}
    assert [len(values) for values in entropies.values.values()] == [2, 2, 2]
    recorded = {kind: list(values) for kind, values in entropies.values.items()}
    model(source, target, lens)
    assert entropies.values == recorded


def test_entropy_equals_that_of_the_distribution_of_torch() -> None:
    model, attention = first_attention()
    hidden, lens = torch.randn(2, 6, 32), torch.tensor([6, 3])
    query, key, _ = (part.unflatten(-1, attention.heads) for part in attention.qkv(hidden).chunk(3, dim=-1))
    weights = attention_weights(query, key, lens, None, causal=False, scale=attention.scale)
    entropies_of_rows = torch.distributions.Categorical(probs=weights.detach()).entropy()  # type: ignore[no-untyped-call]
    with recorded_entropies(model) as entropies:
        attention(hidden, torch.arange(6)[None], lens, None)
    assert entropies.mean()["encoder_self"] == pytest.approx(float(entropies_of_rows.mean()), abs=1e-5)


def test_log_has_the_norm_of_the_gradient_before_clipping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, "run", max_steps=4, checkpoint_every_steps=2, clip_norm=1e-3)
    norms: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_

    def clipped(parameters: list[torch.nn.Parameter], limit: float) -> torch.Tensor:
        held = list(parameters)
        norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in held if p.grad is not None)))
        return clip(held, limit)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clipped)
    trainer.run()
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["gradient_norm"] for record in records] == pytest.approx(
        [sum(norms[:2]) / 2, sum(norms[2:]) / 2], rel=1e-4
    )
    assert [record["max_gradient_norm"] for record in records] == pytest.approx(
        [max(norms[:2]), max(norms[2:])], rel=1e-4
    )
    assert all(record["entropy_decoder_cross"] > 0 for record in records)


def test_run_whose_loss_is_not_finite_ends_with_the_number_of_the_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "run", peak_lr=1e30, warmup_steps=1)
    with pytest.raises(TrainingDiverged, match=r"loss is (nan|inf) in step [1-9][0-9]*; lower train.peak_lr"):
        trainer.run()
