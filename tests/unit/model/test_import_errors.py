"""Errors of the import command, also of adapters: one line with reason and remedy, exit code 2, no files left."""

import json
import pickle
import re
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from antiphon.bundle.manifest import load_bundle
from antiphon.checkpoints import settings as checkpoint_settings
from antiphon.checkpoints.adapter import open_adapter
from antiphon.checkpoints.families.ctranslate2 import CTRANSLATE2
from antiphon.cli import main as cli
from antiphon.errors import SourceError
from antiphon.importer import generation_settings, importer
from antiphon.importer.generation_settings import comparable_generation
from antiphon.importer.importer import ImportOptions, _adapter, _inspect
from antiphon.importer.original_tokenizer import write_tokenizer
from antiphon.text.tokenizer import open_tokenizer
from tests.parity.decoder_checkpoints import write_decoder
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


Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return a function that runs the command and returns its error message. It must leave no files."""

    def run(source: Path | str, *options: str) -> str:
        target = tmp_path / "out" / "bundle"
        target.parent.mkdir(exist_ok=True)
        assert cli.main(["import", str(source), str(target), "--no-explain", "--precision", "float32", *options]) == 2
        assert not list(target.parent.iterdir())
        (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("antiphon import: "))
        return said

    return run


def change_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda held: [held.pop(f"model.decoder.layers.1.fc{n}.weight") for n in (1, 2)],
            "BART.* 2 missing: decoder.layers.1.fc1.weight, decoder.layers.1.fc2.weight",
        ),
        (
            lambda held: held.update({f"adapter.{n}": torch.ones(1) for n in range(7)}),
            "7 unexpected: adapter.0, adapter.1, adapter.2, adapter.3, adapter.4, ...",
        ),
        (
            lambda held: held["model.encoder.layers.0.fc1.bias"].fill_(torch.nan),
            "encoder.layers.0.feed_forward.inner.bias",
        ),
    ],
    ids=["missing", "unexpected", "not finite"],
)
def test_wrong_tensors_are_named(
    change: Callable[[dict[str, Tensor]], object], expected: str, checkpoint: Path, refused: Refused
) -> None:
    change_tensors(checkpoint, change)
    assert re.search(expected, refused(checkpoint, "--no-verify"))


def test_tensors_of_another_shape_are_named(checkpoint: Path, refused: Refused) -> None:
    change_config(checkpoint, encoder_ffn_dim=48, decoder_ffn_dim=48)
    assert "of another shape: decoder.layers.0.fc1.bias [[44]], expected [48]" in refused(checkpoint)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model_type": "nllb-moe"}, r"model_type is 'nllb-moe'.*BART \(bart\).*Marian \(marian\)"),
        ({"auto_map": {"AutoModel": "modeling.Own"}}, "auto_map needs code from the checkpoint"),
        ({"activation_function": "mish"}, "activation_function is 'mish'; supported are gelu"),
        ({"decoder_attention_heads": 4}, "encoder_attention_heads is 3 and decoder_attention_heads is 4"),
        ({"d_model": "36"}, "transformers refuses it: .*'d_model' expected int, got str"),
        ({"encoder_layers": 0}, "encoder_layers=0 does not fit"),
    ],
    ids=["unknown", "remote_code", "activation", "heads", "type", "value"],
)
def test_settings_that_are_not_supported_are_named(
    settings: dict[str, Any], expected: str, checkpoint: Path, refused: Refused
) -> None:
    change_config(checkpoint, **settings)
    assert re.search(expected, refused(checkpoint))


def test_model_is_refused_when_it_would_compute_something_else_than_the_original(
    checkpoint: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(checkpoint_settings._ACTIVATIONS, "gelu", "relu")
    said = refused(checkpoint)
    assert re.search(r"differs from the original: the error of its (encoder states|logits) is .*, at most 1e-04", said)


def test_bundle_is_refused_when_its_texts_have_other_tokens_than_those_of_the_original(
    checkpoint: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lowering(original: Any, to: Path, *others: Any) -> None:
        write_tokenizer(original, to, *others)
        described = json.loads((to / "tokenizer.json").read_text())
        (to / "tokenizer.json").write_text(json.dumps({**described, "normalizer": {"type": "Lowercase"}}))

    monkeypatch.setattr(importer, "write_tokenizer", lowering)
    assert "the imported tokenizer differs from the original" in refused(checkpoint)


def test_bundle_is_refused_when_it_gives_other_answers_than_the_original(
    checkpoint: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "comparable_generation", without_beams)
    assert re.search(r"answers '.*' with the tokens .*, and the original with", refused(checkpoint))


def without_beams(*settings: Any) -> dict[str, Any]:
    return {**comparable_generation(*settings), "num_beams": 1, "repetition_penalty": 9.0}


@pytest.mark.combinations
def test_bundle_that_a_server_refuses_is_refused(
    checkpoint: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle with early_stopping and without beams was written, and `antiphon serve` refused it."""
    path = checkpoint / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_beams": 17, "early_stopping": True}))
    monkeypatch.setattr(generation_settings, "RULES", ())
    assert "a server refuses the imported bundle" in refused(checkpoint)


def test_a_truncated_file_is_refused(checkpoint: Path, refused: Refused) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{weights} cannot be read" in refused(checkpoint)


class _Code:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("as_zip", [True, False], ids=["zip", "legacy"])
def test_import_never_runs_code_in_a_pickle(as_zip: bool, checkpoint: Path, tmp_path: Path, refused: Refused) -> None:
    (checkpoint / "model.safetensors").unlink()
    held = {"shared.weight": _Code(tmp_path / "was_here")}
    if as_zip:
        torch.save(held, checkpoint / "pytorch_model.bin")
    else:
        (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(held, protocol=2))
    said = refused(checkpoint)
    assert "pytorch_model.bin contains objects other than tensors" in said
    assert not (tmp_path / "was_here").exists()


def test_a_missing_part_of_an_index_is_named(checkpoint: Path, refused: Refused) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names 'model-2.safetensors', which is not in its directory" in refused(checkpoint)


@pytest.mark.combinations
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


def test_directory_is_refused_when_it_is_not_a_checkpoint(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(tmp_path / "empty")


def test_hub_name_is_refused_when_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    said = refused("someone/something")
    assert (
        "someone/something is not a local directory, is not complete in the cache, and the hub cannot be reached"
        in said
    )


def test_lengths_beyond_learned_positions_are_refused(checkpoint: Path, refused: Refused) -> None:
    said = refused(checkpoint, "--max-source-len", "41")
    assert "--max-source-len is 41; the checkpoint has learned 40 positions" in said


def test_import_leaves_no_files_when_the_disk_is_full(checkpoint: Path, refused: Refused) -> None:
    """With a file size limit of 20 kB writing the weights fails like on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        said = refused(checkpoint, "--no-verify")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in said


def test_existing_target_is_refused_first(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    model_type: str, kinds: list[str], tmp_path: Path, refused: Refused
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
        said = refused(folder)
        assert f"architectures names {model_type}{kind}, whose head is not supported" in said


LAYER = "base_model.model.model.encoder.layers.0"
CONFIG: dict[str, Any] = dict(peft_type="LORA", r=2, lora_alpha=4, task_type="SEQ_2_SEQ_LM", target_modules=["fc1"])


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
    settings: dict[str, Any], expected: str, checkpoint: Path, tmp_path: Path, refused: Refused
) -> None:
    adapter = write_adapter(tmp_path / "adapter", **settings)
    said = refused(checkpoint, "--adapter", str(adapter))
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
    renamed: str, shape: int, expected: str, checkpoint: Path, tmp_path: Path, refused: Refused
) -> None:
    path = f"base_model.model.model.{renamed}"
    held = {f"{path}.lora_A.weight": torch.ones(2, shape), f"{path}.lora_B.weight": torch.ones(44, 2)}
    adapter = write_adapter(tmp_path / "adapter", held)
    assert expected in refused(checkpoint, "--adapter", str(adapter))


def test_added_tensor_without_a_place_in_a_model_is_refused(checkpoint: Path, tmp_path: Path, refused: Refused) -> None:
    adapter = write_adapter(tmp_path / "adapter", tensors() | {"base_model.model.score.weight": torch.ones(2, 36)})
    said = refused(checkpoint, "--adapter", str(adapter))
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
        _adapter(options, CTRANSLATE2, tmp_path)


def test_base_model_of_another_name_is_only_noted(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for trained_on, noted in (("org/other", 1), (f"org/{checkpoint.name}", 0), (None, 0)):
        adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path=trained_on)
        _inspect(ImportOptions(source=str(checkpoint), target=tmp_path / "bundle", adapter=adapter))
        assert capsys.readouterr().err.count("note: the adapter was trained on org/other") == noted


def test_adapter_in_place_of_the_checkpoint_is_refused(tmp_path: Path, refused: Refused) -> None:
    said = refused(write_adapter(tmp_path / "adapter"))
    assert "import the checkpoint that it was trained on, from a directory of its own, and give this one" in said


def test_comparison_names_the_extra_that_has_peft(
    checkpoint: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # imports of it fail
    said = refused(checkpoint, "--adapter", str(write_adapter(tmp_path / "adapter")))
    assert said == "antiphon import: peft is not installed; run: pip install 'antiphon[server,import]'"


def test_missing_directory_and_missing_files_are_named(checkpoint: Path, tmp_path: Path, refused: Refused) -> None:
    said = refused(checkpoint, "--adapter", str(tmp_path / "none"))
    assert "none, which is not a directory" in said
    (tmp_path / "empty").mkdir()
    assert "it has no adapter_config.json" in refused(checkpoint, "--adapter", str(tmp_path / "empty"))
    (write_adapter(tmp_path / "half") / "adapter_model.safetensors").unlink()
    said = refused(checkpoint, "--adapter", str(tmp_path / "half"))
    assert "has neither adapter_model.safetensors nor adapter_model.bin" in said


def test_pickled_code_of_an_adapter_is_not_run(
    checkpoint: Path, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "was_run",)

    adapter = write_adapter(tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Harmful(), protocol=2))
    assert "is not read, because a pickle can run any code" in refused(checkpoint, "--adapter", str(adapter))
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
