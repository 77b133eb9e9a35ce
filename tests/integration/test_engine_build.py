"""Build of the compiled engine, on a package of two modules."""

import ast
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import hatch_build

ROOT = Path(hatch_build.__file__).parent
HEADERS = ROOT / "build" / "headers" / "3.13"

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


# Prints the tag of the wheel of a folder, after the steps of its build that need no metadata.
BUILD_WHEEL = """
import sys
from hatch_build import NativeBuildHook

wheel = {"artifacts": [], "force_include": {}}
NativeBuildHook(sys.argv[1], {}, None, None, sys.argv[1], "wheel").initialize("editable", wheel)
print(wheel["tag"])
"""


def build_wheel(root: Path, python: str, flags: str) -> subprocess.CompletedProcess[str]:
    """Build in root for another version of Python, whose headers flags name."""
    settings = {"ANTIPHON_PLATFORM": f"manylinux_2_28_{os.uname().machine}", "ANTIPHON_ENGINE": "compiled"}
    environment = os.environ | settings | {"ANTIPHON_PYTHON": python, "CFLAGS": flags}
    command = [sys.executable, "-c", BUILD_WHEEL, str(root)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not HEADERS.exists(), reason="no headers of Python 3.13: run `make headers`")
def test_engine_is_compiled_for_another_python(root: Path) -> None:
    chosen = 'import sys\n\nif sys.version_info >= (3, 13):\n    name = "of 3.13"\nelse:\n    name = "of 3.12"\n'
    (root / "service" / "antiphon" / "engine" / "one.py").write_text(chosen, encoding="utf-8")
    (root / "service" / "antiphon" / "engine" / "two.py").unlink()
    done = build_wheel(root, "3.13", f"-O0 -I{HEADERS / 'python3.13'} -I{HEADERS}")
    assert done.stdout == f"cp313-cp313-manylinux_2_28_{os.uname().machine}\n", done.stderr
    suffix = f".cpython-313-{os.uname().machine}-linux-gnu.so"
    library = root / "service" / f"antiphon_engine__mypyc{suffix}"
    assert {path.name for path in root.rglob("*.so")} == {library.name, f"one{suffix}"}
    assert b"of 3.13" in library.read_bytes()
    assert b"of 3.12" not in library.read_bytes()
    assert str(ROOT).encode() not in library.read_bytes()


def test_engine_for_another_python_needs_its_headers(root: Path) -> None:
    other = "3.13" if sys.version_info[:2] != (3, 13) else "3.14"
    done = build_wheel(root, other, "-O0")
    assert done.returncode == 1
    assert "Python.h" in done.stderr
    assert not list(root.rglob("*.so"))


def test_no_compiled_module_has_coroutines() -> None:
    """Since Python 3.12 they cause a warning when a call is cancelled: `antiphon.engine.reader`."""
    sources = hatch_build.engine_sources(ROOT)
    assert sources
    nodes = [(path, node) for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    assert not [path for path, node in nodes if isinstance(node, ast.AsyncFunctionDef)]
