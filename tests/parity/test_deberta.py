"""Parts that only DeBERTa has: buckets of distances, files of its authors, and tokenizers of SentencePiece alone.

test_import_encoders.py compares states and heads with transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers
from safetensors.torch import load_file, save_file

from antiphon.architecture.config import Disentangled
from antiphon.checkpoints.families.deberta import DEBERTA_V2
from antiphon.importer.original_tokenizer import open_original_tokenizer, write_tokenizer
from antiphon.ops.disentangled import table_rows
from antiphon.text.format import fill
from antiphon.text.tokenizer import open_tokenizer
from tests.parity.encoder_checkpoints import read_checkpoint
from tests.parity.exports import small_config
from tests.parity.test_import_encoders import CASES, CLOSE, random_batch, run_theirs, write


@pytest.mark.parametrize(("span", "longest"), [(256, 512), (32, 128), (9, 40), (4, 8)])
def test_logarithmic_buckets_equal_those_of_transformers(span: int, longest: int) -> None:
    """float32 rounding decides at the ends of buckets; every distance must be in the same bucket as the original's."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    distances = torch.arange(-2 * longest, 2 * longest + 1)
    expected = (make_log_bucket_position(distances, span, longest).long() + span).clamp(0, 2 * span - 1)
    assert torch.equal(table_rows(distances, Disentangled(span=span, max_distance=longest)), expected)


def test_checkpoint_in_the_form_of_its_authors_is_read(tmp_path: Path) -> None:
    """The authors' files have an unused table of absolute positions, and the discriminator of v3's training."""
    case = CASES["deberta_v3_legacy_off"]
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
