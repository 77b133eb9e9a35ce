"""Every control is a flag of the same name, and refusals name flags."""

import argparse
import dataclasses

import pytest

from antiphon.cli.generate import add_option_flags, in_terms_of_flags, is_about_option, read_option_flags
from antiphon.client import Options


def parsed(*arguments: str) -> Options:
    parser = argparse.ArgumentParser()
    add_option_flags(parser)
    return read_option_flags(parser.parse_args(arguments))


def test_every_option_has_a_flag_of_its_name() -> None:
    parser = argparse.ArgumentParser()
    add_option_flags(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Options)} <= flags


def test_absent_flags_are_none() -> None:
    assert parsed() == Options()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--beam-width 4 --num-return-sequences 2", Options(beam_width=4, num_return_sequences=2)),
        ("--length-penalty -1.5 --early-stopping first", Options(length_penalty=-1.5, early_stopping="first")),
        ("--logit-bias 17=-2.5 --logit-bias 4=1e3", Options(logit_bias={17: -2.5, 4: 1000.0})),
        ("--suppressed-ids 5,17 --suppressed-ids 9", Options(suppressed_ids=[5, 17, 9])),
        ("--stop-strings . --stop-strings ,", Options(stop_strings=[".", ","])),
        ("--stop-ids 5 --allowed-ids 6 --prefix-ids 7,8", Options(stop_ids=[5], allowed_ids=[6], prefix_ids=[7, 8])),
        ("--ignore-eos --num-logprobs 0 --seed 0", Options(ignore_eos=True, num_logprobs=0, seed=0)),
        ("--time-limit-millis 250 --min-p 0.1", Options(time_limit_millis=250, min_p=0.1)),
    ],
)
def test_flags_become_options(arguments: str, expected: Options) -> None:
    assert parsed(*arguments.split()) == expected


@pytest.mark.parametrize(
    "arguments",
    ["--beam-width four", "--logit-bias 5", "--logit-bias x=1", "--stop-ids 5,,6", "--early-stopping sometimes"],
)
def test_flags_of_another_kind_end_the_command_with_2(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(*arguments.split())
    assert caught.value.code == 2
    assert arguments.split()[0] in capsys.readouterr().err


def test_refusals_of_options_name_flags() -> None:
    refusal = "options.top_p is 2.0; it must be above 0 and at most 1"
    assert is_about_option(refusal)
    assert in_terms_of_flags(refusal) == "--top-p is 2.0; it must be above 0 and at most 1"
    unknown = "target_language is 'xx'; it must be one of de, en"
    assert is_about_option(unknown)
    assert in_terms_of_flags(unknown) == "--target-language is 'xx'; it must be one of de, en"
    assert not is_about_option("text is 'options.top_p'")
    assert in_terms_of_flags("text is 'options.top_p'") == "text is 'options.top_p'"
