"""`antiphon size`: its arithmetic, the component that it wrote, and its errors for invalid input."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from antiphon.bundle.manifest import load_bundle
from antiphon.cli.main import main
from antiphon.domain.limits import EngineLimits
from antiphon.server.models.memory import need_of
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.server.workers.division import suggested_workers
from tests.deploy.manifests import kubectl
from tests.deploy.tools import ROOT
from tests.manifests import edit_manifest

pytestmark = pytest.mark.programs

COMPONENT = ROOT / "deploy" / "components" / "cpu" / "kustomization.yaml"


def test_size_writes_the_shipped_component(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command in the file, run again in the root, writes the same file."""
    monkeypatch.chdir(ROOT)
    shipped = COMPONENT.read_text(encoding="utf-8")
    (line,) = [line for line in shipped.splitlines() if line.startswith("#   antiphon size")]
    words = shlex.split(line.removeprefix("#   antiphon "))
    assert words[-2:] == ["--kustomize", str(COMPONENT.relative_to(ROOT))]
    assert main([*words[:-1], "-"]) == 0
    assert capsys.readouterr().out == shipped.replace(words[-1], "-")


def test_sized_component_sets_resources_and_settings_of_the_base(tmp_path: Path) -> None:
    """Rendered over the base, its numbers are in the Deployment and in the settings."""
    root = tmp_path / "deploy"
    (root / "overlay").mkdir(parents=True)
    for name in ("base", "components"):
        (root / name).symlink_to(ROOT / "deploy" / name)
    text = yaml.safe_dump({"resources": ["../base"], "components": ["../components/cpu"]})
    (root / "overlay" / "kustomization.yaml").write_text(text, encoding="utf-8")
    command = [kubectl(), "kustomize", "--load-restrictor=LoadRestrictionsNone", str(root / "overlay")]
    rendered = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    objects = {found["kind"]: found for found in yaml.safe_load_all(rendered)}
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    patch = yaml.safe_load(yaml.safe_load(COMPONENT.read_text(encoding="utf-8"))["patches"][0]["patch"])
    (sized,) = patch["spec"]["template"]["spec"]["containers"]
    for kind in ("requests", "limits"):
        assert sized["resources"][kind].items() <= container["resources"][kind].items()
    assert objects["ConfigMap"]["data"]["ANTIPHON_KV_CACHE_BLOCKS"] == "2048"


LOAD = {"highest_rate": 100.0, "runs": [{"objective": {"ttft_s": None, "e2e_s": 0.25, "met": True}}]}


def _sized(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["size", "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("rate", "spare", "zones"),
    [(1, 0, 1), (70, 0, 1), (71, 0, 1), (700, 2, 1), (699, 1, 3), (10_000, 1, 3), (70, 5, 2)],
)
def test_number_of_replicas_is_the_least_that_sustains_the_rate_after_a_loss(
    rate: int, spare: int, zones: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _sized(capsys, "--rate", str(rate), "--requests-per-s", "100", "--spare", str(spare), "--zones", str(zones))
    planned, needed = found["replicas"], found["replicas_needed"]
    assert 70 * needed >= rate > 70 * (needed - 1)
    assert planned % zones == 0
    left = planned - (planned // zones if zones > 1 else spare)
    assert left >= needed
    assert planned >= needed + spare
    assert left == needed or zones > 1


def test_cache_size_follows_the_given_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks have 16 tokens, the begin token is part of a target, and one sequence of maximum length always fits."""
    shorter = _sized(capsys, "--workers", "1", "--source-tokens", "32", "--target-tokens", "47")
    longest = _sized(capsys, "--workers", "1")
    assert shorter["settings"]["kv_cache_blocks"] == 64 * (2 + 3)
    assert longest["settings"]["kv_cache_blocks"] == 64 * 32
    assert _sized(capsys, "--source-tokens", "1", "--max-num-seqs", "1")["settings"]["kv_cache_blocks"] == 32
    spared = (longest["settings"]["kv_cache_blocks"] - shorter["settings"]["kv_cache_blocks"]) * 32_768
    assert abs(longest["memory_limit_bytes"] - shorter["memory_limit_bytes"] - 1.1 * spared) <= 2 << 24


def test_workers_share_the_weights_and_have_everything_else_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    alone, four = (_sized(capsys, "--cores", "8", "--workers", number) for number in ("1", "4"))
    one = {term["name"]: term["bytes"] for term in alone["memory_terms"]}
    all_of_them = {term["name"]: term["bytes"] for term in four["memory_terms"]}
    assert all_of_them.pop("weights") == one.pop("weights")
    assert all_of_them.pop("supervisor") > 0
    for name in one.keys() - {"headroom"}:
        assert all_of_them[name] == 4 * one[name]
    assert (alone["settings"]["workers"], alone["settings"]["threads"]) == (1, 8)
    assert (four["settings"]["workers"], four["settings"]["threads"]) == (4, 2)
    suggested = _sized(capsys, "--cores", "8")
    assert suggested["settings"]["workers"] == suggested_workers(one_bundle_bytes(), 8)


def one_bundle_bytes() -> int:
    bundle = load_bundle(SHIPPED_BUNDLE)
    return need_of(bundle, bundle.graph_set(), EngineLimits()).memory.weight_bytes


def test_rate_of_a_replica_is_read_from_a_load_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "load.json"
    path.write_text(json.dumps(LOAD), encoding="utf-8")
    assert main(["size", "--rate", "70", "--load-result", str(path), "--spare", "0"]) == 0
    printed = capsys.readouterr().out
    assert "load.json: highest rate with p99 of the whole answer <= 250 ms" in printed
    assert "ceil(70 / (100.0 x 0.7))" in printed


def test_terms_add_up_and_have_their_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    found = _sized(capsys)
    total = sum(term["bytes"] for term in found["memory_terms"])
    assert 0 <= found["memory_limit_bytes"] - total < 16 << 20
    assert found["memory_limit_bytes"] == int(found["resources"]["memory"].removesuffix("Mi")) << 20
    assert all(term["formula"] for term in found["memory_terms"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rate", "0"], "--rate: '0'; it must be a number above 0"),
        (["--rate", "nan", "--requests-per-s", "1"], "--rate: 'nan'; it must be"),
        (["--utilisation", "1.5"], "--utilisation: '1.5'; it must be a number above 0 and at most 1"),
        (["--max-num-seqs", "5000"], "--max-num-seqs: '5000'; it must be a whole number from 1 to 4,096"),
        (["--zones", "x"], "--zones: 'x'; it must be a whole number from 1 to 100"),
        (["--rate", "10"], "--rate needs the rate that one replica sustains: --requests-per-s, or --load-result"),
        (["--rate", "10", "--load-result", "/no/such"], "--load-result /no/such cannot be read"),
        (["/no/such"], "/no/such is not a bundle"),
        (["--kustomize", "/no/such/file.yaml"], "--kustomize /no/such/file.yaml cannot be written"),
    ],
)
def test_wrong_input_exits_with_2_and_is_named(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["size", *flags])
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "{}", '{"highest_rate": 0}', '{"highest_rate": "many"}', "{"])
def test_load_result_without_rate_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "load.json"
    path.write_text(content, encoding="utf-8")
    assert main(["size", "--rate", "10", "--load-result", str(path)]) == 2
    assert f"--load-result {path}" in capsys.readouterr().err


def test_bundle_without_a_profile_is_refused_with_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(SHIPPED_BUNDLE, bundle)
    edit_manifest(bundle, lambda manifest: manifest.pop("memory"))
    assert main(["size", str(bundle)]) == 2
    assert f"antiphon profile {bundle}" in capsys.readouterr().err
