"""The graph of learned positions, compared with the PyTorch model that it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from antiphon.bundle.position_tables import read_position_tables
from antiphon.errors import GraphError, VerificationError
from antiphon.export.positions import position_graph, verify_positions
from antiphon.export.weights import WeightsFile
from antiphon.transformer.random_model import random_transformer
from antiphon.transformer.transformer import Transformer
from tests.parity.exports import small_config

ENCODER: dict[str, object] = dict(architecture="encoder", decoder_layers=0)
LEARNED: dict[str, dict[str, object]] = {
    "learned": dict(positions="learned", positions_offset=2),
    "t5": dict(positions="t5_relative"),
    "t5_longer_than_max_distance": dict(positions="t5_relative", relative_max_distance=20),
    "disentangled": dict(ENCODER, positions="none", disentangled=dict(span=8, max_distance=40, norm=True)),
    "both": dict(ENCODER, positions="learned", disentangled=dict(span=16)),
}


def written(folder: Path, model: Transformer) -> Path:
    """Write the model's graph of positions and return its path."""
    graph, path = position_graph(model), folder / "positions.onnx"
    assert graph is not None
    with WeightsFile(folder / "weights.bin") as weights:
        weights.save(graph, path)
    return path


@pytest.mark.parametrize("overrides", LEARNED.values(), ids=list(LEARNED))
def test_position_graph_has_the_numbers_that_the_model_uses(overrides: dict[str, object], tmp_path: Path) -> None:
    """The numbers are those of a forward pass: added vectors, score biases, and rows of the table by distance."""
    model = random_transformer(small_config(**overrides))
    path = written(tmp_path, model)
    verify_positions(path, model)
    tables = {name: torch.from_numpy(table) for name, table in read_position_tables(path).items()}
    for part, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if stack is None:
            continue
        length = len(stack.positions.vectors) if stack.positions.vectors is not None else 24
        positions = torch.arange(length)[None]
        with torch.no_grad():
            if (vectors := tables.pop(f"{part}_positions", None)) is not None:
                added = stack.positions(torch.zeros(1, length, vectors.shape[1]), positions)
                torch.testing.assert_close(vectors, added[0])
            if (biases := tables.pop(f"{part}_biases", None)) is not None:
                reach = biases.shape[1] // 2
                rows = (positions[0] - positions[0][:, None]).clamp(-reach, reach) + reach
                torch.testing.assert_close(biases[:, rows], stack.relative_bias(positions, length)[0])
    if (distances := tables.pop("encoder_distances", None)) is not None:
        assert model.encoder is not None
        assert model.encoder.relative_positions is not None
        with torch.no_grad():
            table, rows = model.encoder.relative_positions(24)
        keys_minus_queries = torch.arange(24) - torch.arange(24)[:, None]
        torch.testing.assert_close(distances[keys_minus_queries + len(distances) // 2], table[rows])
    assert not tables


@pytest.mark.parametrize("positions", ["sinusoidal", "rope", "alibi", "none"])
def test_models_whose_positions_are_not_learned_have_no_graph(positions: str) -> None:
    assert position_graph(random_transformer(small_config(positions=positions))) is None


def test_verify_positions_refuses_the_graph_of_another_model(tmp_path: Path) -> None:
    config = small_config(positions="learned")
    path = written(tmp_path, random_transformer(config))
    with pytest.raises(VerificationError, match=r"positions.onnx disagrees with the model: a table of positions"):
        verify_positions(path, random_transformer(config, seed=1))


def test_read_position_tables_names_a_file_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "positions.onnx").write_bytes(b"no graph")
    with pytest.raises(GraphError, match=r"positions.onnx: the graph of positions cannot be read"):
        read_position_tables(tmp_path / "positions.onnx")
