"""Every option of T5Gemma gives the logits of transformers, or is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.errors import CheckpointError, LoweringError, SourceError
from antiphon.export.unpacking import unpack_checkpoint
from antiphon.importer.importer import ImportOptions, import_checkpoint, open_original
from antiphon.training.command import open_init
from tests.parity.seq2seq_checkpoints import CHECKPOINTS, original, write_tokenizers

LENS = (9, 1, 23)


def saved(folder: Path, *, share: bool = False, **changes: Any) -> Any:
    """Write a checkpoint with these settings in both parts, or of the model itself, and return its model."""
    made = CHECKPOINTS["t5gemma"]
    settings = dict(made.settings)
    for name, value in changes.items():
        if name in ("tie_word_embeddings", "encoder", "decoder"):
            settings[name] = value if name == "tie_word_embeddings" else settings[name] | value
        else:
            settings |= {part: settings[part] | {name: value} for part in ("encoder", "decoder")}
    model = original(replace(made, settings=settings))
    if share:
        model.model.encoder.embed_tokens.weight = nn.Parameter(model.model.decoder.embed_tokens.weight.clone())
    model.save_pretrained(folder)
    write_tokenizers(folder, made)
    return model


def opened(folder: Path) -> Checkpoint:
    """Return our model of a checkpoint, without its export."""
    (folder / "text").mkdir()
    checkpoint = open_original(str(folder), folder / "text")
    checkpoint.model.eval()
    return checkpoint


OPTIONS: dict[str, dict[str, Any]] = {
    "as google's": {},
    "tied output": dict(tie_word_embeddings=True),
    "one embedding": dict(share=True),
    "no limit of scores": dict(attn_logit_softcapping=None),
    "no limit of logits": dict(decoder=dict(final_logit_softcapping=None)),
    "a key head for all": dict(num_key_value_heads=1),
    "a key head for each": dict(num_key_value_heads=4),
    "key heads of each part": dict(encoder=dict(num_key_value_heads=4)),
    "biases": dict(attention_bias=True),
    "scale": dict(query_pre_attn_scalar=3),
    "rotation": dict(rope_parameters=dict(rope_type="default", rope_theta=50.0)),
    "scaled rotation": dict(rope_parameters=dict(rope_type="linear", rope_theta=50.0, factor=2.0)),
    "exact gelu": dict(hidden_activation="gelu"),
    "epsilon": dict(rms_norm_eps=0.01),
    "vocabularies": dict(encoder=dict(vocab_size=230)),
    "only full layers": dict(layer_types=["full_attention"] * 2, encoder=dict(layer_types=["full_attention"] * 3)),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=[*OPTIONS])
def test_option_gives_the_logits_of_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = saved(tmp_path, **options)
    checkpoint = opened(tmp_path)
    assert checkpoint.config.tie_source_target == ("share" in options)
    dice = np.random.default_rng(3)
    for length in LENS:
        ids, target = (torch.from_numpy(dice.integers(3, 200, (1, count))) for count in (length, 17))
        with torch.no_grad():
            expected = theirs(input_ids=ids, decoder_input_ids=target).logits
            torch.testing.assert_close(checkpoint.model(ids, target), expected, atol=2e-5, rtol=1e-4)


def test_window_limits_the_lengths(tmp_path: Path) -> None:
    saved(tmp_path, sliding_window=32)
    config = opened(tmp_path).config
    assert (config.max_source_len, config.max_target_len) == (32, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(encoder=dict(hidden_size=48)), "encoder.hidden_size is 48 and decoder.hidden_size is 40"),
        (dict(decoder=dict(head_dim=8)), "encoder.head_dim is 12 and decoder.head_dim is 8"),
        (dict(decoder=dict(attn_logit_softcapping=9.0)), "decoder.attn_logit_softcapping is 9.0"),
        (dict(hidden_activation="tanh"), "hidden_activation is 'tanh'"),
        (
            dict(rope_parameters=dict(rope_type="dynamic", rope_theta=50.0, factor=2.0)),
            "rope scaling is of type 'dynamic'",
        ),
    ],
)
def test_unsupported_options_are_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    saved(tmp_path, **options)
    with pytest.raises(SourceError, match=message):
        opened(tmp_path)


def test_t5gemma_2_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5gemma2"}))
    with pytest.raises(SourceError, match=r"model_type is 't5gemma2'; known families are .*T5Gemma"):
        import_checkpoint(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle"))


def test_further_training_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "text").mkdir()
    with pytest.raises(CheckpointError, match=r"output_cap=4\.0 cannot be trained"):
        open_init(tmp_path, tmp_path / "text")


def test_unpacking_of_a_bundle_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path)
    bundle = import_checkpoint(
        ImportOptions(source=str(tmp_path), target=tmp_path / "bundle", precisions=["float32"], verify=False)
    )
    with pytest.raises(CheckpointError, match="post_norms=True cannot be unpacked"):
        unpack_checkpoint(bundle)


def test_graphs_for_a_gpu_are_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path)
    options = ImportOptions(
        source=str(tmp_path), target=tmp_path / "bundle", precisions=["bfloat16"], lowerings=["cuda"], verify=False
    )
    with pytest.raises(LoweringError, match="no kernel for post_norms=True"):
        import_checkpoint(options)
