"""Errors of the import command: one line with reason and remedy, exit code 2, and no files left."""

from __future__ import annotations

import json
import pickle
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from antiphon.bundle.manifest import load_bundle
from antiphon.checkpoints import settings as checkpoint_settings
from antiphon.cli import main as cli
from antiphon.importer import generation_settings, importer
from antiphon.importer.generation_settings import comparable_generation
from antiphon.importer.original_tokenizer import write_tokenizer
from antiphon.text.tokenizer import open_tokenizer
from tests.parity.seq2seq_checkpoints import save


@pytest.fixture(scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "checkpoint"
    save(folder, "bart")
    return folder


@pytest.fixture
def checkpoint(_made: Path, tmp_path: Path) -> Path:
    """Return a small BART checkpoint that a test can change."""
    folder = tmp_path / "in" / "checkpoint"
    folder.mkdir(parents=True)
    for file in _made.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def refused(source: Path | str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Return the command's error message, after a check that the command left no files."""
    target = tmp_path / "out" / "bundle"
    target.parent.mkdir(exist_ok=True)
    assert cli.main(["import", str(source), str(target), "--no-explain", "--precision", "float32", *options]) == 2
    assert not list(target.parent.iterdir())
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("antiphon import: ")]
    assert len(said) == 1
    return said[0]


def change_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_tensors_are_named_with_the_family(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_tensors(checkpoint, lambda held: [held.pop(f"model.decoder.layers.1.fc{n}.weight") for n in (1, 2)])
    said = refused(checkpoint, tmp_path, capsys)
    assert "BART" in said
    assert "2 missing: decoder.layers.1.fc1.weight, decoder.layers.1.fc2.weight" in said


def test_unexpected_tensors_are_named(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_tensors(checkpoint, lambda held: held.update({f"adapter.{n}": torch.ones(1) for n in range(7)}))
    said = refused(checkpoint, tmp_path, capsys)
    assert "7 unexpected: adapter.0, adapter.1, adapter.2, adapter.3, adapter.4, ..." in said


def test_tensors_of_another_shape_are_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(checkpoint, encoder_ffn_dim=48, decoder_ffn_dim=48)
    assert "of another shape: decoder.layers.0.fc1.bias [[44]], expected [48]" in refused(checkpoint, tmp_path, capsys)


def test_non_finite_values_are_refused(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_tensors(checkpoint, lambda held: held["model.encoder.layers.0.fc1.bias"].fill_(torch.nan))
    said = refused(checkpoint, tmp_path, capsys, "--no-verify")
    assert "encoder.layers.0.feed_forward.inner.bias" in said


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model_type": "nllb-moe"}, r"model_type is 'nllb-moe'.*BART \(bart\).*Marian \(marian\)"),
        ({"auto_map": {"AutoModel": "modeling.Own"}}, "auto_map needs code from the checkpoint"),
        ({"activation_function": "quick_gelu"}, "activation_function is 'quick_gelu'; supported are gelu"),
        ({"decoder_attention_heads": 4}, "encoder_attention_heads is 3 and decoder_attention_heads is 4"),
        ({"d_model": "36"}, "transformers refuses it: .*'d_model' expected int, got str"),
        ({"encoder_layers": 0}, "encoder_layers=0 does not fit"),
    ],
    ids=["unknown", "remote_code", "activation", "heads", "type", "value"],
)
def test_settings_that_are_not_supported_are_named(
    settings: dict[str, Any],
    expected: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change_config(checkpoint, **settings)
    assert re.search(expected, refused(checkpoint, tmp_path, capsys))


def test_model_is_refused_when_it_would_compute_something_else_than_the_original(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(checkpoint_settings._ACTIVATIONS, "gelu", "relu")
    said = refused(checkpoint, tmp_path, capsys)
    assert re.search(r"differs from the original: the error of its (encoder states|logits) is .*, at most 1e-04", said)


def test_bundle_is_refused_when_its_texts_have_other_tokens_than_those_of_the_original(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lowering(original: Any, to: Path, *others: Any) -> None:
        write_tokenizer(original, to, *others)
        described = json.loads((to / "tokenizer.json").read_text())
        (to / "tokenizer.json").write_text(json.dumps({**described, "normalizer": {"type": "Lowercase"}}))

    monkeypatch.setattr(importer, "write_tokenizer", lowering)
    assert "the imported tokenizer differs from the original" in refused(checkpoint, tmp_path, capsys)


def test_bundle_is_refused_when_it_gives_other_answers_than_the_original(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "comparable_generation", without_beams)
    assert re.search(r"answers '.*' with the tokens .*, and `generate` of", refused(checkpoint, tmp_path, capsys))


def without_beams(*settings: Any) -> dict[str, Any]:
    return {**comparable_generation(*settings), "num_beams": 1, "repetition_penalty": 9.0}


def test_bundle_that_a_server_refuses_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle with early_stopping and without beams was written, and `antiphon serve` refused it."""
    path = checkpoint / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_beams": 17, "early_stopping": True}))
    monkeypatch.setattr(generation_settings, "RULES", ())
    assert "a server refuses the imported bundle" in refused(checkpoint, tmp_path, capsys)


def test_a_truncated_file_is_refused(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{weights} cannot be read" in refused(checkpoint, tmp_path, capsys)


class _Code:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("as_zip", [True, False], ids=["zip", "legacy"])
def test_import_never_runs_code_in_a_pickle(
    as_zip: bool, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "model.safetensors").unlink()
    held = {"shared.weight": _Code(tmp_path / "was_here")}
    if as_zip:
        torch.save(held, checkpoint / "pytorch_model.bin")
    else:
        (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(held, protocol=2))
    said = refused(checkpoint, tmp_path, capsys)
    assert "pytorch_model.bin contains objects other than tensors" in said
    assert not (tmp_path / "was_here").exists()


def test_a_missing_part_of_an_index_is_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names 'model-2.safetensors', which is not in its directory" in refused(checkpoint, tmp_path, capsys)


def test_tokens_without_a_row_in_the_model_are_left_out_and_reported(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bart-large-cnn and all its fine-tunings have such a token."""
    path = checkpoint / "tokenizer.json"
    held = json.loads(path.read_text())
    held["model"]["vocab"] |= {f"piece{index}": index for index in range(len(held["model"]["vocab"]), 300)}
    path.write_text(json.dumps(held))
    assert cli.main(["import", str(checkpoint), str(tmp_path / "bundle"), "--no-explain", "--no-verify"]) == 0
    assert "tokens without a row in the model are left out: piece211, piece212, piece213" in capsys.readouterr().err
    text = load_bundle(tmp_path / "bundle").manifest.text
    assert open_tokenizer(tmp_path / "bundle", text).vocab_size == 211


def test_directory_is_refused_when_it_is_not_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(tmp_path / "empty", tmp_path, capsys)


def test_hub_name_is_refused_when_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    said = refused("someone/something", tmp_path, capsys)
    assert (
        "someone/something is not a local directory, is not complete in the cache, and the hub cannot be reached"
        in said
    )


def test_lengths_beyond_learned_positions_are_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(checkpoint, tmp_path, capsys, "--max-source-len", "41")
    assert "--max-source-len is 41; the checkpoint has learned 40 positions" in said


def test_import_leaves_no_files_when_the_disk_is_full(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a file size limit of 20 kB writing the weights fails like on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        said = refused(checkpoint, tmp_path, capsys, "--no-verify")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in said


def test_existing_target_is_refused_before_anything_else(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bundle"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    assert cli.main(["import", str(checkpoint), str(target), "--overwrite"]) == 2
    assert "is not a bundle" in capsys.readouterr().err
    assert [path.name for path in target.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("Bart", ["ForSequenceClassification", "ForQuestionAnswering", "ForCausalLM"]),
        ("MBart", ["ForSequenceClassification"]),
        ("Marian", ["ForCausalLM"]),
        ("Pegasus", ["ForCausalLM"]),
        ("T5", ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]),
        ("GPT2", ["ForSequenceClassification", "DoubleHeadsModel"]),
        ("Llama", ["ForSequenceClassification", "ForTokenClassification"]),
        ("Bert", ["LMHeadModel", "ForMultipleChoice"]),
    ],
)
def test_class_with_another_head_is_refused_by_its_name(
    model_type: str, kinds: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = dict(
        vocab_size=32, d_model=16, hidden_size=16, n_embd=16, num_hidden_layers=1, num_layers=1, n_layer=1,
        encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, intermediate_size=16, d_ff=16,
        num_attention_heads=2, encoder_attention_heads=2, decoder_attention_heads=2, num_heads=2, n_head=2, d_kv=8,
        max_position_embeddings=32, n_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    for kind in kinds:
        folder = tmp_path / kind
        make: Any = getattr(transformers, f"{model_type}{kind}")
        make(make.config_class(**small)).save_pretrained(folder)
        said = refused(folder, tmp_path, capsys)
        assert f"architectures names {model_type}{kind}, whose head is not supported" in said
