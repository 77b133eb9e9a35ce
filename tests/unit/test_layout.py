"""`make layout` counts what is there. Its figures have no limits."""

from pathlib import Path

import pytest

from tests.layout import ROOT, describe, read_importers, read_modules


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkout with two packages of the namespace `toy_antiphon`, on Python's path."""
    files = {
        "service/toy_antiphon/engine/__init__.py": '"""Engine."""\n',
        "service/toy_antiphon/engine/stream.py": "found = 1\n" * 70,
        "service/toy_antiphon/engine/step.py": "from toy_antiphon.engine import stream\n\nheld = stream.found\n",
        "service/toy_antiphon/rpc/calls/context.py": "def one(each: int) -> int:\n    return each\n",
        "service/toy_antiphon/rpc/calls/__init__.py": "",
        "service/toy_antiphon/rpc/__init__.py": "",
        "service/toy_antiphon/rpc/parsing.py": "from toy_antiphon.engine import step\n",
        "service/toy_antiphon/rpc/status.py": "from toy_antiphon.engine import step\n",
        "protos/toy_antiphon/v1/inference_pb2.py": "given = 1\n",
        "model/toy_antiphon/text/tokenizer.py": "x = 'given'\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    for source in ("service", "model"):
        monkeypatch.syspath_prepend(tmp_path / source)
    return tmp_path


def test_layout_counts_files_importers_and_names(toy: Path) -> None:
    modules = read_modules(toy)
    assert "inference_pb2.py" not in {module.path.name for module in modules}
    importers = read_importers(["toy_antiphon.engine", "toy_antiphon.rpc"])
    assert importers["toy_antiphon.engine.step"] == {"toy_antiphon.rpc.parsing", "toy_antiphon.rpc.status"}
    lines = [line.split() for line in describe(modules, importers).splitlines()]
    assert ["service/toy_antiphon/engine", "3", "1", "74", "50.0%", "72"] in lines
    assert ["service/toy_antiphon/rpc", "5", "2", "4", "100.0%", "3"] in lines
    assert ["all", "9", "3", "79", "83.3%", "75"] in lines
    counts = "one 1, each 2, found 71, given 0, held 1, others 0, further 0"
    assert f"pronouns among names: {counts}".split() in lines
    assert lines[lines.index(["largest", "modules"]) + 1] == ["70", "service/toy_antiphon/engine/stream.py"]
    folders = lines.index(["folders", "of", "one", "or", "two", "modules"])
    assert lines[folders + 1 : folders + 4] == [
        ["1", "model/toy_antiphon/text"],
        ["2", "service/toy_antiphon/engine"],
        ["1", "service/toy_antiphon/rpc/calls"],
    ]
    single = lines.index(["modules", "with", "exactly", "one", "importer:", "1"])
    assert lines[single + 1 :] == [["70", "service/toy_antiphon/engine/stream.py", "<-", "toy_antiphon.engine.step"]]


def test_layout_describes_this_checkout() -> None:
    modules = read_modules(ROOT)
    assert {module.path.parts[0] for module in modules} == {"protos", "service", "model"}
    assert "\nservice/antiphon/engine " in describe(modules, {})
