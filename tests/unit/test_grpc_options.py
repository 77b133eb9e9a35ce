"""Options of gRPC channels and servers in code and documents, looked up in the installed library.

gRPC ignores an option that it does not know.
"""

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("deploy", "docs", "model", "service", "tests")
SUFFIXES = (".md", ".py", ".yaml")
NAME = r"grpc(?:\.[a-z0-9_]+)+"
IN_DOCUMENT = re.compile(rf"[`\"']({NAME})[`\"']")
# Packages of protocols and modules, which documents name too.
NO_OPTIONS = {"grpc.channelz.v1", "grpc.experimental.gevent", "grpc.health.v1"}


def options(path: Path) -> set[str]:
    """Return the names that look like options: of a Python file among its strings, of another file in quotes."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return set(IN_DOCUMENT.findall(text)) - NO_OPTIONS
    if "grpc." not in text:
        return set()
    constants = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    return {value for value in constants if isinstance(value, str) and re.fullmatch(NAME, value)} - NO_OPTIONS


def test_grpc_knows_every_option() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    names = set[str]().union(*(options(path) for path in paths if "_pb2" not in path.name))
    assert "grpc.keepalive_time_ms" in names
    library = Path(str(importlib.import_module("grpc._cython.cygrpc").__file__)).read_bytes()
    assert not sorted(name for name in names if name.encode() + b"\0" not in library)
