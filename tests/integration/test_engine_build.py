"""Build of the compiled engine, on a package of two modules."""

import ast
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import hatch_build

pytestmark = [
    pytest.mark.combinations,
    pytest.mark.skipif(not (Path(sysconfig.get_path("include")) / "Python.h").exists(), reason="no headers of Python"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    engine = tmp_path / "service" / "antiphon" / "engine"
    engine.mkdir(parents=True)
    (engine / "__init__.py").touch()
    (engine / "one.py").write_text("def answer(count: int) -> int:\n    return 2 * count\n", encoding="utf-8")
    (engine / "two.py").write_text(
        "from antiphon.engine.one import answer\n\ntotal: int = answer(21)\n", encoding="utf-8"
    )
    return tmp_path


def compiled(root: Path) -> set[str]:
    return {path.name.split(".")[0] for path in (root / "service" / "antiphon" / "engine").rglob("*.so")}


def imported(root: Path) -> list[str]:
    """Return the total of module two, and the end of its file's name, in a new interpreter."""
    code = "from antiphon.engine import two; print(two.total, two.__file__.rsplit('.', 1)[1])"
    environment = os.environ | {"PYTHONPATH": str(root / "service")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_engine_is_compiled_once_and_again_after_a_change(root: Path) -> None:
    library = hatch_build.compile_engine(root)
    assert library is not None
    assert compiled(root) == {"one", "two"}
    assert imported(root) == ["42", "so"]
    built_ns = library.stat().st_mtime_ns
    assert hatch_build.compile_engine(root) == library
    assert library.stat().st_mtime_ns == built_ns
    of_another_python = library.with_name("antiphon_engine__mypyc.cpython-99-x86_64-linux-gnu.so")
    of_another_python.touch()
    (root / "service" / "antiphon" / "engine" / "two.py").unlink()
    assert hatch_build.compile_engine(root) == library
    assert compiled(root) == {"one"}
    assert of_another_python.exists()


def test_sources_run_where_the_engine_cannot_be_compiled(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "false")
    assert hatch_build.compile_engine(root) is None
    assert "the engine is not compiled" in capfd.readouterr().err
    assert compiled(root) == set()
    assert imported(root) == ["42", "py"]


def test_no_compiled_module_has_coroutines() -> None:
    """Since Python 3.12 they cause a warning when a call is cancelled: `antiphon.engine.reader`."""
    sources = hatch_build.engine_sources(Path(hatch_build.__file__).parent)
    assert sources
    nodes = [(path, node) for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    assert not [path for path, node in nodes if isinstance(node, ast.AsyncFunctionDef)]
