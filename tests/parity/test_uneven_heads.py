"""Models whose attention modules have different numbers of heads: exported graphs and the engine equal PyTorch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from antiphon.bundle.manifest import Bundle, load_bundle
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.client import ServerError
from antiphon.domain.errors import Unsupported
from antiphon.domain.sampling_params import SamplingParams
from antiphon.errors import CheckpointError, LoweringError
from antiphon.export.export import export_bundle
from antiphon.export.verify import TOLERANCES, compare
from antiphon.ops.cache_geometry import pool_axes
from antiphon.runtime.explain import Explainer
from antiphon.runtime.native import NativeRunner
from antiphon.tools.bench.ctranslate2_conversion import ctranslate2_specification
from antiphon.transformer.greedy import greedy
from antiphon.transformer.transformer import Transformer
from tests.bundle_serving import serving_bundle
from tests.fakes import request_of
from tests.parity.answers_together import answer, export_model, lively
from tests.parity.exports import small_config, write_checkpoint
from tests.parity.test_runner import random_batch, run_native

# The decoder's modules have 1 to 3 heads, so the pool has 3, fewer than the encoder's 4.
UNEVEN = dict(encoder_self=[4, 1], decoder_self=[1, 3], decoder_cross=[3, 2])


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("uneven") / "checkpoint", small_config(module_heads=UNEVEN))


@pytest.fixture(scope="module")
def exported(uneven: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Export the model; the export itself compares the graphs with the model."""
    return export_bundle(uneven, tmp_path_factory.mktemp("uneven") / "bundle")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, NativeRunner]:
    model = lively(small_config(module_heads=UNEVEN, vocab_size=61, max_target_len=40, d_model=32, d_ff=64), seed=6)
    return model, NativeRunner(export_model(tmp_path_factory.mktemp("lively"), model), max_rows=32, threads=1)


def test_bundle_describes_the_heads_and_has_no_explain_graph(uneven: Checkpoint, exported: Bundle) -> None:
    assert load_bundle(exported.path).manifest.model == uneven.config
    assert uneven.config.module_heads is not None
    assert {graphs.explain for graphs in exported.manifest.graphs} == {None}
    with pytest.raises(Unsupported, match="holds no explain graph"):
        Explainer(exported).explain([5, 2], [1])


def test_pool_has_the_heads_of_the_decoder(served: tuple[Transformer, NativeRunner]) -> None:
    model, runner = served
    assert pool_axes(model.config) == (2, 2, 3, 16 * 16)
    assert runner.cache.shape[1:] == (2, 2, 3, 16 * 16)


def test_greedy_answers_of_the_engine_equal_pytorch(served: tuple[Transformer, NativeRunner]) -> None:
    """Sources of different lengths are decoded together; prefixes make rows that feed several tokens."""
    model, runner = served
    dice = random.Random(3)
    sources = [tuple(dice.randrange(4, 61) for _ in range(dice.randint(1, 40))) for _ in range(12)]
    params = SamplingParams(max_new_tokens=39, num_logprobs=0)
    expected = greedy(model, sources, 39)
    assert len({len(target) for target in expected}) > 5
    requests = [request_of(str(row), source, params=params) for row, source in enumerate(sources)]
    answers = answer(runner, requests)
    assert [list(answers[str(row)][0].token_ids) for row in range(len(sources))] == expected
    prefixes = [tuple(target[: len(target) // 2]) for target in expected]
    begun = [
        request_of(str(row), source, params=replace(params, max_new_tokens=39 - len(prefix)), prefix=prefix)
        for row, (source, prefix) in enumerate(zip(sources, prefixes, strict=True))
    ]
    answers = answer(runner, begun)
    for row, prefix in enumerate(prefixes):
        assert [*prefix, *answers[str(row)][0].token_ids] == expected[row]


def test_int8_graphs_of_the_runner_agree_with_pytorch(uneven: Checkpoint, exported: Bundle) -> None:
    """The runner decodes eight sources together, and the caches are float16."""
    sources, tokens = random_batch(uneven.config.vocab_size)
    with torch.no_grad():
        pairs = zip(sources, tokens, strict=True)
        logits = [uneven.model(torch.tensor([s]), torch.from_numpy(t[None]))[0] for s, t in pairs]
    expected = torch.log_softmax(torch.cat(logits), dim=-1).numpy()
    runner = NativeRunner(exported, max_rows=8, threads=1, precision="int8")
    found = run_native(runner, sources, tokens)
    assert compare(found.reshape(expected.shape), expected).excess(TOLERANCES["int8"]) is None


def test_int4_graphs_agree_with_pytorch(uneven: Checkpoint, tmp_path: Path) -> None:
    export_bundle(uneven, tmp_path / "bundle", precisions=("int4",))


def test_cuda_graphs_and_ctranslate2_are_refused_by_name(uneven: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="lowering='cuda' has no kernel for module_heads"):
        export_bundle(uneven, tmp_path / "bundle", precisions=("bfloat16",), lowerings=("cuda",))
    assert not (tmp_path / "bundle").exists()
    with pytest.raises(CheckpointError, match="module_heads cannot be converted to CTranslate2"):
        ctranslate2_specification(uneven)


async def test_server_explains_no_attention_but_answers_other_questions(exported: Bundle, uneven: Checkpoint) -> None:
    async with serving_bundle(exported.path, precision="float32") as served:
        with pytest.raises(ServerError, match="every layer; this model has module_heads"):
            await served.client.explain("the cat")
        found = await served.client.next_token("the cat", num_tokens=5)
        assert [each.rows for each in await served.client.get_positions(4)] == [4, 4]
    source = [*uneven.tokenizer.encode("the cat"), uneven.tokenizer.eos_id]
    with torch.no_grad():
        logits = uneven.model(torch.tensor([source]), torch.tensor([[uneven.tokenizer.bos_id]]))[0, 0]
    best = logits.log_softmax(-1).topk(5)
    assert list(found.token_ids[:5]) == best.indices.tolist()
    assert found.stages[0].logprobs[:5] == pytest.approx(best.values.tolist(), abs=1e-4)
