"""Documents compared with the code: links, headings, paths, commands, options, targets and modules exist."""

import argparse
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from antiphon.cli.main import SUBCOMMANDS, load

ROOT = Path(__file__).parents[2]
FOLDERS = ("deploy", "docs", "model", "protos", "service", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.md"))])
LINK = re.compile(r"\]\((?!https?://)([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"^    (?:\$ )?((?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?antiphon (?:\\\n|.)*)$", re.M)
CODE = re.compile(r"(?s:^```\w*\n.*?^```$)|^    .*$|`[^`\n]+`", re.M)
TARGETS = re.compile(r"(?<![\w-])make((?: [a-z][a-z-]*)+)")
MODULE = re.compile(r"python3? -m ([a-zA-Z_][\w.]*)")
COMMAND = re.compile(r"^\s*(?:[A-Z_]+=\S* )*(?:\S*/)?antiphon (?P<subcommand>[a-z][a-z-]*)(?P<rest>.*)$")
END = re.compile(r"\s#|\s[|;&]")
OPTION = re.compile(r"(?<=\s)--[a-z][a-z0-9-]*")
PATH = re.compile(r"`((?:deploy|model|protos|service|tests)/[\w./-]+)`")
# Paths of the reader's files.
EXAMPLES = {"model/antiphon/checkpoints/families/NAME.py", "model/antiphon/ops/operators/NAME.py"}
# They describe the past: they may name former files.
HISTORY = ("CHANGELOG.md", "decisions")
PRESENT = [document for document in DOCUMENTS if not set(HISTORY) & set(document.relative_to(ROOT).parts)]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_of_documents_have_targets(document: Path) -> None:
    lost = [link for link in LINK.findall(_prose(document.read_text(encoding="utf-8"))) if not _leads(document, link)]
    assert not lost


def _prose(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def _leads(document: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (document.parent / path).resolve() if path else document
    return target.exists() and (not anchor or anchor in _anchors(target))


@cache
def _anchors(document: Path) -> frozenset[str]:
    """Return the headings of a document as in links: lower case, words joined by hyphens, without punctuation."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text(encoding="utf-8")), re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("document", PRESENT, ids=_name)
def test_paths_of_documents_exist(document: Path) -> None:
    paths = set(PATH.findall(document.read_text(encoding="utf-8"))) - EXAMPLES
    assert not sorted(path for path in paths if not (ROOT / path).exists())


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_commands_in_documents_exist_with_their_options(document: Path) -> None:
    for subcommand, options in _commands(document.read_text(encoding="utf-8")):
        assert subcommand in SUBCOMMANDS
        assert options <= _options(subcommand), subcommand


@pytest.mark.parametrize("document", PRESENT, ids=_name)
def test_targets_and_modules_of_documents_exist(document: Path) -> None:
    code = "\n".join(CODE.findall(document.read_text(encoding="utf-8")))
    assert {target for targets in TARGETS.findall(code) for target in targets.split()} <= _targets()
    modules = set(MODULE.findall(code))
    assert not sorted(module for module in modules if importlib.util.find_spec(module) is None)


@cache
def _targets() -> frozenset[str]:
    """Return the targets of the Makefile that are commands."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, re.M))


def test_commands_are_found() -> None:
    assert sum(1 for document in DOCUMENTS for _ in _commands(document.read_text(encoding="utf-8"))) > 60
    assert "--rate" not in _options("serve")


def _commands(text: str) -> Iterator[tuple[str, set[str]]]:
    """Return subcommand and options of each `antiphon SUBCOMMAND ...` in a shell block or an indented line."""
    blocks = [body for language, body in FENCE.findall(text) if language in ("sh", "bash")]
    for line in "\n".join([*blocks, *INDENTED.findall(text)]).replace("\\\n", " ").splitlines():
        if found := COMMAND.search(END.split(line)[0]):
            yield found["subcommand"], set(OPTION.findall(found["rest"]))


@cache
def _options(subcommand: str) -> frozenset[str]:
    parser = argparse.ArgumentParser()
    load(SUBCOMMANDS[subcommand]).add_arguments(parser)
    return frozenset(_all_options(parser))


def _all_options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _all_options(inner)


OPENING = re.compile(
    r'^\s*[rR]?"""\s*(?:What|Whatever|Whether|How|Where|Who|Whoever|Which|When|Whose)\b.*', re.MULTILINE
)


@pytest.mark.parametrize("folder", ["deploy", "model", "service", "tests"])
def test_no_docstring_opens_with_a_question_word(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert not {str(path.relative_to(ROOT)): found for path in paths if (found := OPENING.findall(path.read_text()))}
