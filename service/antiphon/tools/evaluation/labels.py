"""`antiphon evaluate` for encoders with labels: accuracy of texts, or F1 of entities, on a fine-tuning recipe's data.

The bundle runs in the same engine as in the server, without the network.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.bundle.manifest import Bundle, Measure
from antiphon.domain.request import Arrival, EncoderOutputs, Request, Task
from antiphon.errors import RecipeError
from antiphon.runtime.native import EncoderRunner
from antiphon.text.format import fill, num_before
from antiphon.text.tokenizer import open_tokenizer
from antiphon.tools.offline import answer_all
from antiphon.training.corpus import Labelled, Part, Tagged, read_labelled, read_parts, read_tagged
from antiphon.training.recipe import FineTuneRecipe
from antiphon.training.scores import first_tags, span_score, words_of_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelScore:
    """Score of one system on a test set. value: accuracy of texts, or F1 of entities with its precision and recall."""

    system: str
    measure: str
    value: float
    precision: float | None = None
    recall: float | None = None
    texts: int
    seconds: float

    @property
    def quality(self) -> tuple[Measure, float]:
        """Return the measure and the value that a manifest records."""
        return ("accuracy" if self.measure == "accuracy" else "f1"), self.value

    @property
    def row(self) -> str:
        """Return the score as one line."""
        parts = "" if self.precision is None else f" (precision {self.precision:.4f}, recall {self.recall:.4f})"
        speed = self.texts / self.seconds
        return f"{self.system:<24} {self.measure} {self.value:.4f}{parts}  {self.texts} texts  {speed:,.0f} texts/s"


def evaluate_labels(
    bundle: Bundle, runner: EncoderRunner, recipe: FineTuneRecipe, data: Path, part: Part
) -> LabelScore:
    """Score a bundle on a part of a recipe's data. Raises RecipeError if the bundle lacks the head of the task."""
    labels = {head.task: head.labels for head in bundle.manifest.model.heads}.get(recipe.task)
    if labels is None:
        raise RecipeError(f"recipe {recipe.name!r} has task {recipe.task!r}; {bundle.path} has no head for it")
    evaluation = _Evaluation(bundle, runner, labels)
    if recipe.task == "classify":
        return evaluation.classify(read_parts(data, recipe.data, read_labelled)[part])
    return evaluation.tag(read_parts(data, recipe.data, read_tagged)[part])


class _Evaluation:
    """Score of labels for texts, which are cut to the model's length as in training."""

    def __init__(self, bundle: Bundle, runner: EncoderRunner, labels: Sequence[str]) -> None:
        self._text = bundle.manifest.text
        self._tokenizer = open_tokenizer(bundle.path, self._text)
        self._room = bundle.manifest.model.max_source_len - len(self._text.template) + 1
        self._runner = runner
        self._labels = labels

    def classify(self, items: Sequence[Labelled]) -> LabelScore:
        """Measure the accuracy of texts."""
        sources = [(self._tokenizer.encode(item.text)[: self._room], (0,)) for item in items]
        outputs, seconds = self._run(Task.CLASSIFY, sources)
        right = sum(self._best(output)[0] == item.label for output, item in zip(outputs, items, strict=True))
        return LabelScore(
            system=self._system, measure="accuracy", value=right / len(items), texts=len(items), seconds=seconds
        )

    def tag(self, items: Sequence[Tagged]) -> LabelScore:
        """Measure F1 of entities. A word has the tag of its first token."""
        before = num_before(self._text)
        encodings = [self._tokenizer.encode_source(item.text) for item in items]
        ids = [encoding.ids[: self._room] for encoding in encodings]
        sources = [(tokens, tuple(range(before, before + len(tokens)))) for tokens in ids]
        outputs, seconds = self._run(Task.TAG, sources)
        words = [words_of_tokens(i.words, e.offsets)[: self._room] for i, e in zip(items, encodings, strict=True)]
        tags = [
            first_tags(of_tokens, self._best(output), len(item.words))
            for of_tokens, output, item in zip(words, outputs, items, strict=True)
        ]
        score = span_score([item.tags for item in items], tags)
        return LabelScore(
            system=self._system,
            measure="F1",
            value=score.f1,
            precision=score.precision,
            recall=score.recall,
            texts=len(items),
            seconds=seconds,
        )

    @property
    def _system(self) -> str:
        return f"antiphon {self._runner.facts.precision}"

    def _best(self, output: EncoderOutputs) -> list[str]:
        return [self._labels[best] for best in output.values.argmax(axis=1).tolist()]

    def _run(
        self, task: Task, sources: Sequence[tuple[Sequence[int], tuple[int, ...]]]
    ) -> tuple[list[EncoderOutputs], float]:
        """Run the head on each text: its tokens, and the positions to read. Return the outputs and the seconds."""
        requests = []
        for index, (ids, picks) in enumerate(sources):
            source_ids, type_ids = fill(self._text, ids)
            request = Request(
                arrival=Arrival(request_id=str(index), arrival_s=0.0),
                task=task,
                picks=picks,
                source_ids=source_ids,
                type_ids=type_ids,
            )
            requests.append(request)
        started = time.perf_counter()
        events = asyncio.run(answer_all(self._runner, requests, unit="text"))
        seconds = time.perf_counter() - started
        return [event.encoder_outputs for event in events if event.encoder_outputs is not None], seconds
