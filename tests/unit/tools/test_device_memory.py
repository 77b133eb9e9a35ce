"""`antiphon size --device cuda`: the memory of a GPU, compared with the files and the pool that a runner allocates."""

import json
from pathlib import Path

import pytest

from antiphon.bundle.manifest import Bundle
from antiphon.cli import main as cli
from antiphon.export.export import export_bundle
from antiphon.ops.cache_geometry import cuda_pool_axes
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.parity.exports import small_config, write_checkpoint


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("sized")
    checkpoint = write_checkpoint(folder / "checkpoint", small_config(head_dim=16))
    return export_bundle(checkpoint, folder / "bundle", precisions=("bfloat16",), lowerings=("cuda",), explain=False)


def test_size_counts_weights_and_blocks_of_a_gpu(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["size", str(bundle.path), "--device", "cuda", "--max-num-seqs", "8", "--source-tokens", "32"]
    assert cli.main([*arguments, "--json"]) == 0
    sized = json.loads(capsys.readouterr().out)
    pool = 2
    for axis in cuda_pool_axes(bundle.manifest.model):
        pool *= axis
    assert sized["block_bytes"] == pool
    assert sized["cache_blocks"] == 8 * (2 + 2)  # 32 source and 24 target tokens
    files = sum(path.stat().st_size for path in Path(bundle.path).iterdir() if "cuda" in path.name)
    assert sized["weight_bytes"] == files
    assert sized["total_bytes"] == files + sized["cache_blocks"] * pool
    assert cli.main(arguments) == 0
    assert f"{files:,} bytes" in capsys.readouterr().out


def test_size_refuses_what_a_gpu_cannot_have(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["size", str(SHIPPED_BUNDLE), "--device", "cuda"]) == 2
    assert "no cuda graphs" in capsys.readouterr().err
    assert cli.main(["size", str(bundle.path), "--device", "cuda", "--rate", "5"]) == 2
    assert "leave out --rate and --kustomize" in capsys.readouterr().err
