"""Imported DeBERTa v1 and v2: states and heads, in PyTorch and in graphs, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from safetensors.torch import load_file, save_file

from antiphon.architecture.config import Disentangled
from antiphon.checkpoints.families.deberta import DEBERTA_V2
from antiphon.errors import SourceError
from antiphon.export.bundle_model import NativeEncoder
from antiphon.importer.importer import ImportOptions, import_checkpoint
from antiphon.importer.original_tokenizer import open_original_tokenizer, write_tokenizer
from antiphon.ops.disentangled import table_rows
from antiphon.text.format import fill
from antiphon.text.tokenizer import open_tokenizer
from tests.parity.encoder_checkpoints import read_checkpoint
from tests.parity.exports import small_config
from tests.parity.test_import_encoders import CLOSE, LABELS, Case, random_batch, run_theirs, write

SIZES: dict[str, Any] = dict(
    vocab_size=83, hidden_size=36, num_hidden_layers=2, num_attention_heads=3, intermediate_size=50,
    max_position_embeddings=40, hidden_act="gelu", layer_norm_eps=1e-7, relative_attention=True,
)  # fmt: skip
BOTH = ["c2p", "p2c"]
# The settings of deberta-v3-base with smaller sizes: buckets end at the last position.
V3 = dict(
    SIZES, position_buckets=12, share_att_key=True, norm_rel_ebd="layer_norm", pos_att_type="p2c|c2p",
    position_biased_input=False,
)  # fmt: skip
CASES: dict[str, Case] = {
    # Distances beyond the table of v1: sources are longer than max_relative_positions.
    "v1_masked": Case(
        family="Deberta", kind="ForMaskedLM", outputs={"fill_mask": "logits"},
        settings={**SIZES, "pos_att_type": BOTH, "max_relative_positions": 9, "position_biased_input": False},
    ),
    "v1_c2p_classify": Case(
        family="Deberta", kind="ForSequenceClassification", outputs={"classify": "logits"},
        settings={**SIZES, "pos_att_type": ["c2p"], "type_vocab_size": 2, "id2label": LABELS},
    ),
    "v1_p2c_tag": Case(
        family="Deberta", kind="ForTokenClassification", outputs={"tag": "logits"},
        settings={**SIZES, "pos_att_type": ["p2c"], "type_vocab_size": 1, "position_biased_input": False},
    ),
    "v3_masked": Case(family="DebertaV2", kind="ForMaskedLM", settings=V3, outputs={"fill_mask": "logits"}),
    "v3_legacy_off": Case(
        family="DebertaV2", kind="ForMaskedLM", settings={**V3, "legacy": False}, outputs={"fill_mask": "logits"}
    ),
    "v2_classify": Case(
        family="DebertaV2", kind="ForSequenceClassification", outputs={"classify": "logits"},
        settings={**V3, "share_att_key": False, "pooler_hidden_act": "tanh", "max_relative_positions": 17},
    ),
    "v2_tag_exact_distances": Case(
        family="DebertaV2", kind="ForTokenClassification", outputs={"tag": "logits"},
        settings={**SIZES, "pos_att_type": BOTH, "max_relative_positions": 11, "type_vocab_size": 2},
    ),
    "v2_base_c2p": Case(
        family="DebertaV2", kind="Model", outputs={},
        settings={**V3, "share_att_key": False, "pos_att_type": "c2p", "norm_rel_ebd": "none"},
    ),
    "v2_base_p2c": Case(family="DebertaV2", kind="Model", outputs={}, settings={**V3, "pos_att_type": "p2c"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_states_and_heads_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    original = write(case, tmp_path)
    model, config, _ = read_checkpoint(tmp_path)
    batch = random_batch(config)
    expected = run_theirs(original, case, config, batch)
    with torch.no_grad():
        states = model.encode(batch.ids, batch.lens, batch.types if config.token_types else None)
        torch.testing.assert_close(states[batch.mask], expected["states"], **CLOSE)
        for task in case.outputs:
            read = states[:, 0] if task == "classify" else states[batch.mask]
            torch.testing.assert_close(model.read_out(task, read), expected[task], **CLOSE)


@pytest.mark.parametrize("name", ["v1_masked", "v2_classify"])
def test_imported_graphs_equal_the_model_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    original = write(case, tmp_path / "theirs")
    bundle = import_checkpoint(ImportOptions(source=str(tmp_path / "theirs"), target=tmp_path / "ours"))
    config = bundle.manifest.model
    batch = random_batch(config)
    expected = run_theirs(original, case, config, batch)
    for precision, allowed in (("float32", 5e-5), ("int8", 0.2)):
        encoder = NativeEncoder(bundle.path, bundle.graph_set(precision), config)  # type: ignore[arg-type]
        sources = batch.rows(batch.ids)
        states = encoder.encode(sources)
        found = {"states": np.concatenate(states)}
        for task in case.outputs:
            read = np.stack([row[0] for row in states]) if task == "classify" else found["states"]
            found[task] = encoder.read_out(task, read)
        for part, values in expected.items():
            error = np.abs(found[part] - values.numpy()).max() / max(1.0, float(values.abs().max()))
            assert error < allowed, (precision, part, error)
        for source, together in zip(sources, states, strict=True):
            np.testing.assert_array_equal(encoder.encode([source])[0], together)


@pytest.mark.parametrize(("span", "longest"), [(256, 512), (32, 128), (9, 40), (4, 8)])
def test_logarithmic_buckets_equal_those_of_transformers(span: int, longest: int) -> None:
    """float32 rounding decides at the ends of buckets; every distance must be in the same bucket as the original's."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    distances = torch.arange(-2 * longest, 2 * longest + 1)
    expected = (make_log_bucket_position(distances, span, longest).long() + span).clamp(0, 2 * span - 1)
    assert torch.equal(table_rows(distances, Disentangled(span=span, max_distance=longest)), expected)


def test_checkpoint_in_the_form_of_its_authors_is_read(tmp_path: Path) -> None:
    """The authors' files have an unused table of absolute positions, and the discriminator of v3's training."""
    case = CASES["v3_legacy_off"]
    original = write(case, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    unread = {
        "deberta.embeddings.position_embeddings.weight": torch.ones(40, 36),
        "mask_predictions.dense.bias": torch.ones(36),
    }
    save_file({**tensors, **unread}, tmp_path / "model.safetensors")
    model, config, _ = read_checkpoint(tmp_path)
    batch = random_batch(config)
    with torch.no_grad():
        states = model.encode(batch.ids, batch.lens)
    torch.testing.assert_close(states[batch.mask], run_theirs(original, case, config, batch)["states"], **CLOSE)


def test_texts_are_tokenised_as_by_transformers_when_only_a_sentencepiece_model_exists(tmp_path: Path) -> None:
    """Most checkpoints of v2 and v3 have no tokenizer.json; [MASK] is not in their SentencePiece model."""
    special: dict[str, Any] = dict(pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"the small cat and a big dog ran {number}" for number in range(60)]),
        model_prefix=str(tmp_path / "spm"), vocab_size=30, pad_id=0, bos_id=1, eos_id=2, unk_id=3, minloglevel=2,
        **special,
    )  # fmt: skip
    tokens = {name.replace("piece", "token"): token for name, token in special.items()}
    described = {**tokens, "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deberta-v2"}))
    theirs = transformers.DebertaV2Tokenizer.from_pretrained(tmp_path)
    write_tokenizer(open_original_tokenizer(tmp_path), tmp_path / "ours", len(theirs), [])
    format_ = DEBERTA_V2.text(tmp_path / "ours", {}, small_config())
    assert format_.mask_id == theirs.mask_token_id
    tokenizer = open_tokenizer(tmp_path / "ours", format_)
    for text in ("the small cat", "a big  dog", "A [MASK] ran", "", "dog\u00e9 7"):
        assert list(fill(format_, tokenizer.encode_source(text).ids)[0]) == theirs(text).input_ids


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("v1_masked", dict(relative_attention=False), "relative_attention is False"),
        ("v1_masked", dict(pos_att_type=["p2p"]), "pos_att_type is ['p2p']"),
        ("v1_masked", dict(talking_head=True), "talking_head is True"),
        ("v1_masked", dict(embedding_size=20), "embedding_size is 20"),
        ("v3_masked", dict(conv_kernel_size=3), "conv_kernel_size is 3"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(CASES[name], tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.update(changes)
    config.save_pretrained(tmp_path)
    with pytest.raises(SourceError) as refusal:
        read_checkpoint(tmp_path)
    assert message in str(refusal.value)
