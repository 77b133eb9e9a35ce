"""Adapters that cannot be merged exactly are refused by the import command: one line, exit code 2, no files left."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from antiphon.checkpoints.adapter import open_adapter
from antiphon.checkpoints.families.ctranslate2 import CTRANSLATE2
from antiphon.errors import SourceError
from antiphon.importer.importer import ImportOptions, _adapter, _inspect
from tests.parity.decoder_checkpoints import write_decoder
from tests.parity.seq2seq_checkpoints import save
from tests.unit.model.test_import_errors import refused

LAYER = "base_model.model.model.encoder.layers.0"
CONFIG: dict[str, Any] = dict(peft_type="LORA", r=2, lora_alpha=4, task_type="SEQ_2_SEQ_LM", target_modules=["fc1"])


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bart") / "checkpoint"
    save(folder, "bart")
    return folder


def tensors() -> dict[str, Tensor]:
    """Return the product of rank 2 for fc1, which has 36 inputs and 44 outputs."""
    return {f"{LAYER}.fc1.lora_A.weight": torch.ones(2, 36), f"{LAYER}.fc1.lora_B.weight": torch.ones(44, 2)}


def write_adapter(folder: Path, held: Mapping[str, Tensor] | None = None, **settings: Any) -> Path:
    """Write an adapter's directory; settings replace those of CONFIG."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | settings))
    save_file(dict(tensors() if held is None else held), folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"peft_type": "IA3"}, 'peft_type is "IA3"; supported: "LORA"'),
        ({"peft_type": "PREFIX_TUNING"}, 'peft_type is "PREFIX_TUNING"; supported: "LORA"'),
        ({"peft_type": None}, 'peft_type is null; supported: "LORA"'),
        ({"bias": "some"}, 'bias is "some"; supported: "none", "all", "lora_only"'),
        (
            {"init_lora_weights": "pissa"},
            'init_lora_weights is "pissa"; supported: true, false, "gaussian", "eva", "orthogonal"',
        ),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens is [5]; supported: only null, false or empty"),
        ({"target_parameters": ["w"]}, 'target_parameters is ["w"]; supported: only null, false or empty'),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is [1]; supported: only null"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is [[0, 1]]; supported: only null"),
        ({"setting_of_next_year": 1}, "setting_of_next_year is 1; supported: only null, false or empty"),
        ({"r": 0}, "r is 0: Input should be greater than or equal to 1"),
        ({"lora_alpha": "4"}, 'lora_alpha is "4": Input should be a valid number'),
        ({"rank_pattern": {"fc1": 0}}, "rank_pattern.fc1 is 0: Input should be greater"),
        ({"alpha_pattern": {"fc1(": 1}}, "'fc1(' is not a regular expression"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_change_the_method_are_refused_by_name(
    settings: dict[str, Any], expected: str, bart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", **settings)
    said = refused(bart, tmp_path, capsys, "--adapter", str(adapter))
    assert "adapter_config.json" in said
    assert expected in said


def _without_up(held: dict[str, Tensor]) -> None:
    del held[f"{LAYER}.fc1.lora_B.weight"]


@pytest.mark.parametrize(
    ("change", "settings", "expected"),
    [
        (
            _without_up,
            {},
            "encoder.layers.0.fc1 has the tensors lora_A.weight; lora_A.weight, lora_B.weight are needed",
        ),
        (lambda held: None, {"use_dora": True}, "lora_magnitude_vector are needed, because use_dora is true"),
        (lambda held: None, {"r": 3}, "[2, 36] and [44, 2], which are not of rank 3, as r or rank_pattern"),
        (
            lambda held: held.update({f"{LAYER}.fc1.lora_B.bias": torch.ones(3)}),
            {},
            "fc1.lora_B.bias has the shape [3], not [44]",
        ),
        (
            lambda held: held.update({f"{LAYER}.fc1.lora_diag": torch.ones(2)}),
            {},
            f"the tensor {LAYER}.fc1.lora_diag has no known meaning; known are base_model.model.PATH with the endings",
        ),
        (lambda held: held.update({"fc1.weight": torch.ones(2)}), {}, "the tensor fc1.weight has no known meaning"),
        (lambda held: held.clear(), {}, "has no tensors of LoRA, whose names end with lora_A.weight or lora_B.weight"),
    ],
    ids=["half", "magnitude", "rank", "bias", "unknown", "prefix", "empty"],
)
def test_tensors_that_do_not_belong_together_are_refused(
    change: Callable[[dict[str, Tensor]], object], settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    held = tensors()
    change(held)
    write_adapter(tmp_path, held, **settings)
    with pytest.raises(SourceError) as refusal:
        open_adapter(tmp_path)
    assert expected in str(refusal.value)


@pytest.mark.parametrize(
    ("renamed", "shape", "expected"),
    [
        (
            "encoder.layers.7.fc1",
            36,
            "what the BART model of config.json does not have, 1 in number: encoder.layers.7.fc1",
        ),
        ("encoder.layers.0.fc1", 35, "product for model.encoder.layers.0.fc1 is [44, 35], and the checkpoint's weight"),
        ("shared", 36, "changes shared.weight, one tensor of this model with decoder.embed_tokens.weight, encoder.emb"),
    ],
    ids=["module", "shape", "tied"],
)
def test_adapter_of_another_checkpoint_is_refused(
    renamed: str, shape: int, expected: str, bart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"base_model.model.model.{renamed}"
    held = {f"{path}.lora_A.weight": torch.ones(2, shape), f"{path}.lora_B.weight": torch.ones(44, 2)}
    adapter = write_adapter(tmp_path / "adapter", held)
    assert expected in refused(bart, tmp_path, capsys, "--adapter", str(adapter))


def test_added_tensor_without_a_place_in_the_model_is_refused(
    bart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", tensors() | {"base_model.model.score.weight": torch.ones(2, 36)})
    said = refused(bart, tmp_path, capsys, "--adapter", str(adapter))
    assert "what the BART model of config.json does not have, 1 in number: score.weight" in said


def test_tied_embedding_must_be_replaced_under_all_its_names(tmp_path: Path) -> None:
    """The tests against peft cover the case with all names."""
    model = write_decoder(tmp_path / "gpt2", "gpt2")
    held = tensors_of_gpt2() | {"base_model.model.transformer.wte.weight": torch.ones_like(model.lm_head.weight)}
    adapter = write_adapter(tmp_path / "adapter", held)
    with pytest.raises(SourceError, match=r"changes wte.weight, one tensor of this model with lm_head.weight"):
        _inspect(ImportOptions(source=str(tmp_path / "gpt2"), target=tmp_path / "bundle", adapter=adapter))


def tensors_of_gpt2() -> dict[str, Tensor]:
    path = "base_model.model.transformer.h.0.mlp.c_fc"
    return {f"{path}.lora_A.weight": torch.ones(2, 40), f"{path}.lora_B.weight": torch.ones(72, 2)}


def test_adapter_of_another_format_is_refused_with_the_family(tmp_path: Path) -> None:
    options = ImportOptions(source="ct2", target=tmp_path, adapter=write_adapter(tmp_path / "adapter"))
    with pytest.raises(SourceError, match="--adapter needs a checkpoint of transformers; ct2 is one of CTranslate2"):
        _adapter(options, CTRANSLATE2)


def test_base_model_of_another_name_is_only_noted(
    bart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for trained_on, noted in (("org/other", 1), (f"org/{bart.name}", 0), (None, 0)):
        adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path=trained_on)
        _inspect(ImportOptions(source=str(bart), target=tmp_path / "bundle", adapter=adapter))
        assert capsys.readouterr().err.count("note: the adapter was trained on org/other") == noted


def test_adapter_in_place_of_the_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(write_adapter(tmp_path / "adapter"), tmp_path, capsys)
    assert "import the checkpoint that it was trained on, from a directory of its own, and give this one" in said


def test_comparison_names_the_extra_that_has_peft(
    bart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # imports of it fail
    said = refused(bart, tmp_path, capsys, "--adapter", str(write_adapter(tmp_path / "adapter")))
    assert said == "antiphon import: peft is not installed; run: pip install 'antiphon[server,import]'"


def test_missing_directory_and_missing_files_are_named(
    bart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(bart, tmp_path, capsys, "--adapter", str(tmp_path / "none"))
    assert "none, which is not a directory" in said
    (tmp_path / "empty").mkdir()
    assert "it has no adapter_config.json" in refused(bart, tmp_path, capsys, "--adapter", str(tmp_path / "empty"))
    (write_adapter(tmp_path / "half") / "adapter_model.safetensors").unlink()
    said = refused(bart, tmp_path, capsys, "--adapter", str(tmp_path / "half"))
    assert "has neither adapter_model.safetensors nor adapter_model.bin" in said


def test_pickled_code_of_an_adapter_is_not_run(bart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "was_run",)

    adapter = write_adapter(tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Harmful(), protocol=2))
    assert "is not read, because a pickle can run any code" in refused(
        bart, tmp_path, capsys, "--adapter", str(adapter)
    )
    assert not (tmp_path / "was_run").exists()


def test_tensors_of_a_bin_file_are_those_of_safetensors(tmp_path: Path) -> None:
    from_safetensors = open_adapter(write_adapter(tmp_path))
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(tensors(), tmp_path / "adapter_model.bin")
    from_bin = open_adapter(tmp_path)
    assert from_bin.products.keys() == {"model.encoder.layers.0.fc1"} == from_safetensors.products.keys()
    for part, tensor in from_bin.products["model.encoder.layers.0.fc1"].items():
        assert torch.equal(tensor, from_safetensors.products["model.encoder.layers.0.fc1"][part])
    assert "adapter_model.bin" in from_bin.described
