"""NextToken compared with transformers stage by stage, and with the tokens and log-probabilities that Generate gives.

The reference applies transformers' own processors and warpers, one more for each stage, to the logits of its own model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from antiphon.bundle.manifest import Bundle
from antiphon.client import AsyncClient, Generation, NextToken, Options
from antiphon.importer.importer import ImportOptions, import_checkpoint
from antiphon.ops.logits_warpers import invert
from antiphon.ops.sampling import uniform_at
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.v1 import inference_pb2 as pb
from tests.bundle_serving import serving_bundle
from tests.marks import marked
from tests.parity.decoder_checkpoints import write_decoder
from tests.parity.seq2seq_checkpoints import save

STAGES = ("model", "logits_processors", "temperature", "top_k", "top_p", "min_p", "typical_p")
PREFIX, GENERATED = (7, 10, 7), (12, 30, 12, 9)
SOURCE = (8, 30, 5, 61, 12, 7, 40)

PENALTIES: dict[str, Any] = dict(repetition_penalty=1.7, logit_bias={6: 1.5, 8: -1.0, 12: 0.7}, suppressed_ids=(4, 12))
CASES: dict[str, dict[str, Any]] = {
    "nothing": dict(temperature=1.0),
    "cold": dict(temperature=0.6),
    "top_k": dict(temperature=1.5, top_k=9),
    "top_p": dict(temperature=1.3, top_p=0.8),
    "min_p": dict(temperature=1.5, min_p=0.1),
    "typical_p": dict(temperature=1.2, typical_p=0.7),
    "penalties": dict(temperature=1.0, **PENALTIES),
    "constraints": dict(temperature=1.6, no_repeat_ngram_size=1, min_new_tokens=6),
    "everything": dict(
        temperature=1.4, top_k=60, top_p=0.95, min_p=0.01, typical_p=0.9, no_repeat_ngram_size=2, min_new_tokens=5,
        **PENALTIES,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Imported:
    """An imported bundle, and transformers' logits of its checkpoint after a source, or prompt, and a target."""

    bundle: Bundle
    begin: tuple[int, ...]
    logits_of: Callable[[Sequence[int]], Tensor]


@pytest.fixture(scope="module", params=marked(["t5", "gpt2"], "combinations", but=["t5"]))
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "gpt2":
        theirs = write_decoder(folder / "theirs", "gpt2")
        begin: tuple[int, ...] = SOURCE  # the prompt begins the target
        logits_of: Callable[[Sequence[int]], Tensor] = lambda target: theirs(torch.tensor([target])).logits  # noqa: E731
    else:
        save(folder / "theirs", request.param)
        theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "theirs").eval()
        begin = (theirs.config.decoder_start_token_id,)
        source = torch.tensor([[*SOURCE, theirs.config.eos_token_id]])
        logits_of = lambda target: theirs(input_ids=source, decoder_input_ids=torch.tensor([target])).logits  # noqa: E731
    options = ImportOptions(
        source=str(folder / "theirs"), target=folder / "ours", precisions=("float32",), explain=False
    )
    return Imported(bundle=import_checkpoint(options), begin=begin, logits_of=logits_of)


def expected_stages(imported: Imported, controls: dict[str, Any]) -> dict[str, Tensor]:
    """Return the log-probabilities [V] after each stage, by transformers."""
    target = (*imported.begin, *PREFIX, *GENERATED)
    with torch.no_grad():
        logits = imported.logits_of(target)[:, -1].double()
    found, seen = {"model": logits}, cast(torch.LongTensor, torch.tensor([target]))
    defaults = {"suppressed_ids": imported.bundle.manifest.generation.suppressed_ids}
    num_given, eos_id = len(imported.begin) + len(PREFIX), imported.bundle.manifest.model.eos_id
    processors = _processors(defaults | controls, num_given, eos_id)
    for stage, steps in processors.items():
        logits = transformers.LogitsProcessorList(steps)(seen, cast(torch.FloatTensor, logits))
        found[stage] = logits
    return {stage: values[0].log_softmax(dim=-1) for stage, values in found.items()}


def _processors(controls: dict[str, Any], num_given: int, eos_id: int) -> dict[str, list[Any]]:
    """Return the processors of each stage in transformers' order; none for controls that are absent."""
    biases = {(token_id,): bias for token_id, bias in controls.get("logit_bias", {}).items()}
    edits: list[tuple[Any, ...]] = [
        (transformers.SequenceBiasLogitsProcessor, "logit_bias", biases),
        (transformers.RepetitionPenaltyLogitsProcessor, "repetition_penalty", controls.get("repetition_penalty")),
        (transformers.NoRepeatNGramLogitsProcessor, "no_repeat_ngram_size", controls.get("no_repeat_ngram_size")),
        (
            transformers.MinNewTokensLengthLogitsProcessor,
            "min_new_tokens",
            num_given,
            controls.get("min_new_tokens"),
            eos_id,
        ),
        (transformers.SuppressTokensLogitsProcessor, "suppressed_ids", list(controls["suppressed_ids"])),
    ]
    warpers = {
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
        "typical_p": transformers.TypicalLogitsWarper,
    }
    return {
        "logits_processors": [make(*arguments) for make, name, *arguments in edits if name in controls],
        **{name: [make(controls[name])] if name in controls else [] for name, make in warpers.items()},
    }


@pytest.mark.parametrize("name", CASES)
async def test_every_stage_has_the_distribution_of_transformers(imported: Imported, name: str) -> None:
    expected = expected_stages(imported, CASES[name])
    async with serving_bundle(imported.bundle.path) as served:
        options = Options(prefix_ids=PREFIX, **CASES[name])
        found = await served.client.next_token(SOURCE, options, generated_ids=GENERATED, num_tokens=1000)
    assert tuple(stage.name for stage in found.stages) == STAGES
    assert sorted(found.token_ids) == list(range(imported.bundle.manifest.model.vocab_size))
    for stage in found.stages:
        reference = expected[stage.name][list(found.token_ids)]
        # Two implementations of a model in float32; the references of the stages compute in float64.
        torch.testing.assert_close(torch.tensor(stage.logprobs).double(), reference, atol=1e-5, rtol=0)
        assert stage.num_kept == int((reference > -torch.inf).sum())
        assert stage.entropy == pytest.approx(float(torch.special.entr(reference.exp()).sum()), abs=1e-4)


async def test_forced_token_and_greedy_decoding_leave_one_token(imported: Imported) -> None:
    async with serving_bundle(imported.bundle.path) as served:
        forced = await served.client.next_token(SOURCE, Options(prefix_ids=PREFIX, temperature=1.0, forced_first_id=9))
        greedy = await served.client.next_token(SOURCE, Options(prefix_ids=PREFIX))
        chosen = await served.client.generate_text(SOURCE, Options(prefix_ids=PREFIX, max_new_tokens=1, num_logprobs=0))
    for found, token_id, first_stage in ((forced, 9, 1), (greedy, chosen.logprobs[0].token_id, 2)):
        for stage in found.stages[first_stage:]:
            assert (stage.num_kept, stage.entropy, kept_of(found, stage.name)) == (1, 0.0, {token_id: 0.0})


def kept_of(found: NextToken, stage_name: str) -> dict[int, float]:
    """Return the tokens that a stage kept with their log-probabilities, by rising id."""
    (stage,) = (one for one in found.stages if one.name == stage_name)
    logprobs = dict(zip(found.token_ids, stage.logprobs, strict=True))
    return {token_id: logprobs[token_id] for token_id in sorted(logprobs) if logprobs[token_id] > -np.inf}


@dataclass(frozen=True, kw_only=True)
class Model:
    """Client of a served bundle, and sources for it."""

    client: AsyncClient
    sources: Sequence[Any]


@pytest.fixture(
    params=marked(["shipped_int8", "float32", "int8", "decoder_only"], "combinations", but=["shipped_int8"])
)
async def model(request: pytest.FixtureRequest) -> AsyncIterator[Model]:
    path, settings = SHIPPED_BUNDLE, {}
    if request.param == "decoder_only":
        path = request.getfixturevalue("llama").path
    elif request.param != "shipped_int8":
        path, settings = request.getfixturevalue("bundle").path, {"precision": request.param}
    sources: Sequence[Any] = (
        ("How are you?", "We were tired after the long journey.") if path == SHIPPED_BUNDLE else (SOURCE, (9,))
    )
    async with serving_bundle(path, **settings) as served:
        yield Model(client=served.client, sources=sources)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("llama")
    write_decoder(folder / "theirs", "llama")
    return import_checkpoint(
        ImportOptions(source=str(folder / "theirs"), target=folder / "ours", precisions=("float32",), explain=False)
    )


SAMPLED: dict[str, Any] = dict(temperature=1.3, top_k=50, top_p=0.95, min_p=0.02, typical_p=0.95)
PENALISED: dict[str, Any] = dict(
    repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2, no_repeat_ngram_size=2
)


async def steps_of(
    model: Model, source: Any, controls: dict[str, Any], seed: int = 0
) -> list[tuple[Generation, int, NextToken]]:
    """Return an answer of Generate with the index of each of its tokens and the NextToken before it."""
    written = await model.client.generate_text(
        source, Options(max_new_tokens=8, num_logprobs=20, seed=seed, **controls)
    )
    found = []
    for index in range(len(written.logprobs)):
        given = written.token_ids[:index]
        following = await model.client.next_token(source, Options(**controls), generated_ids=given, num_tokens=1000)
        found.append((written, index, following))
    return found


@pytest.mark.parametrize("controls", [{}, PENALISED, SAMPLED | PENALISED], ids=["greedy", "penalised", "sampled"])
async def test_log_probabilities_have_the_bits_of_generate(model: Model, controls: dict[str, Any]) -> None:
    for source in model.sources:
        for written, index, found in await steps_of(model, source, controls):
            entry, logprobs = written.logprobs[index], kept_of(found, "model")
            assert logprobs[entry.token_id] == entry.logprob
            assert len(entry.alternatives) == 20
            assert {token_id: logprobs[token_id] for token_id, _ in entry.alternatives} == dict(entry.alternatives)
            # Alternatives are those of the highest rank after the processors, best first.
            processed = kept_of(found, "logits_processors")
            ranks = [processed[token_id] for token_id, _ in entry.alternatives]
            assert ranks == sorted(ranks, reverse=True)
            assert ranks == sorted(processed.values(), reverse=True)[:20]


@pytest.mark.parametrize("controls", [SAMPLED, SAMPLED | PENALISED, dict(temperature=0.7, top_k=900)], ids=str)
async def test_sampled_tokens_are_those_that_the_last_stage_gives_for_their_random_numbers(
    model: Model, controls: dict[str, Any]
) -> None:
    for seed in range(6):
        for written, index, found in await steps_of(model, model.sources[0], controls, seed):
            kept = kept_of(found, "typical_p")
            chosen = written.logprobs[index].token_id
            assert chosen in kept
            assert found.stages[-1].num_kept == len(kept)
            position = written.usage.source_tokens - 1 + index if await is_decoder_only(model) else index
            drawn = invert(np.exp(np.array(list(kept.values()))), uniform_at(seed, position))
            assert list(kept)[drawn] == chosen


async def is_decoder_only(model: Model) -> bool:
    return (await model.client.get_model()).architecture == pb.ARCHITECTURE_DECODER


async def test_next_token_beside_a_busy_engine_changes_no_answer(model: Model) -> None:
    def options(seed: int) -> Options:
        return Options(max_new_tokens=12, num_logprobs=3, seed=seed, ignore_eos=True, **SAMPLED)

    async def answers() -> list[Any]:
        made = await asyncio.gather(
            *(model.client.generate_text(model.sources[0], options(seed)) for seed in range(12))
        )
        return [(one.token_ids, one.logprobs) for one in made]

    async def following() -> list[NextToken]:
        return [await model.client.next_token(model.sources[0], generated_ids=GENERATED[:n]) for n in range(4)]

    alone, following_alone = await answers(), await following()
    together, following_together = await asyncio.gather(answers(), following())
    assert together == alone
    assert following_together == following_alone
