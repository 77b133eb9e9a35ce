"""Parts of packages that the image omits: a server never imports them, and the lists match the installed packages."""

import importlib.metadata
import importlib.util
import re
import signal
import sys
from pathlib import Path

import pytest

from antiphon.client import Client
from tests.deploy.tools import ROOT
from tests.integration import process

pytestmark = pytest.mark.programs

PRUNED = (ROOT / "deploy" / "prune.txt").read_text().split()
# Runs in place of `-m antiphon.cli`: an import of one of the names raises ModuleNotFoundError.
WITHOUT = (
    "import sys; sys.modules.update(dict.fromkeys({names!r})); from antiphon.cli.main import main; sys.exit(main())"
)


def locked(name: str) -> dict[str, str]:
    """Return the packages of a lock, with their versions and markers."""
    text = (ROOT / "requirements" / name).read_text()
    return {found[1]: found[2] for found in re.finditer(r"^([a-z][\w.-]*)(==.*?) *\\$", text, re.MULTILINE)}


def left_out() -> set[str]:
    """Return modules of required packages that the image does not install, and pruned modules."""
    absent = locked("serve.lock").keys() - locked("image.lock").keys()
    assert "huggingface-hub" in absent
    by_module = importlib.metadata.packages_distributions()
    modules = {
        module
        for module, owners in by_module.items()
        if {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} <= absent
    }
    return modules | {path.replace("/", ".") for path in PRUNED if not path.endswith("include")}


def test_serve_answers_without_the_parts_that_the_image_omits(monkeypatch: pytest.MonkeyPatch) -> None:
    names = sorted(left_out())
    assert {"huggingface_hub", "yaml", "onnxruntime.tools", "numpy.testing"} <= set(names)
    monkeypatch.setattr(process, "ANTIPHON", (sys.executable, "-c", WITHOUT.format(names=names)))
    with process.ServerProcess(None, ("--load-reports", "on")) as server:
        with Client(server.target) as client:
            assert client.generate_text("How are you?").text
        assert server.metrics()
        server.process.send_signal(signal.SIGTERM)
        code, errors = server.finish()
    assert (code, "Traceback" in errors) == (0, False), errors


@pytest.mark.parametrize("path", PRUNED)
def test_pruned_paths_exist(path: str) -> None:
    top, _, rest = path.partition("/")
    spec = importlib.util.find_spec(top)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    assert any((Path(place) / rest).exists() for place in spec.submodule_search_locations)


def test_image_locks_agree_with_the_test_lock() -> None:
    tested = locked("test.lock")
    assert locked("image.lock").items() <= tested.items()
    dist = locked("dist.lock")
    common = dist.keys() & tested.keys()
    assert {name: dist[name].split()[0] for name in common} == {name: tested[name].split()[0] for name in common}


def test_cuda_lock_differs_only_in_onnxruntime() -> None:
    cpu, cuda = locked("image.lock"), locked("image-cuda.lock")
    assert cuda.pop("onnxruntime-gpu") == cpu.pop("onnxruntime")
    assert {name: version for name, version in cuda.items() if not name.startswith("nvidia-")} == cpu
