"""A device of the stand-in for CUDA, and a small bundle with graphs for both the processor and a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from antiphon.bundle.manifest import Bundle, Lowering, Precision, load_bundle
from antiphon.export.export import export_bundle
from antiphon.ops.cuda.driver import CudaDevice
from tests.cuda.standin.device import StandIn
from tests.kept_models import kept_model
from tests.parity.exports import small_config, write_checkpoint

# The smallest that has every kernel of an encoder-decoder, because the interpreter runs each program in milliseconds.
SMALL: dict[str, object] = dict(
    d_model=32, encoder_layers=1, decoder_layers=1, num_heads=2, d_ff=32, max_source_len=40, max_target_len=40
)


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    """Load the stand-in, once for the process: libraries cannot be loaded again."""
    return StandIn(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="session")
def device(standin: StandIn) -> CudaDevice:
    opened = CudaDevice()
    opened.load_kernels(standin.kernels)
    return opened


@pytest.fixture(scope="session")
def bundle(request: pytest.FixtureRequest) -> Bundle:
    """Export a model whose decoder has attention, or what the test names."""
    name = getattr(request, "param", "attention")
    described = {"decoder_self": name, "output_bias": name == "ssru"}
    return load_bundle(kept_model(f"cuda-{name}", lambda folder: export_small(folder, described)) / "bundle")


def export_small(
    path: Path, overrides: dict[str, object], lowerings: Sequence[Lowering] = ("native", "cuda")
) -> Bundle:
    """Export a small random model: native graphs at float32, cuda graphs at float32 and bfloat16."""
    checkpoint = write_checkpoint(path / "checkpoint", small_config(**{**SMALL, **overrides}))
    precisions: tuple[Precision, ...] = ("float32", "bfloat16") if "cuda" in lowerings else ("float32",)
    return export_bundle(checkpoint, path / "bundle", precisions=precisions, lowerings=lowerings, explain=False)
