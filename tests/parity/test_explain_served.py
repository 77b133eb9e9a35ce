"""Attention maps and positions of every kind of model over real gRPC, compared with the checkpoint in transformers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from antiphon.bundle.manifest import Bundle, load_bundle, write_manifest
from antiphon.client import Options, ServerError
from antiphon.export.export import export_bundle
from antiphon.importer.importer import ImportOptions, import_checkpoint
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.text.format import LanguageIds, fill
from antiphon.transformer.positions import rotary_tables
from antiphon.transformer.transformer import Transformer
from antiphon.v1 import inference_pb2 as pb
from tests.bundle_serving import serving_bundle
from tests.marks import marked
from tests.parity import decoder_checkpoints, encoder_checkpoints, seq2seq_checkpoints
from tests.parity.exports import small_config, write_checkpoint

# float32 is summed in another order; a map of a wrong head, layer or position differs by far more.
CLOSE: dict[str, Any] = dict(atol=1e-4, rtol=0)
NUM_POSITIONS = 17

_BERT: dict[str, Any] = dict(
    vocab_size=19, hidden_size=36, num_hidden_layers=2, num_attention_heads=3, intermediate_size=50,
    max_position_embeddings=40,
)  # fmt: skip
_DEBERTA: dict[str, Any] = dict(_BERT, relative_attention=True, pos_att_type=["c2p", "p2c"])
# Class in transformers and settings of each encoder-only checkpoint.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", _BERT),
    "albert": ("AlbertForMaskedLM", dict(_BERT, embedding_size=20, num_hidden_layers=3)),
    # Learned positions beside relative ones, and sources longer than the table of distances.
    "deberta": ("DebertaForMaskedLM", dict(_DEBERTA, max_relative_positions=6)),
    "deberta_v3": (
        "DebertaV2ForMaskedLM",
        dict(_DEBERTA, position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False),
    ),
}
SEQ2SEQ = ("marian", "bart", "t5")
DECODERS = ("gpt2", "llama3")


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A checkpoint's model in transformers, which returns its attention weights, and its bundle."""

    theirs: Any
    folder: Path
    bundle: Bundle


def imported(folder: Path, auto: Any) -> Imported:
    """Import the checkpoint in folder/theirs."""
    theirs = auto.from_pretrained(folder / "theirs", attn_implementation="eager").eval()
    options = ImportOptions(source=str(folder / "theirs"), target=folder / "ours", precisions=("float32",))
    return Imported(theirs=theirs, folder=folder / "theirs", bundle=import_checkpoint(options))


@pytest.fixture(scope="module", params=marked(SEQ2SEQ, "combinations", but=["t5"]))
def seq2seq(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    folder = tmp_path_factory.mktemp(request.param)
    seq2seq_checkpoints.save(folder / "theirs", request.param)
    return imported(folder, transformers.AutoModelForSeq2SeqLM)


@pytest.fixture(scope="module", params=marked(ENCODERS, "combinations", but=["bert"]))
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    folder, (kind, settings) = tmp_path_factory.mktemp(request.param), ENCODERS[request.param]
    config = getattr(transformers, kind).config_class(**settings)
    encoder_checkpoints.write_checkpoint(folder / "theirs", config, kind)
    return imported(folder, transformers.AutoModelForMaskedLM)


@pytest.fixture(scope="module", params=marked(DECODERS, "combinations", but=["gpt2"]))
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    folder = tmp_path_factory.mktemp(request.param)
    decoder_checkpoints.write_decoder(folder / "theirs", request.param)
    return imported(folder, transformers.AutoModelForCausalLM)


def check_maps(found: Sequence[pb.AttentionMap], expected: Sequence[Tensor]) -> None:
    """Compare maps with the weights [1, H, queries, keys] of each layer, and their entropies with these weights."""
    wanted = torch.cat(tuple(expected)).detach()  # [L, H, queries, keys]
    places = [(layer, head) for layer in range(wanted.shape[0]) for head in range(wanted.shape[1])]
    assert [(each.layer, each.head) for each in found] == places
    assert {(each.rows, each.columns) for each in found} == {tuple(wanted.shape[2:])}
    weights = np.array([each.weights for each in found]).reshape(wanted.shape)
    np.testing.assert_allclose(weights, wanted.numpy(), **CLOSE)
    entropies = torch.special.entr(wanted.double()).sum(-1).mean(-1).flatten()
    np.testing.assert_allclose([each.entropy for each in found], entropies.numpy(), atol=1e-3)


def present(answer: pb.ExplainResponse) -> list[str]:
    return [name for name in ("encoder_self", "decoder_self", "cross") if getattr(answer, name)]


async def test_maps_of_an_encoder_decoder_equal_those_of_transformers(seq2seq: Imported) -> None:
    manifest = seq2seq.bundle.manifest
    source, _ = fill(manifest.text, [9, 17, 40, 8, 33, 21], None, LanguageIds())
    target = [30, 11, 29, 12]
    async with serving_bundle(seq2seq.bundle.path) as served:
        answer = await served.client.explain(source, target)
    read = torch.tensor([[manifest.model.bos_id, *target]])
    with torch.no_grad():
        made = seq2seq.theirs(input_ids=torch.tensor([source]), decoder_input_ids=read, output_attentions=True)
    check_maps(answer.encoder_self, made.encoder_attentions)
    check_maps(answer.decoder_self, made.decoder_attentions)
    check_maps(answer.cross, made.cross_attentions)
    assert (len(answer.source_tokens), len(answer.target_tokens)) == (len(source), 1 + len(target))


@pytest.mark.parametrize("pair", [None, "a small dog"])
async def test_maps_of_an_encoder_only_model_equal_those_of_transformers(encoder: Imported, pair: str | None) -> None:
    text = "the big cat sat on the red mat"
    load: Any = transformers.PreTrainedTokenizerFast
    tokenizer = load(
        tokenizer_file=str(encoder.folder / "tokenizer.json"),
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    async with serving_bundle(encoder.bundle.path) as served:
        answer = await served.client.explain(text, pair=pair)
    given = tokenizer(text, pair, return_tensors="pt")
    if not encoder.bundle.manifest.model.token_types:
        del given["token_type_ids"]
    with torch.no_grad():
        made = encoder.theirs(**given, output_attentions=True)
    assert present(answer) == ["encoder_self"]
    check_maps(answer.encoder_self, made.attentions)
    shown = tokenizer.convert_ids_to_tokens(given["input_ids"][0])
    assert len(answer.source_tokens) == len(shown)
    assert (answer.source_tokens[0], answer.source_tokens[-1]) == (shown[0], shown[-1])
    assert not answer.target_tokens


async def test_maps_of_a_decoder_only_model_cover_the_prompt_and_its_continuation(decoder: Imported) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(decoder.folder)
    prompt, target = "the cat sat", [70, 80, 90, 72]
    async with serving_bundle(decoder.bundle.path) as served:
        answer = await served.client.explain(prompt, target)
    prompt_ids = tokenizer(prompt)["input_ids"]
    with torch.no_grad():
        made = decoder.theirs(input_ids=torch.tensor([[*prompt_ids, *target]]), output_attentions=True)
    assert present(answer) == ["decoder_self"]
    check_maps(answer.decoder_self, made.attentions)
    assert answer.target_tokens[: len(prompt_ids)] == answer.source_tokens
    assert len(answer.target_tokens) == len(prompt_ids) + len(target)


async def test_maps_of_a_decoder_only_model_without_target_are_those_of_its_greedy_answer(decoder: Imported) -> None:
    """The answer has no end token, so the two requests read the same tokens."""
    async with serving_bundle(decoder.bundle.path) as served:
        greedy = await served.client.generate_text("the cat", Options(max_new_tokens=200))
        answer = await served.client.explain("the cat")
        given = await served.client.explain("the cat", greedy.token_ids)
    assert answer == given
    assert len(answer.target_tokens) == len(answer.source_tokens) + len(greedy.token_ids)


async def check_refused(call: Any, words: str, field: str) -> None:
    with pytest.raises(ServerError) as caught:
        await call
    assert (caught.value.code, caught.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert words in caught.value.message


async def test_encoder_only_model_refuses_a_target_and_a_wrong_source(encoder: Imported) -> None:
    async with serving_bundle(encoder.bundle.path) as served:
        client = served.client
        await check_refused(client.explain("a cat", "a dog"), "an encoder-only model has no target", "target_text")
        await check_refused(client.explain("a cat", [5]), "an encoder-only model has no target", "target_token_ids")
        await check_refused(client.explain([5, 6], pair="a dog"), "absent beside token_ids", "text_pair")
        await check_refused(client.explain("cat " * 50), "1 to 40 tokens long", "text")
        await check_refused(client.explain([19]), "19", "token_ids")


async def test_decoder_only_model_refuses_a_pair_and_more_tokens_than_it_reads(decoder: Imported) -> None:
    limit = decoder.bundle.manifest.model.max_target_len
    async with serving_bundle(decoder.bundle.path) as served:
        client = served.client
        await check_refused(client.explain("a cat", pair="a dog"), "only encoder-only models read pairs", "text_pair")
        longest = await client.explain([1, 5, 6], [5] * (limit - 3))
        assert len(longest.target_tokens) == limit
        await check_refused(
            client.explain([1, 5, 6], [5] * (limit - 2)), f"0 to {limit - 3} tokens long", "target_token_ids"
        )


async def positions_of(bundle: Path, num_positions: int = NUM_POSITIONS) -> dict[tuple[str, str], pb.PositionEncoding]:
    """Return the positions of a served bundle by part and kind."""
    async with serving_bundle(bundle) as served:
        found = await served.client.get_positions(num_positions)
    return {(pb.Architecture.Name(each.part), pb.PositionKind.Name(each.kind)): each for each in found}


def table_of(encoding: pb.PositionEncoding) -> NDArray[np.float64]:
    return np.array(encoding.values).reshape(encoding.rows, encoding.columns)


def mean_cosines(vectors: Tensor) -> list[float]:
    """Return the mean cosine of two vectors that are 0 to P - 1 rows apart."""
    count = len(vectors)
    return [
        torch.cosine_similarity(vectors[: count - apart], vectors[apart:], dim=1).mean().item()
        for apart in range(count)
    ]


def check_vectors(encoding: pb.PositionEncoding, expected: Tensor) -> None:
    """Compare a table of vectors, and the decay, with vectors [at least P, W]."""
    vectors = expected[:NUM_POSITIONS].detach()
    np.testing.assert_allclose(table_of(encoding), vectors.numpy(), atol=1e-6)
    np.testing.assert_allclose(encoding.decay, mean_cosines(vectors), atol=1e-5)


def check_biases(encoding: pb.PositionEncoding, expected: Tensor) -> None:
    """Compare biases by distance with the biases [H, P, P] of every query and key."""
    table, last = table_of(encoding), NUM_POSITIONS - 1
    assert table.shape == (expected.shape[0], 2 * NUM_POSITIONS - 1)
    for query in range(NUM_POSITIONS):
        np.testing.assert_allclose(
            table[:, last - query : last - query + NUM_POSITIONS], expected[:, query].detach().numpy(), atol=1e-6
        )
    np.testing.assert_allclose(encoding.decay, expected[:, -1].mean(0).flip(0).detach().numpy(), atol=1e-6)


ENCODER, DECODER = "ARCHITECTURE_ENCODER", "ARCHITECTURE_DECODER"


async def test_positions_of_an_encoder_decoder_equal_those_of_transformers(seq2seq: Imported) -> None:
    found, theirs = await positions_of(seq2seq.bundle.path), seq2seq.theirs.base_model
    kind = {"marian": "SINUSOIDAL", "bart": "LEARNED", "t5": "RELATIVE"}[theirs.config.model_type]
    stacks = {ENCODER: theirs.encoder, DECODER: theirs.decoder}
    assert list(found) == [(part, f"POSITION_KIND_{kind}") for part in stacks]
    for encoding, stack in zip(found.values(), stacks.values(), strict=True):
        if kind == "RELATIVE":
            attention = stack.block[0].layer[0].SelfAttention
            check_biases(encoding, attention.compute_bias(NUM_POSITIONS, NUM_POSITIONS)[0])
        else:
            check_vectors(encoding, stack.embed_positions.weight[2 if kind == "LEARNED" else 0 :])


async def test_positions_of_an_encoder_only_model_equal_those_of_transformers(encoder: Imported) -> None:
    found, base = await positions_of(encoder.bundle.path), encoder.theirs.base_model
    model_type = base.config.model_type
    expected = {"deberta": ["LEARNED", "DISENTANGLED"], "deberta-v2": ["DISENTANGLED"]}.get(model_type, ["LEARNED"])
    assert list(found) == [(ENCODER, f"POSITION_KIND_{kind}") for kind in expected]
    if "LEARNED" in expected:
        check_vectors(found[ENCODER, "POSITION_KIND_LEARNED"], base.embeddings.position_embeddings.weight)
    if "DISENTANGLED" in expected:
        check_distances(found[ENCODER, "POSITION_KIND_DISENTANGLED"], base.encoder)


def check_distances(encoding: pb.PositionEncoding, theirs: Any) -> None:
    """Compare the vectors of distances with the rows that transformers reads for every query and key."""
    states = torch.zeros(1, NUM_POSITIONS, 36)
    table, rows = theirs.get_rel_embedding().detach(), theirs.get_rel_pos(states).reshape(NUM_POSITIONS, NUM_POSITIONS)
    span = len(table) // 2
    rows = (rows + span).clamp(0, 2 * span - 1)
    found, last = table_of(encoding), NUM_POSITIONS - 1
    for query in range(NUM_POSITIONS):
        ours = found[last - query : last - query + NUM_POSITIONS]
        np.testing.assert_allclose(ours, table[rows[query]].numpy(), atol=1e-5)
    cosines = torch.cosine_similarity(table[rows[-1]], table[rows[0, 0]], dim=1).flip(0)
    np.testing.assert_allclose(encoding.decay, cosines.numpy(), atol=1e-5)


async def test_positions_of_a_decoder_only_model_equal_those_of_transformers(decoder: Imported) -> None:
    found, base = await positions_of(decoder.bundle.path), decoder.theirs.base_model
    ((place, encoding),) = found.items()
    if base.config.model_type == "gpt2":
        assert place == (DECODER, "POSITION_KIND_LEARNED")
        check_vectors(encoding, base.wpe.weight)
        return
    assert place == (DECODER, "POSITION_KIND_ROTARY")
    cosines, _ = base.rotary_emb(torch.zeros(1), torch.arange(NUM_POSITIONS)[None])  # each angle twice
    expected = cosines[0, :, : cosines.shape[-1] // 2].numpy()
    np.testing.assert_allclose(table_of(encoding), expected, atol=1e-5)
    np.testing.assert_allclose(encoding.decay, expected.mean(axis=1), atol=1e-5)


async def test_learned_positions_are_unimplemented_when_the_bundle_has_no_tables(
    decoder: Imported, tmp_path: Path
) -> None:
    """Bundles of earlier versions have none. Rotary positions need none."""
    manifest, bundle = decoder.bundle.manifest, shutil.copytree(decoder.bundle.path, tmp_path / "copy")
    write_manifest(bundle, manifest.model_copy(update={"positions": None}))
    if manifest.model.positions == "rope":
        assert await positions_of(bundle) == await positions_of(decoder.bundle.path)
        return
    with pytest.raises(ServerError, match="no table decoder_positions, which holds learned positions") as caught:
        await positions_of(bundle)
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.combinations
async def test_positions_of_alibi_equal_those_of_bloom(tmp_path: Path) -> None:
    config = small_config(positions="alibi", architecture="decoder", encoder_layers=0)
    bundle = export_bundle(
        write_checkpoint(tmp_path / "checkpoint", config), tmp_path / "ours", precisions=("float32",)
    )
    found = await positions_of(bundle.path)
    keys: Tensor = build_alibi_tensor(torch.ones(1, NUM_POSITIONS, dtype=torch.long), config.num_heads, torch.float32)
    keys = keys.view(config.num_heads, 1, NUM_POSITIONS)  # slope * key; softmax ignores the difference by query
    biases = -(keys - keys.transpose(1, 2)).abs()
    assert list(found) == [(DECODER, "POSITION_KIND_ALIBI")]
    check_biases(found[DECODER, "POSITION_KIND_ALIBI"], biases)


@pytest.mark.combinations
async def test_sinusoids_equal_those_of_pytorch_without_tables_in_the_bundle(tmp_path: Path) -> None:
    """Bundles of earlier versions have no tables of positions; sinusoids need none."""
    config = small_config(positions="sinusoidal", architecture="encoder-decoder", encoder_layers=1)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", config)
    bundle = export_bundle(checkpoint, tmp_path / "ours", precisions=("float32",))
    write_manifest(bundle.path, bundle.manifest.model_copy(update={"positions": None}))
    found, reference = await positions_of(bundle.path), Transformer(config)
    assert list(found) == [(part, "POSITION_KIND_SINUSOIDAL") for part in (ENCODER, DECODER)]
    for encoding, stack in zip(found.values(), (reference.encoder, reference.decoder), strict=True):
        assert stack is not None
        assert stack.positions.vectors is not None
        check_vectors(encoding, stack.positions.vectors)


async def test_positions_of_the_shipped_model_are_the_cosines_of_pytorch() -> None:
    found = await positions_of(SHIPPED_BUNDLE)
    assert list(found) == [(part, "POSITION_KIND_ROTARY") for part in (ENCODER, DECODER)]
    async with serving_bundle(SHIPPED_BUNDLE) as served:
        assert len((await served.client.get_positions())[0].decay) == 64
        await check_refused(served.client.get_positions(257), "0 to 256", "num_positions")
        whole = await served.client.get_positions(256)
    config = load_bundle(SHIPPED_BUNDLE).manifest.model
    cosines, _ = rotary_tables(torch.arange(256), config.resolved_head_dim, config.rope_theta, config.rope_scaling)
    for encoding in whole:
        np.testing.assert_allclose(table_of(encoding), cosines[:, 0].numpy(), atol=1e-5)
