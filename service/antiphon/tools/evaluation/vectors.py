"""`antiphon evaluate --text` for encoder-only models: cosine between the vectors of integer graphs and of float32."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.bundle.manifest import Bundle
from antiphon.domain.request import Arrival, Pooling, Request, Task
from antiphon.runtime.native import EncoderRunner
from antiphon.text.format import fill
from antiphon.text.tokenizer import open_tokenizer
from antiphon.tools.offline import answer_all

Vectors = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorScore:
    """Cosine between the vectors of one system and those of float32: mean and least of the texts.

    tokens: of all scored texts, which ran at tokens_per_s. skipped: number of texts that are blank or too long for the
    model.
    """

    system: str
    mean_cosine: float
    least_cosine: float
    texts: int
    tokens: int
    tokens_per_s: float
    skipped: int

    @property
    def row(self) -> str:
        """Return the score as one line."""
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return (
            f"{self.system:<24} cosine to float32 {self.mean_cosine:.5f} on average, {self.least_cosine:.5f} at least  "
            f"{self.tokens} tokens of {self.texts} texts{skipped}  {self.tokens_per_s:,.0f} tokens/s"
        )


def evaluate_vectors(
    bundle: Bundle, reference: EncoderRunner, runners: Sequence[EncoderRunner], texts: Sequence[str]
) -> list[VectorScore]:
    """Compare the vectors of each runner, as Embed returns them by default, with those of `reference`."""
    requests = _embed_requests(bundle, texts)
    tokens = sum(len(request.source_ids) for request in requests)
    expected = _vectors(reference, requests)
    scores = []
    for runner in runners:
        _vectors(runner, requests[:1])  # not timed: the first run allocates
        started = time.perf_counter()
        vectors = _vectors(runner, requests)
        seconds = time.perf_counter() - started
        cosines = _cosines(vectors, expected)
        score = VectorScore(
            system=f"antiphon {runner.facts.precision}",
            mean_cosine=float(cosines.mean()),
            least_cosine=float(cosines.min()),
            texts=len(requests),
            tokens=tokens,
            tokens_per_s=tokens / seconds,
            skipped=len(texts) - len(requests),
        )
        scores.append(score)
    return scores


def _embed_requests(bundle: Bundle, texts: Sequence[str]) -> list[Request]:
    """Return a request for each text that is neither blank nor too long."""
    model, text = bundle.manifest.model, bundle.manifest.text
    prompt = (model.embedding.prompt or "") if model.embedding else ""
    encoded = open_tokenizer(bundle.path, text).encode_batch([prompt + line for line in texts if line.strip()])
    filled = [fill(text, ids) for ids in encoded]
    return [
        Request(
            task=Task.EMBED,
            arrival=Arrival(request_id=str(index), arrival_s=0.0),
            source_ids=source_ids,
            type_ids=type_ids,
            pooling=Pooling.DECLARED if model.embedding else Pooling.MEAN,
        )
        for index, (source_ids, type_ids) in enumerate(filled)
        if len(source_ids) <= model.max_source_len
    ]


def _vectors(runner: EncoderRunner, requests: Sequence[Request]) -> Vectors:
    events = asyncio.run(answer_all(runner, requests, unit="text"))
    return np.stack([event.encoder_outputs.values for event in events if event.encoder_outputs])


def _cosines(first: Vectors, second: Vectors) -> NDArray[np.float64]:
    lengths = np.linalg.norm(first, axis=1).astype(np.float64) * np.linalg.norm(second, axis=1)
    cosines: NDArray[np.float64] = (first.astype(np.float64) * second).sum(axis=1) / lengths
    return cosines
