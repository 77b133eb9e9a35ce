"""`antiphon evaluate` of a running server: sends a test set over GenerateMany and scores the answers."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
from tqdm import tqdm

from antiphon.cli.connection_flags import ClientArguments
from antiphon.client import Client, Generation, Options, ServerError
from antiphon.tools.evaluation.evaluate_translations import Answers, Score, TestSet, score_answers


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
    if others := [error for error in refused if error.code is not grpc.StatusCode.INVALID_ARGUMENT]:
        raise others[0]
    answered = [result for result in results if isinstance(result, Generation)]
    answers = Answers(
        texts=[result.text if isinstance(result, Generation) else "" for result in results],
        num_too_long=len(refused),
        num_tokens=sum(result.usage.generated_tokens for result in answered),
        seconds=seconds,
    )
    return score_answers(f"{name} at {target}", answers, test_set, output)
