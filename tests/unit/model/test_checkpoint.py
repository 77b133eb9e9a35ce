import json
from pathlib import Path

import pytest
import torch

from antiphon.architecture.config import preset
from antiphon.architecture.heads import HeadConfig
from antiphon.bundle.manifest import Provenance
from antiphon.checkpoints.checkpoint import load_checkpoint, save_checkpoint, weights_of
from antiphon.errors import CheckpointError
from antiphon.text.tokenizer import Tokenizer
from antiphon.transformer.transformer import Transformer

PROVENANCE = Provenance(source="s", licence="CC0", attribution="a")


ENCODER: dict[str, object] = dict(
    architecture="encoder", decoder_layers=0, token_types=2, embedding_width=24, embedding_norm=True,
    share_layers=True, heads=(
        HeadConfig(task="fill_mask", transform_width=24, activation="gelu", norm=True, tied=True),
        HeadConfig(task="tag", labels=("O", "B", "I")),
        HeadConfig(task="pool", transform_width=32, activation="tanh"),
    ),
)  # fmt: skip


def write_checkpoint(path: Path, **overrides: object) -> Transformer:
    tokenizer = Tokenizer.train([], vocab_size=260)
    config = preset("tiny", vocab_size=260, **overrides)
    model = Transformer(config)
    save_checkpoint(path, config=config, weights=weights_of(model), tokenizer=tokenizer, provenance=PROVENANCE)
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
def test_loaded_model_equals_the_saved_model(tmp_path: Path, tied: bool) -> None:
    model = write_checkpoint(tmp_path / "c", tie_source_target=tied, tie_output=tied)
    loaded = load_checkpoint(tmp_path / "c")
    ids = torch.arange(4, 10)[None]
    assert torch.equal(loaded.model(ids, ids), model(ids, ids))
    assert loaded.provenance == PROVENANCE
    assert not loaded.model.training


def test_loaded_encoder_has_the_saved_heads_and_one_layer(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "c", **ENCODER)
    loaded = load_checkpoint(tmp_path / "c").model
    ids, types = torch.arange(4, 10)[None], torch.tensor([[0, 0, 0, 1, 1, 1]])
    states, expected = loaded.encode(ids, None, types)[0], model.encode(ids, None, types)[0]
    assert torch.equal(states, expected)
    for task in ("fill_mask", "tag", "pool"):
        assert torch.equal(loaded.read_out(task, states), model.read_out(task, expected))
    assert loaded.encoder is not None
    assert loaded.get_parameter("heads.fill_mask.output.weight") is loaded.encoder.embedding.weight
    assert len({id(layer) for layer in loaded.encoder.layers}) == 1
    assert not torch.equal(model.encode(ids), expected)  # token types make a difference


def test_model_names_its_heads_when_another_is_requested(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "c", **ENCODER)
    with pytest.raises(ValueError, match="no head for 'classify'; its heads: fill_mask, tag, pool"):
        model.read_out("classify", torch.zeros(1, 32))


def test_saving_replaces_whole_directories(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c")
    (tmp_path / "c" / "left-over").touch()
    write_checkpoint(tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
    assert not (tmp_path / "c" / "left-over").exists()


def damage_weights(path: Path) -> None:
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[: len(content) // 2])


def change_shape(path: Path) -> None:
    described = json.loads((path / "config.json").read_text())
    described["model"]["d_ff"] = 65
    (path / "config.json").write_text(json.dumps(described))


def change_version(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({"version": 99}))


def change_layers(path: Path) -> None:
    described = json.loads((path / "config.json").read_text())
    described["model"]["decoder_layers"] = 3
    (path / "config.json").write_text(json.dumps(described))


def change_vocabulary(path: Path) -> None:
    Tokenizer.train(["some other words"], vocab_size=263).save(path / "tokenizer.json")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damage_weights, r"model\.safetensors cannot be read"),
        (change_shape, r"feed_forward\.inner\.weight has shape \[64, 32\], expected \[65, 32\]"),
        (change_version, r"config\.json: version is 99"),
        (change_layers, r"missing tensors \['decoder\.layers\.2"),
        (change_vocabulary, r"tokenizer\.json has 26\d tokens"),
        (lambda path: (path / "config.json").unlink(), "config.json is missing"),
        (lambda path: (path / "provenance.json").write_text('{"source": 1}'), r"provenance\.json: source: "),
    ],
)
def test_damaged_checkpoint_is_refused_with_the_name_of_the_file(tmp_path: Path, spoil: object, message: str) -> None:
    write_checkpoint(tmp_path / "c")
    assert callable(spoil)
    spoil(tmp_path / "c")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "c")
