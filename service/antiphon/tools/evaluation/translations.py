"""`antiphon evaluate` for models that translate: BLEU and chrF of a test set, by sacreBLEU.

A system is a function that decodes, opened by evaluate.py or checkpoints.py, or a running server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from tqdm import tqdm

from antiphon.cli.connection_flags import ClientArguments
from antiphon.client import Client, Generation, Options, ServerError
from antiphon.domain.request import Arrival, Request, Task
from antiphon.domain.sampling_params import SamplingParams
from antiphon.rpc.v1.languages import RequestLanguages
from antiphon.runtime.lanes import AnyRunner
from antiphon.text.format import LanguageIds, TextFormat
from antiphon.text.tokenizer import Tokenizer, encode_sources
from antiphon.tools.offline import answer_all
from antiphon.training.corpus import Pair

Decode = Callable[[Sequence[list[int]]], list[list[int]]]

_NO_LANGUAGES = RequestLanguages()
_GREEDY = SamplingParams()


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Score of one system on one test set. sacreBLEU computes bleu and chrf; tokens_per_s counts target tokens.

    equal: percentage of translations that equal their reference. candidates: mean number of tokens that a source's
    shortlist allows; 0 without a shortlist.
    """

    system: str
    bleu: float
    chrf: float
    equal: float
    candidates: float
    sentences: int
    too_long: int
    seconds: float
    tokens_per_s: float
    bleu_signature: str

    @property
    def row(self) -> str:
        """Return the score as one line."""
        left_out = f", {self.too_long} too long" if self.too_long else ""
        candidates = f"{self.candidates:,.0f} candidates  " if self.candidates else ""
        return (
            f"{self.system:<24} BLEU {self.bleu:5.2f}  chrF {self.chrf:5.2f}  equal {self.equal:.1f} %  "
            f"{self.sentences} sentences{left_out}  {candidates}{self.tokens_per_s:,.0f} tokens/s  "
            f"{self.bleu_signature}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Translations of a test set, and what they took. num_tokens: end tokens included. candidates: as in Score."""

    texts: list[str]
    num_too_long: int
    num_tokens: int
    seconds: float
    candidates: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TestSet:
    """Sources with references. is_tokenised: the text is already tokenised; scoring must not tokenise it again."""

    pairs: list[Pair]
    is_tokenised: bool


@dataclass(frozen=True, slots=True)
class Reader:
    """Conversion between texts and ids of one model. languages: None uses the model's default languages."""

    tokenizer: Tokenizer
    text: TextFormat
    max_source_len: int
    languages: LanguageIds | None = None


async def run_engine(
    runner: AnyRunner,
    sources: Sequence[list[int]],
    params: SamplingParams = _GREEDY,
    languages: RequestLanguages = _NO_LANGUAGES,
) -> list[list[int]]:
    """Submit all sources (ids as the model reads them) at once; return the target ids of the best outputs, in order."""
    requests = [
        Request(
            task=Task.GENERATE,
            is_streamed=True,
            arrival=Arrival(request_id=str(index), arrival_s=0.0),
            source_ids=tuple(source),
            begin_id=languages.begin_id,
            params=languages.params(params, ()),
        )
        for index, source in enumerate(sources)
    ]
    return [list(event.token_ids) for event in await answer_all(runner, requests, unit="sentence")]


def in_batches(sources: Sequence[list[int]], rows: int, decode: Decode) -> list[list[int]]:
    """Decode in batches of sources of similar length. Return the results in the order of the sources."""
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    results: dict[int, list[int]] = {}
    for start in tqdm(range(0, len(order), rows), unit="batch", disable=None):
        part = order[start : start + rows]
        results.update(zip(part, decode([sources[index] for index in part]), strict=True))
    return [results[index] for index in range(len(sources))]


def score_system(system: str, decode: Decode, reader: Reader, test_set: TestSet, output: Path | None) -> Score:
    """Decode a test set and score it. Write the translations to `output`, one per line, unless it is None."""
    texts = [source for source, _ in test_set.pairs]
    encoded = encode_sources(reader.tokenizer, reader.text, texts, reader.languages)
    # A source that is too long counts as an empty translation: skipping it would improve the score.
    fitting = [index for index, ids in enumerate(encoded) if 0 < len(ids) <= reader.max_source_len]
    started = time.perf_counter()
    targets = decode([encoded[index] for index in fitting])
    seconds = time.perf_counter() - started
    hypotheses = [""] * len(encoded)
    for index, ids in zip(fitting, targets, strict=True):
        hypotheses[index] = reader.tokenizer.decode(ids)
    answers = Answers(
        texts=hypotheses,
        num_too_long=len(encoded) - len(fitting),
        num_tokens=sum(len(ids) + 1 for ids in targets),
        seconds=seconds,
    )
    return score_answers(system, answers, test_set, output)


def score_answers(system: str, answers: Answers, test_set: TestSet, output: Path | None) -> Score:
    """Score the translations of a test set, and write them to `output`, one per line, unless it is None."""
    if output is not None:
        output.write_text("".join(f"{line}\n" for line in answers.texts), encoding="utf-8")
    references = [reference for _, reference in test_set.pairs]
    num_equal = sum(text == reference for text, reference in zip(answers.texts, references, strict=True))
    bleu = BLEU(tokenize="none" if test_set.is_tokenised else "13a", force=test_set.is_tokenised)
    result = bleu.corpus_score(answers.texts, [references])
    return Score(
        system=system,
        bleu=round(result.score, 2),
        chrf=round(CHRF().corpus_score(answers.texts, [references]).score, 2),
        equal=round(100 * num_equal / len(references), 2),
        candidates=round(answers.candidates, 1),
        sentences=len(answers.texts),
        too_long=answers.num_too_long,
        seconds=round(answers.seconds, 2),
        tokens_per_s=round(answers.num_tokens / answers.seconds, 1),
        bleu_signature=str(bleu.get_signature()),
    )


def evaluate_server(
    target: str,
    languages: tuple[str, str],
    terms: ClientArguments,
    options: Options,
    test_set: TestSet,
    output: Path | None,
) -> Score:
    """Score the translations of a server's default model.

    languages: of the sources and of the translations; empty takes the model's. options: of every request. A source that
    the server refuses as too long counts as an empty translation. Raises ServerError for any other refusal, ValueError
    for a wrong connection.
    """
    sources = [source for source, _ in test_set.pairs]
    with Client(target, source_language=languages[0], target_language=languages[1], **terms) as client:
        name = client.get_model().name
        started = time.perf_counter()
        results = list(tqdm(client.generate_many(sources, options), total=len(sources), unit="sentence", disable=None))
        seconds = time.perf_counter() - started
    refused = [result for result in results if isinstance(result, ServerError)]
    if failures := [error for error in refused if error.code is not grpc.StatusCode.INVALID_ARGUMENT]:
        raise failures[0]
    answered = [result for result in results if isinstance(result, Generation)]
    answers = Answers(
        texts=[result.text if isinstance(result, Generation) else "" for result in results],
        num_too_long=len(refused),
        num_tokens=sum(result.usage.generated_tokens for result in answered),
        seconds=seconds,
        candidates=sum(result.usage.candidate_tokens for result in answered) / max(len(answered), 1),
    )
    return score_answers(f"{name} at {target}", answers, test_set, output)
