"""Import of GGUF files: weights, answers and texts compared with transformers' own reader, and refusals by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter

from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.errors import SourceError, TokenizerError
from antiphon.importer.importer import ImportOptions, import_checkpoint, open_original
from antiphon.importer.original_tokenizer import open_original_tokenizer
from antiphon.tools.import_command import check_served
from tests.parity.gguf_checkpoints import SETTINGS, write_gguf

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def _imported(path: Path) -> Checkpoint:
    folder = path.parent / f"{path.stem}-text"
    folder.mkdir()
    return open_original(str(path), folder)


def _logits(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    model = checkpoint.model.eval()
    with torch.no_grad():
        return model.logits(model.decode(ids, None))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_float_file_gives_the_logits_of_the_model_before_its_conversion(tmp_path: Path, name: str) -> None:
    """transformers' reader ignores scaled rotations, so the model that was converted is the reference."""
    original = write_gguf(tmp_path / "model.gguf", name)
    ids = torch.randint(0, original.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = original(input_ids=ids).logits
    torch.testing.assert_close(_logits(_imported(tmp_path / "model.gguf"), ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", TYPES)
def test_dequantised_weights_give_the_logits_of_transformers(tmp_path: Path, kind: str) -> None:
    written = write_gguf(tmp_path / "model.gguf", "llama", kind)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, config=written.config
    )
    checkpoint = _imported(tmp_path / "model.gguf")
    assert checkpoint.model.decoder is not None
    embedding = checkpoint.model.decoder.embedding.weight
    assert torch.equal(embedding, theirs.model.embed_tokens.weight)
    assert torch.equal(embedding, written.model.embed_tokens.weight) == (kind == "F32")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
    torch.testing.assert_close(_logits(checkpoint, ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen2"])
def test_import_compares_with_transformers_and_serves(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "model.gguf", name, "Q8_0", {"general.license": "mit"})
    (tmp_path / "folder").mkdir()
    shutil.move(tmp_path / "model.gguf", tmp_path / "folder" / "model.gguf")
    options = ImportOptions(source=str(tmp_path / "folder"), target=tmp_path / "bundle", precisions=["float32"])
    bundle = import_checkpoint(options, check_served)
    assert "as in transformers" in capsys.readouterr().out
    assert bundle.manifest.provenance is not None
    assert bundle.manifest.provenance.licence == "mit"


def test_folder_with_several_files_is_refused_with_their_names(tmp_path: Path) -> None:
    write_gguf(tmp_path / "b.gguf", "llama")
    shutil.copy(tmp_path / "b.gguf", tmp_path / "a.gguf")
    with pytest.raises(SourceError, match=r"several GGUF files; name one of them: a\.gguf, b\.gguf"):
        import_checkpoint(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle"))


def test_adapter_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama")
    options = ImportOptions(source=str(tmp_path), target=tmp_path / "bundle", adapter=tmp_path)
    with pytest.raises(SourceError, match="--adapter needs the checkpoint that it was trained on"):
        import_checkpoint(options)


def test_second_end_token_of_chats_is_a_stop_token(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", keys={"tokenizer.ggml.eot_token_id": 7})
    checkpoint = _imported(tmp_path / "model.gguf")
    assert checkpoint.config.eos_id == 2
    assert checkpoint.generation.stop_ids == (7,)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.expert_count": 8}, r"llama\.expert_count is 8; only 0 is supported"),
        ({"llama.attention.sliding_window": 16}, r"llama\.attention\.sliding_window is 16"),
        ({"llama.logit_scale": 2.0}, r"llama\.logit_scale is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type is 'yarn'; supported are 'none', 'linear'"),
        ({"llama.rope.dimension_count": 16}, r"llama\.rope\.dimension_count is 16; only the width of a head, 32"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"llama\.attention\.head_count_kv is \[2, 1\]"),
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
        ({"llama.block_count": 1}, r"unexpected: blk\.1|unexpected: layers\.1"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_unsupported_metadata_is_refused_by_name(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", keys=keys)
    with pytest.raises(SourceError, match=message):
        _imported(tmp_path / "model.gguf")


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SourceError, match=r"general\.architecture is 'mamba'; supported are gpt2, llama, qwen2"):
        _imported(tmp_path / "model.gguf")


def test_type_that_cannot_be_dequantised_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", "F32")
    content = bytearray(path.read_bytes())
    # The type of a tensor stands after its name, rank and two dimensions.
    start = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    assert content[start] == GGMLQuantizationType.F32
    content[start] = GGMLQuantizationType.I32
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"token_embd\.weight has the type I32, which cannot be dequantised"):
        _imported(path)


@pytest.mark.parametrize("size", [3, 30, 2000])
def test_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    write_gguf(tmp_path / "whole.gguf", "llama")
    (tmp_path / "model.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:size])
    with pytest.raises(SourceError, match=r"model\.gguf"):
        _imported(tmp_path / "model.gguf")


def test_factors_of_another_scaling_are_refused(tmp_path: Path) -> None:
    rotation = dict(SETTINGS["llama3"]["rope_parameters"], original_max_position_embeddings=4096)  # type: ignore[call-overload]
    write_gguf(tmp_path / "model.gguf", "llama3", rope_parameters=rotation)
    with pytest.raises(SourceError, match=r"rope_freqs\.weight"):
        _imported(tmp_path / "model.gguf")


def test_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "gpt2", keys={"tokenizer.ggml.pre": "poro-chat"})
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre is 'poro-chat'; supported are gpt-2"):
        _imported(tmp_path / "model.gguf")


def test_digits_are_split_as_the_pre_tokenizer_states(tmp_path: Path) -> None:
    """Numbers are pieces of digits in SmolLM's tokenizer, which transformers' reader splits like GPT-2's."""
    write_gguf(tmp_path / "model.gguf", "gpt2", keys={"tokenizer.ggml.pre": "smollm"})
    backend = open_original_tokenizer(tmp_path / "model.gguf").backend_tokenizer
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a 123")] == ["a", "Ġ", "1", "2", "3"]


def test_begin_token_of_llama_3_is_added_unless_the_file_denies_it(tmp_path: Path) -> None:
    for name, keys in (("with", {}), ("without", {"tokenizer.ggml.add_bos_token": False})):
        write_gguf(tmp_path / f"{name}.gguf", "gpt2", keys={"tokenizer.ggml.pre": "llama-bpe", **keys})
        ids = open_original_tokenizer(tmp_path / f"{name}.gguf")("the cat").input_ids
        assert (ids[0] == 0) == (name == "with")
