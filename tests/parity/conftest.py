"""Exported models for several parity tests. An export takes ten seconds, so all processes of a run share them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from torch.onnx._internal.exporter._registration import ONNXRegistry

from antiphon.bundle.manifest import Bundle
from antiphon.checkpoints.checkpoint import Checkpoint
from tests.marks import marked
from tests.parity.exports import shared_export, small_config, write_checkpoint

VARIANTS: dict[str, dict[str, object]] = {
    "pre_norm_rms_rope": dict(
        norm="rmsnorm", norm_placement="pre", activation="gelu", positions="rope", bias=False,
        rope_scaling=dict(
            kind="llama3", factor=6.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
        ),
    ),
    "t5": dict(
        norm="rmsnorm", norm_placement="pre", activation="gelu_tanh", gated=True, positions="t5_relative", bias=False,
        tie_output=False, scale_embeddings=False, attention_scale=1.0, head_dim=24,
    ),
    "alibi": dict(positions="alibi", norm_placement="pre", tie_source_target=False, source_vocab_size=330),
    "bart": dict(
        positions="learned", positions_offset=2, activation="gelu", embedding_norm=True, scale_embeddings=False
    ),
    "marian": dict(activation="silu", sinusoids="halves", output_bias=True),
    "learned_gated": dict(positions="learned", gated=True, tie_output=False),
    "ssru": dict(decoder_self="ssru", sinusoids="fairseq", output_bias=True),
    "average": dict(decoder_self="average", norm_placement="pre", positions="learned", activation="silu"),
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def one_onnx_registry() -> Iterator[None]:
    """Let exports copy one table of PyTorch's ONNX functions; each would otherwise build it, which takes seconds."""
    build = functools.cache(ONNXRegistry.from_torchlib)

    def copy_of_built(opset_version: int) -> ONNXRegistry:
        built, copy = build(opset_version), ONNXRegistry()
        copy._opset_version = built.opset_version
        copy.functions = {target: list(functions) for target, functions in built.functions.items()}
        return copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copy_of_built))
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Write a small random checkpoint with the architecture of the paper."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "checkpoint", small_config())


@pytest.fixture(scope="session")
def bundle() -> Bundle:
    """Export `checkpoint` at both precisions."""
    return shared_export("paper")


@pytest.fixture(scope="session", params=marked(VARIANTS, "combinations", but=["t5", "ssru"]))
def variant(request: pytest.FixtureRequest) -> Bundle:
    """Export each variant; a variant also covers the other options of its family."""
    return shared_export(request.param, VARIANTS[request.param])
