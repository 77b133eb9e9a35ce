"""Conversion of generation_config.json to a bundle's defaults, and of a Llama's rotary positions."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from antiphon.architecture.config import preset
from antiphon.bundle.manifest import GenerationDefaults
from antiphon.checkpoints.families.decoder_only import LLAMA
from antiphon.controls.table import SAMPLING_CONTROLS
from antiphon.domain.sampling_params import SamplingParams
from antiphon.errors import SourceError
from antiphon.importer.generation_settings import (
    UNSUPPORTED,
    generation_defaults,
    resolved_generation,
    with_start_and_end,
)
from antiphon.text.format import TextFormat
from antiphon.transformer.positions import rotary_rates

# Settings of GenerationConfig that generation_settings.py reads.
READ = """
bad_words_ids bos_token_id decoder_start_token_id do_sample early_stopping eos_token_id forced_bos_token_id
length_penalty max_length max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size num_beams
num_return_sequences renormalize_logits repetition_penalty sequence_bias suppress_tokens temperature top_k top_p
typical_p
"""
# Settings of speed, memory, extra outputs and drafts, which do not change the answer to a single text.
WITHOUT_EFFECT = """
_from_model_config assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind
cache_config cache_implementation compile_config continuous_batching_config disable_compile is_assistant low_memory
max_cache_len max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule output_attentions
output_hidden_states output_logits output_scores pad_token_id prefill_chunk_size prompt_lookup_num_tokens
remove_invalid_values return_dict_in_generate speculation_type target_lookbehind token_healing transformers_version
use_cache use_mtp
"""
CONFIG = preset("tiny")  # 96 tokens, at most 64 of a target
TEXT = TextFormat(template=("$text", 2), languages={"en_XX": 9})


def resolved(folder: Path) -> dict[str, Any]:
    return {name: value for name, value in resolved_generation(folder).to_dict().items() if value is not None}


def defaults_of(folder: Path, notes: list[str] | None = None, **stated: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps({"transformers_version": "5.23.0", **stated}))
    return generation_defaults(resolved(folder), CONFIG, TEXT, [] if notes is None else notes)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, {}),
        ({"max_length": 40}, {"max_new_tokens": 39}),
        ({"max_length": 512, "min_length": 11}, {"max_new_tokens": 64, "min_new_tokens": 10}),
        ({"max_new_tokens": 7}, {"max_new_tokens": 7}),
        ({"length_penalty": 2.0, "early_stopping": True}, {}),  # settings of beam search without beams
        ({"num_beams": 5, "early_stopping": "never"}, {"beam_width": 5, "early_stopping": "never"}),
        ({"do_sample": True, "top_p": 0.9}, {"temperature": 1.0, "top_k": 50, "top_p": 0.9}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),  # do_sample is not set
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 0, "min_p": 0.1, "typical_p": 0.9},
            {"temperature": 0.7, "min_p": 0.1, "typical_p": 0.9},
        ),
        ({"bad_words_ids": [[3], [4, 5]], "suppress_tokens": [8, 500]}, {"suppressed_ids": (3, 8)}),
        ({"suppress_tokens": [8, 2]}, {"suppressed_ids": (8,), "ignore_eos": True}),
        ({"sequence_bias": [[[5], -2.0], [[4], 1.5], [[6, 7], 3.0]]}, {"logit_bias": ((4, 1.5), (5, -2.0))}),
        ({"max_time": 2.5}, {"time_limit_s": 2.5}),
        ({"num_beams": 4, "num_return_sequences": 3}, {"beam_width": 4, "num_return_sequences": 3}),
        ({"eos_token_id": [2, 41, 40, 41, 960]}, {"stop_ids": (41, 40)}),  # 2 is the end token, 960 is not a token
        ({"eos_token_id": 2}, {}),
        ({"forced_bos_token_id": 9}, {}),  # a language
        ({"forced_bos_token_id": 7}, {"forced_first_id": 7}),
    ],
)
def test_settings_become_generation_defaults(stated: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    assert defaults_of(tmp_path, **stated) == GenerationDefaults(**expected)


def test_settings_are_read_from_config_json_of_an_old_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_beams": 6, "max_length": 20, "d_model": 8}))
    found = generation_defaults(resolved(tmp_path), CONFIG, TEXT, [])
    assert found == GenerationDefaults(beam_width=6, max_new_tokens=19)


def test_values_out_of_range_are_left_out_with_all_that_depend_on_them(tmp_path: Path) -> None:
    """A bundle with early_stopping and without beams was written, and `antiphon serve` refused it."""
    notes: list[str] = []
    found = defaults_of(tmp_path, notes, num_beams=17, early_stopping=True, repetition_penalty=1.2)
    assert found == GenerationDefaults(repetition_penalty=1.2)
    assert [note.partition("=")[0] for note in notes] == ["beam_width", "early_stopping"]


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_settings_without_a_counterpart_are_reported(name: str) -> None:
    notes: list[str] = []
    assert generation_defaults({name: [9]}, CONFIG, TEXT, notes) == GenerationDefaults()
    assert len(notes) == 1
    assert notes[0].startswith(f"{name}=[9] of its generation settings is left out")
    for neutral in UNSUPPORTED[name]:
        generation_defaults({name: neutral}, CONFIG, TEXT, notes)
    assert len(notes) == 1


def test_every_setting_of_transformers_is_read_reported_or_known_to_change_no_answer() -> None:
    """A setting that a new version of transformers adds must be sorted here first."""
    transformers = pytest.importorskip("transformers")
    assert set(transformers.GenerationConfig().to_dict()) <= {*UNSUPPORTED, *READ.split(), *WITHOUT_EFFECT.split()}


def test_end_and_start_of_generation_settings_alone_decide() -> None:
    """transformers reads the end token of config.json only without generation_config.json."""
    settings = {"eos_token_id": 2, "bos_token_id": 1, "decoder_start_token_id": 7, "is_encoder_decoder": True}
    notes: list[str] = []
    found = with_start_and_end(settings, {"eos_token_id": 41, "bos_token_id": 0}, notes)
    assert (found["eos_token_id"], found["decoder_start_token_id"]) == (41, 0)
    assert not notes
    assert with_start_and_end(settings, {}, notes)["eos_token_id"] == 2
    assert "never stops" in notes[0]


def test_defaults_of_a_bundle_have_the_ranges_of_the_options() -> None:
    holds = {one.field: one.range.holds for one in SAMPLING_CONTROLS if one.range is not None}
    for name, field in GenerationDefaults.model_fields.items():
        assert name in SamplingParams.__dataclass_fields__
        for bound in field.metadata:
            for inside in filter(None, (getattr(bound, limit, None) for limit in ("ge", "le"))):
                assert name not in holds or holds[name](inside)
            for outside in filter(None, (getattr(bound, "le", None),)):
                assert not holds[name](outside + 1)


SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, hidden_act="silu",
    rms_norm_eps=1e-6, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAMA3: dict[str, Any] = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LENGTH = "original_max_position_embeddings"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(rope_theta=5e5),
        dict(rope_theta=5e5, rope_scaling=None),
        dict(rope_parameters=dict(rope_type="default", rope_theta=3e4)),
        dict(rope_theta=5e5, rope_parameters=dict(rope_type="default")),
        dict(rope_theta=3e4, rope_scaling=dict(type="linear", factor=2)),
        dict(rope_theta=3e4, rope_scaling=dict(rope_type="linear", type="dynamic", factor=2.5)),
        dict(rope_scaling=dict(type="linear", factor=2.0), rope_parameters=dict(rope_type="default", rope_theta=3e4)),
        dict(rope_parameters={**LLAMA3, "rope_theta": 1e2, LENGTH: 64}),
        dict(rope_theta=1e2, rope_scaling={**LLAMA3, LENGTH: 64}),
        {"rope_theta": 1e2, "rope_scaling": {**LLAMA3, LENGTH: 64}, LENGTH: 32},
        {"rope_theta": 1e2, "rope_scaling": LLAMA3},
    ],
    ids=str,
)
def test_rotary_settings_are_read_as_by_transformers(settings: dict[str, Any]) -> None:
    """Each place of a value gives different rates here, for head width 8 and lengths of 32, 64 and 128."""
    config: Any = LlamaConfig.from_dict(copy.deepcopy(SIZES | settings))
    found = LLAMA.configure(SIZES | settings)
    rates = rotary_rates(8, found.rope_theta, found.rope_scaling, torch.device("cpu"))
    torch.testing.assert_close(rates, LlamaRotaryEmbedding(config).inv_freq)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(rope_scaling=dict(type="yarn", factor=2.0)),
            "of type 'yarn'; supported are 'default', 'linear', 'llama3'",
        ),
        (dict(rope_scaling=dict(rope_type=None, type="linear")), "of type None"),
        (dict(rope_scaling=dict(rope_type=["linear"])), r"of type \['linear'\]"),
        (dict(rope_scaling=8.0), "rope_scaling or rope_parameters is 8.0, expected an object"),
        (dict(rope_scaling=dict(type="linear")), r"rope_scaling\.linear\.factor: Field required"),
        (dict(rope_scaling=dict(type="linear", factor="2")), r"rope_scaling\.linear\.factor: .*valid number"),
        (dict(rope_scaling={**LLAMA3, "factor": 0}), r"rope_scaling\.llama3\.factor: .*greater than or equal to 1"),
        (
            dict(rope_scaling={**LLAMA3, "high_freq_factor": 1}),
            r"high_freq_factor=1\.0 must be above low_freq_factor=1",
        ),
        (dict(rope_scaling={**LLAMA3, LENGTH: 64.5}), rf"rope_scaling\.llama3\.{LENGTH}: .*valid integer"),
        (dict(rope_theta=5e5, rope_parameters=dict(rope_theta="many")), "rope_theta: .*valid number"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; only 1.0"),
    ],
    ids=str,
)
def test_unsupported_rotary_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=f"^config.json.*{message}"):
        LLAMA.configure(SIZES | settings)
