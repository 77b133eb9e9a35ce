"""Decoder-only models: exported graphs compared with PyTorch, and imported checkpoints with transformers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import transformers

from antiphon.bundle.manifest import Bundle
from antiphon.client import Options, ServerError
from antiphon.domain.request import Request, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.errors import SourceError
from antiphon.export.verify import verify
from antiphon.importer.importer import ImportOptions, import_checkpoint
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for
from antiphon.runtime.native import NativeRunner
from antiphon.transformer.random_model import random_transformer
from antiphon.v1 import inference_pb2 as pb
from tests.bundle_serving import serving_bundle
from tests.fakes import changed, request_of, scored
from tests.marks import marked
from tests.parity.answers_together import answer
from tests.parity.crowd import Crowd
from tests.parity.decoder_checkpoints import write_decoder
from tests.parity.exports import shared_export

DECODERS: dict[str, dict[str, object]] = {
    "gpt2": dict(positions="learned", activation="gelu_tanh", norm_placement="pre", scale_embeddings=False),
    "llama": dict(
        positions="rope", norm="rmsnorm", norm_placement="pre", activation="silu", gated=True, bias=False,
        tie_output=False, scale_embeddings=False, head_dim=24,
    ),
}  # fmt: skip
ALONE: dict[str, object] = dict(architecture="decoder", encoder_layers=0)


@pytest.fixture(scope="module", params=marked(DECODERS, "combinations", but=["llama"]))
def bundle(request: pytest.FixtureRequest) -> Bundle:
    return shared_export(f"{request.param}-alone", ALONE | DECODERS[request.param])


def test_decoder_only_model_is_exported_without_encoder_and_agrees_with_pytorch(bundle: Bundle) -> None:
    for graphs in bundle.manifest.graphs:
        assert (graphs.encoder, graphs.explain) == (None, f"explain.{graphs.precision}.onnx")
        assert (bundle.manifest.positions is None) == (bundle.manifest.model.positions == "rope")
        verify(bundle.path, graphs, random_transformer(bundle.manifest.model), seed=7)


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A checkpoint's model in transformers, and the imported bundle with its engine."""

    theirs: Any
    tokenizer: Any
    bundle: Bundle
    runner: NativeRunner
    prompts: Sequence[tuple[int, ...]]


def imported_from(folder: Path, name: str, rewrite: Callable[[Path], None] | None = None) -> Imported:
    """Write and import a checkpoint; rewrite: changes its files before the import, but not their meaning."""
    theirs = write_decoder(folder / "checkpoint", name)
    if rewrite is not None:
        rewrite(folder / "checkpoint")
    options = ImportOptions(source=str(folder / "checkpoint"), target=folder / "bundle", precisions=("float32",))
    bundle = import_checkpoint(options)
    config = bundle.manifest.model
    generator = torch.Generator().manual_seed(3)
    prompts = [
        tuple(torch.randint(3, config.vocab_size, (length,), generator=generator).tolist())
        for length in (1, 2, 7, 16, 17, config.max_target_len - 3)
    ]
    return Imported(
        theirs=theirs,
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder / "checkpoint"),
        bundle=bundle,
        runner=NativeRunner(bundle, max_rows=40, threads=1),
        prompts=prompts,
    )


@pytest.fixture(scope="module", params=marked(["gpt2", "llama"], "combinations", but=["gpt2"]))
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    return imported_from(tmp_path_factory.mktemp(request.param), request.param)


def prompted(name: str, prompt: tuple[int, ...], params: SamplingParams, target: tuple[int, ...] = ()) -> Request:
    """Return a request as the servicer makes one for a decoder-only model. A target is scored."""
    request = changed(
        request_of(name, (), params=params), begin_id=prompt[0], prefix_ids=prompt[1:], num_prompt_ids=len(prompt)
    )
    return scored(request, target) if target else request


def theirs_of(imported: Imported, prompt: tuple[int, ...], **options: Any) -> list[int]:
    """Return the tokens that transformers' `generate` adds to a prompt, without the end token."""
    config = imported.bundle.manifest.model
    made = imported.theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=min(12, config.max_target_len - len(prompt)),
        do_sample=False,
        pad_token_id=config.pad_id,
        **options,
    )
    added: list[int] = made[0, len(prompt) :].tolist()
    return added[: added.index(config.eos_id)] if config.eos_id in added else added


CONTROLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (dict(beam_width=4), dict(num_beams=4)),
    (dict(beam_width=4, length_penalty=0.0), dict(num_beams=4, length_penalty=0.0)),
    (dict(repetition_penalty=1.8), dict(repetition_penalty=1.8)),
    (dict(no_repeat_ngram_size=1), dict(no_repeat_ngram_size=1)),
    (dict(min_new_tokens=3), dict(min_new_tokens=3)),
]  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs"), CONTROLS, ids=str)
def test_prompts_in_a_batch_get_the_tokens_of_transformers(
    imported: Imported, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Penalties apply to tokens of the prompt and to generated tokens."""
    check_together(imported, SamplingParams(max_new_tokens=12, **ours), **theirs)


@pytest.mark.combinations
@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_mistral_and_qwen2_get_the_tokens_of_transformers(tmp_path: Path, name: str) -> None:
    """Mistral within its window, the longest prompt up to its last position; Qwen2 with only some biases."""
    check_together(imported_from(tmp_path, name), SamplingParams(max_new_tokens=12))


@pytest.mark.combinations
@pytest.mark.parametrize("name", ["llama3", "llama_linear"])
@pytest.mark.parametrize("is_old", [False, True], ids=["rope_parameters", "rope_scaling"])
def test_scaled_rotary_positions_get_the_tokens_of_transformers(tmp_path: Path, name: str, is_old: bool) -> None:
    """Settings as written by transformers 5, and as in Llama 3.1's own config.json."""
    imported = imported_from(tmp_path, name, said_as_before_version_5 if is_old else None)
    kept = kept_rates(imported.theirs)
    assert kept == ([1.0, "between", 1 / 8, 1 / 8, 1 / 8] if name == "llama3" else [1 / 4] * 5)
    check_together(imported, SamplingParams(max_new_tokens=12))
    check_scores(imported)


def said_as_before_version_5(folder: Path) -> None:
    """Rewrite config.json as before transformers 5: rope_theta and rope_scaling, with the linear kind as `type`."""
    settings = json.loads((folder / "config.json").read_text())
    rotation = settings.pop("rope_parameters")
    settings["rope_theta"] = rotation.pop("rope_theta")
    kind = rotation.pop("rope_type")
    settings["rope_scaling"] = rotation | {"type" if kind == "linear" else "rope_type": kind}
    (folder / "config.json").write_text(json.dumps(settings))


def kept_rates(theirs: Any) -> list[float | str]:
    """Return transformers' scaling factor of each angle's rate: 1, 1 / factor, or "between" for any other value."""
    unscaled = theirs.config.rope_parameters["rope_theta"] ** (-torch.arange(0, 10, 2) / 10)
    shares: list[float] = (theirs.model.rotary_emb.inv_freq / unscaled).tolist()
    ends = 1.0, 1 / theirs.config.rope_parameters["factor"]
    return [next((end for end in ends if share == pytest.approx(end)), "between") for share in shares]


def check_together(imported: Imported, params: SamplingParams, **theirs: Any) -> None:
    answers = answer(
        imported.runner, [prompted(str(index), prompt, params) for index, prompt in enumerate(imported.prompts)]
    )
    for index, prompt in enumerate(imported.prompts):
        (event,) = answers[str(index)]
        assert list(event.token_ids) == theirs_of(imported, prompt, **theirs), f"after {len(prompt)} tokens"
        assert len(prompt) + event.num_generated <= imported.bundle.manifest.model.max_target_len


def test_scores_equal_the_log_probabilities_of_transformers(imported: Imported) -> None:
    check_scores(imported)


def check_scores(imported: Imported) -> None:
    target = (5, 4, 3)
    requests = [prompted(str(index), prompt, SamplingParams(), target) for index, prompt in enumerate(imported.prompts)]
    answers = answer(imported.runner, requests)
    for index, prompt in enumerate(imported.prompts):
        (event,) = answers[str(index)]
        with torch.no_grad():
            logits = imported.theirs(torch.tensor([[*prompt, *target]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(dim=-1)[range(3), list(target)]
        found = torch.tensor([one.logprob for one in event.logprobs])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def bits(event: TokenEvent) -> tuple[object, ...]:
    return event.output_index, event.token_ids, event.logprobs, event.score


def test_samples_are_bit_identical_alone_and_in_a_crowd(imported: Imported) -> None:
    requests = [
        prompted(
            str(index),
            prompt,
            SamplingParams(temperature=1.3, top_p=0.9, seed=index, num_return_sequences=2, num_logprobs=1),
        )
        for index, prompt in enumerate(imported.prompts)
    ]
    together = answer(imported.runner, requests)
    for request in requests:
        (alone,) = answer(imported.runner, [request]).values()
        assert sorted(map(bits, alone)) == sorted(map(bits, together[request.request_id]))
    assert len({event.token_ids for events in together.values() for event in events}) > len(requests)


def test_preempted_prompts_get_bit_identical_outputs(bundle: Bundle) -> None:
    model, dice = bundle.manifest.model, random.Random(0)
    longest = blocks_for(model.max_target_len, BLOCK_SIZE)
    tight = NativeRunner(bundle, max_rows=8, threads=2, num_blocks=2 * longest)
    roomy = NativeRunner(bundle, max_rows=1, threads=1)
    requests = [
        prompted(
            str(index),
            tuple(dice.randrange(4, model.vocab_size) for _ in range(dice.randint(1, 12))),
            SamplingParams(temperature=index % 2 * 1.0, seed=index, num_logprobs=1, ignore_eos=True),
        )
        for index in range(12)
    ]
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        crowd, alone = Crowd(tight, loop), Crowd(roomy, loop)
        for request in requests:
            crowd.add(request)
        crowd.finish()
        for request in requests:
            alone.add(request)
            alone.finish()
            name = request.request_id
            assert [*map(bits, crowd.events(name))] == [*map(bits, alone.events(name))]
    assert crowd.num_preemptions > 3
    assert alone.num_preemptions == 0


STRETCHED: dict[str, Any] = dict(factor=2.0, rope_theta=1e4)
ORIGINAL: dict[str, Any] = dict(original_max_position_embeddings=32)
FACTORS: dict[str, Any] = dict(short_factor=[1.0] * 5, long_factor=[2.0] * 5)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama", dict(rope_parameters=dict(rope_type="dynamic", **STRETCHED)), "type 'dynamic'"),
        ("llama", dict(rope_parameters=dict(rope_type="yarn", **STRETCHED, **ORIGINAL)), "type 'yarn'"),
        (
            "llama",
            dict(rope_parameters=dict(rope_type="longrope", **STRETCHED, **ORIGINAL, **FACTORS)),
            "type 'longrope'",
        ),
        ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    tmp_path: Path, name: str, settings: dict[str, object], message: str
) -> None:
    write_decoder(tmp_path / "checkpoint", name, **settings)
    with pytest.raises(SourceError, match=message):
        import_checkpoint(ImportOptions(source=str(tmp_path / "checkpoint"), target=tmp_path / "bundle"))
    assert not (tmp_path / "bundle").exists()


TEXTS = ("the cat sat on", "a cold", "eine kühle Brücke", " the", "")


async def test_served_text_continues_the_prompt_as_in_transformers(imported: Imported) -> None:
    """The text is the decoded output without the decoded prompt, with its leading space; deltas concatenate to it."""
    # transformers decodes invalid UTF-8 differently; in vocabularies with word marks such bytes are tokens.
    byte_ids = [index for piece, index in imported.tokenizer.get_vocab().items() if piece.startswith("<0x")]
    options = Options(max_new_tokens=8, ignore_eos=True, suppressed_ids=byte_ids)
    async with serving_bundle(imported.bundle.path) as served:
        for text in TEXTS:
            prompt = imported.tokenizer(text)["input_ids"] or [imported.bundle.manifest.model.bos_id]
            found = await served.client.generate_text(text, options)
            deltas = [delta.text async for delta in served.client.generate(text, options)]
            assert "".join(deltas) == found.text
            assert found.usage.source_tokens == len(prompt)
            decode = imported.tokenizer.decode
            read = decode(prompt, skip_special_tokens=True)
            assert read + found.text == decode([*prompt, *found.token_ids], skip_special_tokens=True)


async def test_served_prompt_supports_prefix_stop_strings_and_scores(imported: Imported) -> None:
    async with serving_bundle(imported.bundle.path) as served:
        whole = await served.client.generate_text("the cat", Options(max_new_tokens=8, ignore_eos=True, num_logprobs=0))
        ids = whole.token_ids
        prefixed = Options(max_new_tokens=5, ignore_eos=True, prefix_ids=ids[:3])
        after = await served.client.generate_text("the cat", prefixed)
        assert after.token_ids == ids[3:]
        assert after.text == whole.text[len(whole.text) - len(after.text) :]
        response = await served.client.score("the cat", ids)
        shown = [one.logprob for one in response.logprobs[:-1]]
        assert shown == pytest.approx([one.logprob for one in whole.logprobs], abs=1e-5)
        assert response.usage.source_tokens == len(imported.tokenizer("the cat")["input_ids"])


async def test_decoder_only_model_refuses_by_field_and_by_ability(imported: Imported) -> None:
    limit = imported.bundle.manifest.model.max_target_len
    async with serving_bundle(imported.bundle.path) as served:
        client = served.client
        for source, field in (("the cat sat on the mat " * 20, "text"), ([5] * limit, "token_ids")):
            error = await refused(client.generate_text(source))
            assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        filled = await client.generate_text([5] * (limit - 2), Options(ignore_eos=True))
        assert filled.usage.source_tokens + len(filled.token_ids) == limit
        for call in (client.embed("a"), client.classify("a"), client.fill_mask("a")):
            error = await refused(call)
            assert error.code is grpc.StatusCode.UNIMPLEMENTED
            assert "a decoder-only model" in error.message
        described = await client.get_model()
        assert (described.architecture, list(described.tasks)) == (pb.ARCHITECTURE_DECODER, [])
        assert (described.limits.max_source_len, described.limits.max_target_len) == (limit - 1, limit)
        assert described.cache.num_blocks * described.cache.block_tokens >= limit


async def refused(call: Any) -> ServerError:
    with pytest.raises(ServerError) as caught:
        await call
    return caught.value
