"""The command `antiphon memory`: its page, its JSON and its errors."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from antiphon.architecture.config import preset
from antiphon.lab.memory import command
from antiphon.ops.cache_geometry import blocks_for, pool_axes

pytestmark = pytest.mark.training

BUNDLE = Path(__file__).parents[3] / "model" / "antiphon" / "bundles" / "en-de"


def run_memory(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(flags))


def read(path: Path) -> dict[str, object]:
    page: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return page


def rows_of(path: Path) -> list[dict[str, object]]:
    rows = read(path)["rows"]
    assert isinstance(rows, list)
    return rows


def test_training_page_has_each_option_with_its_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_memory("tiny", "--length", "24", "--batch", "2", "--train", "--json", str(tmp_path / "page.json")) == 0
    rows = rows_of(tmp_path / "page.json")
    assert len({(row["backend"], row["checkpointing"], row["bf16"]) for row in rows}) == 8
    assert all(isinstance(row["error"], float) and abs(row["error"]) < 0.1 for row in rows)
    assert read(tmp_path / "page.json")["native"] is None
    output = capsys.readouterr().out
    assert "attention matrices" in output
    assert "256 MiB" in output


def test_translation_page_of_a_bundle_has_its_native_graphs(tmp_path: Path) -> None:
    flags = ("--length", "32", "--memory", "1GiB", "--json", str(tmp_path / "page.json"))
    assert run_memory(str(BUNDLE), *flags) == 0
    page = read(tmp_path / "page.json")
    native = page["native"]
    assert isinstance(native, list)
    for term in native:
        assert term["num_bytes"] == pytest.approx(term["measured_bytes"], rel=0.1)
    assert page["memory_bytes"] == 1 << 30
    lengths = page["longest"]
    assert isinstance(lengths, list)
    assert lengths[0] < lengths[2], "fused attention fits longer texts"


def test_caches_of_a_preset_have_the_type_that_export_gives_them(tmp_path: Path) -> None:
    """Regression: float32 graphs have caches of float32, unless --cache-type says otherwise; float16 was assumed."""
    config = preset("tiny")
    assert (
        run_memory("tiny", "--length", "40", "--batch", "3", "--no-measure", "--json", str(tmp_path / "page.json")) == 0
    )
    native = read(tmp_path / "page.json")["native"]
    assert isinstance(native, list)
    (blocks,) = (term["num_bytes"] for term in native if term["name"].startswith("cache blocks"))
    block = np.zeros(pool_axes(config), "float32").nbytes
    assert blocks == 2 * 3 * blocks_for(40) * block


def test_page_of_a_checkpoint_equals_that_of_its_preset(tmp_path: Path) -> None:
    config = preset("tiny")
    (tmp_path / "run").mkdir()
    described = {"version": 1, "model": config.model_dump()}
    (tmp_path / "run" / "config.json").write_text(json.dumps(described), encoding="utf-8")
    for name, model in (("checkpoint", str(tmp_path / "run")), ("preset", "tiny")):
        assert run_memory(model, "--length", "16", "--no-measure", "--json", str(tmp_path / f"{name}.json")) == 0
    assert rows_of(tmp_path / "checkpoint.json") == rows_of(tmp_path / "preset.json")


def test_page_is_not_measured_beyond_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "available_bytes", lambda: 1 << 10)
    assert run_memory("tiny", "--length", "16", "--json", str(tmp_path / "page.json")) == 0
    assert {row["measured_bytes"] for row in rows_of(tmp_path / "page.json")} == {None}
    assert "not measured" in capsys.readouterr().out


def test_time_adds_seconds_of_a_step(tmp_path: Path) -> None:
    assert run_memory("tiny", "--length", "8", "--train", "--time", "--json", str(tmp_path / "page.json")) == 0
    assert all(isinstance(row["seconds"], float) for row in rows_of(tmp_path / "page.json"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("tiny", "--length", "0"), "--length is 0; it must be from 1 to 1048576"),
        (("tiny", "--length", "8", "--batch", "5000"), "--batch is 5000; it must be from 1 to 4096"),
        (("huge", "--length", "8"), "preset='huge' is unknown; choose from base, big, nllb, tiny"),
        (("tiny", "--length", "8", "--memory", "16"), "--memory is '16'; it must be a number above 0 and one of KiB"),
        (("tiny", "--length", "8", "--time"), "--time needs --train"),
        (("tiny", "--length", "8", "--json", "missing/page.json"), "--json is missing/page.json, but there is no"),
    ],
)
def test_wrong_flag_is_named(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_memory(*flags) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_directory_without_a_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_memory(str(tmp_path), "--length", "8") == 2
    assert "is not a checkpoint: config.json is missing" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "size"), [("16GiB", 16 << 30), ("1.5 GB", 1_500_000_000), ("64MiB", 64 << 20)])
def test_sizes_have_binary_and_decimal_units(text: str, size: int) -> None:
    assert command.parse_size(text) == size
