"""A GPU behind gRPC, on the stand-in for CUDA: what clients receive, compared with the processor's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from antiphon.bundle.manifest import Bundle
from antiphon.client import Generation, Options
from antiphon.observability.metrics import MetricFamilies
from antiphon.ops.cuda.driver import CudaDevice
from antiphon.rpc.v1.models import LoadedModel
from antiphon.rpc.v1.streaming import Pacing
from antiphon.server.models.loading import SharedResources, StartupError, load
from antiphon.server.models.memory import MemoryBudget
from antiphon.server.settings import ServerConfig
from antiphon.v1 import inference_pb2 as pb
from tests.bundle_serving import serving_bundle
from tests.cuda.conftest import export_small

SETTINGS: dict[str, Any] = dict(precision="float32", max_num_seqs=2)
TEXTS = ("the small word", "number 7 is here")
CONTROLS = {
    "greedy": Options(max_new_tokens=5, num_logprobs=2),
    "samples": Options(max_new_tokens=4, temperature=0.9, top_k=30, top_p=0.95, seed=5, num_return_sequences=2),
    "beams": Options(max_new_tokens=4, beam_width=2, num_return_sequences=2),
    "processors": Options(max_new_tokens=4, repetition_penalty=1.5, no_repeat_ngram_size=2, logit_bias={30: 4.0}),
    "prefix": Options(max_new_tokens=3, prefix_text="here"),
}


async def answers(bundle: Bundle, options: Options, device: CudaDevice | None) -> list[list[Generation]]:
    async with serving_bundle(bundle.path, device=device, **SETTINGS) as served:
        return [await served.client.generate_outputs(text, options) for text in TEXTS]


@pytest.mark.parametrize(
    ("bundle", "name"),
    [*(("attention", name) for name in CONTROLS), ("ssru", "beams"), ("ssru", "prefix"), ("average", "samples")],
    indirect=["bundle"],
)
async def test_answers_equal_those_of_the_processor(bundle: Bundle, device: CudaDevice, name: str) -> None:
    ours = await answers(bundle, CONTROLS[name], device)
    reference = await answers(bundle, CONTROLS[name], None)
    for outputs, expected in zip(ours, reference, strict=True):
        assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
        assert [one.text for one in outputs] == [one.text for one in expected]


async def test_a_model_reports_its_device_and_precision(bundle: Bundle, device: CudaDevice) -> None:
    async with serving_bundle(bundle.path, device=device, max_num_seqs=1) as served:
        model = await served.client.get_model()
    assert (model.device, model.precision) == (pb.DEVICE_CUDA, pb.PRECISION_BFLOAT16)
    async with serving_bundle(bundle.path, max_num_seqs=1) as served:
        model = await served.client.get_model()
    assert (model.device, model.precision) == (pb.DEVICE_CPU, pb.PRECISION_FLOAT32)


async def test_a_cancelled_stream_frees_its_row_and_blocks(bundle: Bundle, device: CudaDevice) -> None:
    async with serving_bundle(bundle.path, device=device, precision="float32", max_num_seqs=1) as served:
        stream = served.client.generate("the small word", Options(max_new_tokens=30, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()
        # There is one row, so this answer comes only once the cancelled request has left it.
        await served.client.generate_text("number 7", Options(max_new_tokens=2))


def load_with(
    bundle: Bundle,
    device: CudaDevice,
    *,
    needs_device: bool,
    registry: CollectorRegistry | None = None,
    **settings: Any,
) -> LoadedModel:
    config = ServerConfig(bundle=bundle.path, threads=1, max_num_seqs=1, **settings)
    shared = SharedResources(
        families=MetricFamilies(registry or CollectorRegistry()),
        pacing=Pacing(1e6),
        budget=MemoryBudget(None),
        device=device,
        needs_device=needs_device,
    )
    return load(config.plans[0], shared)


def test_a_bundle_without_cuda_graphs_is_refused_or_runs_on_the_processor(tmp_path: Path, device: CudaDevice) -> None:
    bundle = export_small(tmp_path, {}, lowerings=("native",))
    with pytest.raises(StartupError, match="no cuda graphs; the bundle holds native-float32"):
        load_with(bundle, device, needs_device=True)
    assert load_with(bundle, device, needs_device=False).description.device == pb.DEVICE_CPU


def test_several_lanes_on_a_gpu_are_refused(bundle: Bundle, device: CudaDevice) -> None:
    with pytest.raises(StartupError, match="lanes is 2; on a GPU it must be 1"):
        load_with(bundle, device, needs_device=True, lanes=2)


def test_metrics_name_the_bytes_that_a_model_holds_on_the_device(bundle: Bundle, device: CudaDevice) -> None:
    registry = CollectorRegistry()
    served = load_with(bundle, device, needs_device=True, registry=registry)
    held = {
        kind: registry.get_sample_value("antiphon_model_memory_bytes", {"model_name": served.name, "kind": kind})
        for kind in ("weights", "cache", "workspace")
    }
    num_heads, head_width, bfloat16_bytes = 2, 16, 2  # of SMALL
    block_bytes = 2 * num_heads * 16 * head_width * bfloat16_bytes  # keys and values of one layer
    assert held["cache"] == served.engine.num_blocks * block_bytes
    files = sum(path.stat().st_size for path in bundle.path.glob("*.cuda.bfloat16.*"))
    assert held["weights"] == files
    assert held["workspace"] == 0  # not known before the first runs
