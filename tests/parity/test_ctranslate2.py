"""The PyTorch model compared with CTranslate2 with the same weights."""

import dataclasses
from pathlib import Path

import ctranslate2
import numpy as np
import pytest
import torch

from antiphon.architecture.config import ModelConfig, preset
from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, weights_of
from antiphon.errors import CheckpointError
from antiphon.export.export import export_bundle
from antiphon.runtime.lanes import open_runner
from antiphon.text.shortlist import Shortlist
from antiphon.text.tokenizer import Tokenizer, byte_bpe_format
from antiphon.tools.bench.ctranslate2 import prompts_of, write_vmap
from antiphon.tools.bench.ctranslate2_conversion import save_ctranslate2_model, translate
from antiphon.tools.bench.make_models import pair_tokenizer
from antiphon.tools.offline import Offline
from antiphon.transformer.greedy import greedy
from antiphon.transformer.transformer import Transformer


def random_checkpoint(config: ModelConfig, seed: int) -> Checkpoint:
    torch.manual_seed(seed)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, because a bias of zero would hide a missing one
            parameter.add_(torch.randn_like(parameter) * 0.2)
    tokenizer = Tokenizer.train([], config.vocab_size)
    return Checkpoint(
        config=config,
        model=model,
        tokenizer=tokenizer,
        text=byte_bpe_format(tokenizer),
        text_folder=Path(),
        provenance=None,
    )


@pytest.mark.parametrize("norm_placement", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "gelu_sigmoid", "silu"])
def test_greedy_equals_ctranslate2(tmp_path: Path, norm_placement: str, activation: str) -> None:
    check_greedy(tmp_path, preset("tiny", vocab_size=300, norm_placement=norm_placement, activation=activation))


FAMILIES: dict[str, dict[str, object]] = {
    "bart": dict(positions="learned", positions_offset=2, embedding_norm=True),
    "mbart": dict(positions="learned", positions_offset=2, embedding_norm=True, norm_placement="pre"),
    "marian": dict(activation="silu", sinusoids="halves", output_bias=True),
    "m2m_100": dict(sinusoids="fairseq", positions_offset=2, norm_placement="pre"),
}


@pytest.mark.combinations
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_ctranslate2_with_parts_of_public_families(tmp_path: Path, name: str) -> None:
    check_greedy(tmp_path, preset("tiny", vocab_size=300, **FAMILIES[name]), seed=5)


def check_greedy(tmp_path: Path, config: ModelConfig, seed: int = 3) -> None:
    checkpoint = random_checkpoint(config, seed)
    save_ctranslate2_model(checkpoint, tmp_path)
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 20, (12,), generator=generator).tolist()
    sources = [[*torch.randint(4, 300, (n,), generator=generator).tolist(), config.eos_id] for n in lengths]
    translator = ctranslate2.Translator(str(tmp_path), compute_type="float32", intra_threads=1)
    theirs = translate(translator, sources, max_decoding_length=24)
    assert greedy(checkpoint.model, sources, 24) == theirs
    assert len({tuple(row) for row in theirs}) > 1, "the outputs must differ, or the comparison is empty"


@pytest.mark.parametrize("has_source_ids", [True, False])
def test_shortlist_equals_a_vocabulary_map(tmp_path: Path, has_source_ids: bool) -> None:
    """CTranslate2 runs source by source, because its candidates are those of the whole batch."""
    config, random = preset("tiny", vocab_size=300), np.random.default_rng(1)
    model = random_checkpoint(config, seed=3).model
    save_checkpoint(tmp_path / "saved", config=config, weights=weights_of(model), tokenizer=pair_tokenizer(300))
    checkpoint = load_checkpoint(tmp_path / "saved")
    bundle = export_bundle(checkpoint, tmp_path / "bundle", precisions=("float32",), explain=False)
    save_ctranslate2_model(checkpoint, tmp_path / "ctranslate2")
    shortlist = Shortlist.of_pairs(
        random.integers(0, 300, 3000),
        random.integers(4, 300, 3000),
        num_sources=300,
        always=[config.bos_id, config.eos_id, 3, 7, 8],  # CTranslate2 always adds begin, end and unknown token
        has_source_ids=has_source_ids,
    )
    write_vmap(shortlist, tmp_path / "ctranslate2")
    sources = [[*random.integers(4, 300, length).tolist(), config.eos_id] for length in range(1, 13)]
    translator = ctranslate2.Translator(str(tmp_path / "ctranslate2"), compute_type="float32", intra_threads=1)
    results = [
        translator.translate_batch([prompt], beam_size=1, max_decoding_length=24, use_vmap=True)[0]
        for prompt in prompts_of(sources)
    ]
    with Offline(open_runner(bundle, max_rows=12, threads=1, precision="float32"), rows=12) as offline:
        whole, chosen = (
            offline.translate(sources, concurrency=12, max_new_tokens=24, shortlist=candidates)
            for candidates in (None, shortlist)
        )
    assert chosen != whole
    theirs = [[int(token) for token in result.hypotheses[0]] for result in results]
    assert [[token for token in target if token != config.eos_id] for target in chosen] == theirs


@pytest.mark.combinations
def test_greedy_equals_ctranslate2_with_parts_of_t5(tmp_path: Path) -> None:
    t5 = dict(
        norm="rmsnorm", norm_placement="pre", activation="gelu_tanh", gated=True, positions="t5_relative", bias=False,
        tie_output=False, scale_embeddings=False, attention_scale=1.0, head_dim=24, norm_eps=1e-6,
    )  # fmt: skip
    check_greedy(tmp_path, preset("tiny", vocab_size=300, **t5), seed=7)


@pytest.mark.combinations
@pytest.mark.parametrize("norm_placement", ["pre", "post"])
@pytest.mark.parametrize("rope_theta", [100.0, 10000.0])
def test_greedy_equals_ctranslate2_with_rotated_positions(
    tmp_path: Path, norm_placement: str, rope_theta: float
) -> None:
    rope = dict(positions="rope", rope_theta=rope_theta, norm_placement=norm_placement)
    check_greedy(tmp_path, preset("tiny", vocab_size=300, **rope), seed=9)


@pytest.mark.parametrize(("field", "value"), [("positions", "alibi"), ("activation", "tanh")])
def test_conversion_refuses_models_that_ctranslate2_does_not_support(tmp_path: Path, field: str, value: str) -> None:
    checkpoint = random_checkpoint(preset("tiny", vocab_size=300), seed=1)
    other = dataclasses.replace(checkpoint, config=checkpoint.config.model_copy(update={field: value}))
    with pytest.raises(CheckpointError, match=rf"^{field}='{value}' cannot be converted to CTranslate2; '.+ can$"):
        save_ctranslate2_model(other, tmp_path)
    assert not list(tmp_path.iterdir())
