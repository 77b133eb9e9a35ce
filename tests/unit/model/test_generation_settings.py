"""Conversion of generation_config.json to a bundle's defaults; tests/parity compares beam search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.controls.table import SAMPLING_CONTROLS
from antiphon.model.bundle.manifest import GenerationDefaults
from antiphon.model.config import preset
from antiphon.model.importer.generation_settings import generation_defaults
from antiphon.model.text.format import TextFormat
from antiphon.service.domain.request import SamplingParams

CONFIG = preset("tiny")  # 96 tokens, at most 64 of a target
TEXT = TextFormat(template=("$text", 2), languages={"en_XX": 9})


def defaults_of(folder: Path, **stated: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps({"transformers_version": "5.23.0", **stated}))
    return generation_defaults(folder, {}, CONFIG, TEXT)


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
        ({"bad_words_ids": [[3], [4, 5]], "suppress_tokens": [8, 2, 500]}, {"suppressed_ids": (3, 8)}),
        ({"eos_token_id": [2, 41, 40, 41, 960]}, {"stop_ids": (41, 40)}),  # 2 is the end token, 960 is not a token
        ({"eos_token_id": 2}, {}),
        ({"forced_bos_token_id": 9}, {}),  # a language
        ({"forced_bos_token_id": 7}, {"forced_first_id": 7}),
    ],
)
def test_settings_become_generation_defaults(stated: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    assert defaults_of(tmp_path, **stated) == GenerationDefaults(**expected)


def test_an_old_checkpoint_has_its_settings_in_config_json(tmp_path: Path) -> None:
    found = generation_defaults(tmp_path, {"num_beams": 6, "max_length": 20, "d_model": 8}, CONFIG, TEXT)
    assert found == GenerationDefaults(beam_width=6, max_new_tokens=19)


def test_invalid_settings_are_left_out_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"num_beams": 40, "repetition_penalty": 1.2}))
    assert generation_defaults(tmp_path, {}, CONFIG, TEXT) == GenerationDefaults(repetition_penalty=1.2)
    assert "beam_width of its generation settings is left out" in capsys.readouterr().err


def test_a_bundles_defaults_have_the_ranges_of_the_options() -> None:
    holds = {one.field: one.range.holds for one in SAMPLING_CONTROLS if one.range is not None}
    for name, field in GenerationDefaults.model_fields.items():
        assert name in SamplingParams.__dataclass_fields__
        for bound in field.metadata:
            for inside in filter(None, (getattr(bound, limit, None) for limit in ("ge", "le"))):
                assert name not in holds or holds[name](inside)
            for outside in filter(None, (getattr(bound, "le", None),)):
                assert not holds[name](outside + 1)
