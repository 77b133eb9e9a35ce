"""The command: help of every subcommand, imports only for the chosen one, and messages for missing packages."""

from __future__ import annotations

import importlib.util
import re

import pytest

from antiphon.cli import main as cli


@pytest.mark.parametrize("name", cli.SUBCOMMANDS)
def test_main_lists_every_subcommand_in_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    assert re.search(rf"^    {name}\s", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("name", cli.SUBCOMMANDS)
def test_main_shows_examples_in_each_subcommands_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec(cli.SUBCOMMANDS[name].module) is None:
        pytest.skip(f"{cli.SUBCOMMANDS[name].module} is not here")
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: antiphon {name}" in text
    assert f"  antiphon {name} " in text


def test_main_prints_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("antiphon ")


@pytest.mark.parametrize("arguments", [[], ["sing"], ["generate", "--no-such-flag"]])
def test_main_exits_with_2_when_the_command_line_is_wrong(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: antiphon" in capsys.readouterr().err


def test_main_names_the_extra_when_a_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(subcommand: cli.Subcommand) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli, "load", absent)
    assert cli.main(["train", "x.toml"]) == 2
    assert capsys.readouterr().err == "antiphon train: torch is not installed; run: pip install 'antiphon[train]'\n"
