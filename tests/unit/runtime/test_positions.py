"""Tables of positions and the effect of distance, compared with the PyTorch model's own positions."""

import numpy as np
import pytest
import torch

from antiphon.architecture.config import ModelConfig, Part, preset
from antiphon.bundle.position_tables import Floats
from antiphon.domain.errors import Unsupported
from antiphon.runtime.explain import PositionEncoding, longest_described, position_encodings
from antiphon.transformer.positions import AbsolutePositions, RelativeBias, rotary_tables

NUM_POSITIONS = 40
ENCODER = dict(architecture="encoder", decoder_layers=0)
DECODER = dict(architecture="decoder", encoder_layers=0)


def encoding_of(config: ModelConfig, tables: dict[str, Floats] | None = None) -> PositionEncoding:
    """Return the only encoding of a model with one part."""
    (encoding,) = position_encodings(config, NUM_POSITIONS, tables or {})
    return encoding


@pytest.mark.parametrize(("sinusoids", "offset"), [("interleaved", 0), ("halves", 0), ("fairseq", 2)])
def test_sinusoids_are_those_that_the_model_adds(sinusoids: str, offset: int) -> None:
    config = preset("tiny", **ENCODER, sinusoids=sinusoids, positions_offset=offset)
    expected = AbsolutePositions(config, NUM_POSITIONS).vectors
    assert expected is not None
    found = encoding_of(config)
    np.testing.assert_allclose(found.table, expected.numpy(), atol=1e-6)
    # The cosine of two sinusoids depends on their distance alone.
    cosines = torch.cosine_similarity(expected[:1], expected, dim=1)
    np.testing.assert_allclose(found.decay, cosines.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        dict(kind="linear", factor=4.0),
        dict(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ],
    ids=["plain", "linear", "llama3"],
)
def test_rotary_cosines_are_those_that_the_model_rotates_by(scaling: dict[str, object] | None) -> None:
    config = preset("tiny", **DECODER, positions="rope", rope_theta=100.0, rope_scaling=scaling)
    width = config.resolved_head_dim
    cosines, _ = rotary_tables(torch.arange(NUM_POSITIONS), width, config.rope_theta, config.rope_scaling)
    found = encoding_of(config)
    np.testing.assert_allclose(found.table, cosines[:, 0].numpy(), atol=1e-5)
    np.testing.assert_allclose(found.decay, cosines[:, 0].mean(dim=1).numpy(), atol=1e-5)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize("kind", ["t5_relative", "alibi"])
def test_biases_are_those_that_the_model_adds_to_its_scores(part: Part, kind: str) -> None:
    """T5 has one bias for all distances beyond 20, so the stored table is shorter than the answer."""
    config = preset(
        "tiny",
        **(ENCODER if part == "encoder" else DECODER),
        positions=kind,
        relative_buckets=8,
        relative_max_distance=20,
    )
    model = RelativeBias(config, bidirectional=part == "encoder")
    stored = model.by_distance(config.relative_max_distance)
    found = encoding_of(config, {} if stored is None else {f"{part}_biases": stored.numpy()})
    biases = model(torch.arange(NUM_POSITIONS)[None], NUM_POSITIONS)
    assert biases is not None
    first, last = biases[0, :, 0].detach(), biases[0, :, -1].detach()  # of the first and the last query, to all keys
    np.testing.assert_array_equal(found.table, torch.cat((last[:, :-1], first), dim=1).numpy())
    np.testing.assert_allclose(found.decay, last.flip(1).mean(dim=0).numpy(), atol=1e-6)


def test_zero_vectors_have_cosine_zero() -> None:
    vectors = np.ones((NUM_POSITIONS, 32), np.float32)
    vectors[::2] = 0
    found = encoding_of(preset("tiny", **ENCODER, positions="learned"), {"encoder_positions": vectors})
    assert found.decay[1::2].tolist() == [0] * (NUM_POSITIONS // 2)
    assert found.decay[0] == pytest.approx(0.5)


def test_model_without_positions_has_no_table() -> None:
    found = encoding_of(preset("tiny", **ENCODER, positions="none"))
    assert (found.kind, found.table.shape, found.decay.shape) == ("none", (0, 0), (0,))


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (dict(positions="learned"), "encoder_positions"),
        (dict(positions="t5_relative"), "encoder_biases"),
        (dict(positions="none", disentangled=dict(span=8)), "encoder_distances"),
    ],
)
def test_learned_positions_are_refused_when_the_bundle_has_no_table(overrides: dict[str, object], name: str) -> None:
    config = preset("tiny", **ENCODER, **overrides)
    with pytest.raises(Unsupported, match=f"no table {name}, which holds learned positions; export or import it again"):
        encoding_of(config)


def test_longest_described_is_the_shorter_limit_of_the_parts() -> None:
    config = preset("tiny", max_source_len=48, max_target_len=24)
    assert longest_described(config) == 24
    assert longest_described(preset("tiny", **ENCODER, max_source_len=48, max_target_len=24)) == 48
