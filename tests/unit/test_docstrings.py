"""Docstrings start with a verb or a noun phrase."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("deploy", "model", "service", "tests")
OPENING = re.compile(r"(What|Whatever|Whether|How|Where|Who|Whoever|Which|When|Whose)\b")
KINDS = (ast.AsyncFunctionDef, ast.ClassDef, ast.FunctionDef, ast.Module)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_opens_with_a_question_word(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {docstring.splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, KINDS) and (docstring := ast.get_docstring(node)) and OPENING.match(docstring)
    ]
    assert found == []
