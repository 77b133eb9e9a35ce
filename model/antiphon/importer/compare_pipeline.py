"""Comparison of an imported encoder with the original's pipeline in transformers: whole answers to a few texts.

The pipeline is that of the checkpoint's head: text classification, token classification, masked tokens, else feature
extraction. A declared embedding is computed from extracted features in PyTorch, as sentence-transformers computes it.
As in original.py the original runs first and is freed.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import Pooling, Task
from antiphon.checkpoints.adapter import Adapter
from antiphon.checkpoints.sentence_transformers import declared_scores
from antiphon.checkpoints.settings import in_one_line
from antiphon.errors import VerificationError
from antiphon.export.verify import TOLERANCES
from antiphon.importer.original import load_original, quiet_transformers
from antiphon.ops.readout import finished, pool, scores_of
from antiphon.text.format import TextFormat, fill, num_before
from antiphon.text.tokenizer import Tokenizer
from antiphon.transformer.transformer import Transformer

_TEXTS = ("the cat sat on the mat", "It costs 1,234.50 €, naïve?", "a", "two words\nand a line, 3 numbers: 1 2 3")
_PAIR = ("the cat sat on the mat", "a dog ran")
_MASKED = "the {} sat on the mat"
_TOLERANCE = TOLERANCES["float32"].max_error
_Floats = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineAnswer:
    """Answer of a pipeline to a text or a pair.

    task: head that answers; None: the states of all tokens.
    values: scores of `labels`, or states [S, M].
    labels: for classify the names of all labels, sorted; for tag the best label of each token, with its first and last
        code point; for fill_mask the ids of the best tokens.
    """

    task: Task | None
    text: str
    pair: str | None = None
    values: _Floats
    labels: Sequence[Any] = ()


@torch.no_grad()
def run_pipeline(
    tokenizer: Any, folder: Path, reference: str, config: ModelConfig, adapter: Adapter | None = None
) -> list[PipelineAnswer]:
    """Return the answers of the original's pipeline to texts that it can read.

    tokenizer: that of transformers. reference: class of transformers that runs the original with its head. With an
    adapter there are no answers of another class than the trained one.
    Raises VerificationError with the error of transformers if the pipeline cannot run.
    """
    try:
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            original = _Original(tokenizer, folder, config, adapter)
            compared = _compared(config, reference, is_adapted=adapter is not None)
            answers = [answer for task, class_name in compared for answer in _answers(original, task, class_name)]
    except Exception as error:  # transformers raises errors of many kinds for a checkpoint that it cannot run
        raise VerificationError(
            f"transformers cannot run the pipeline of {reference}, so the import cannot be compared with it: "
            f"{in_one_line(error)}; --no-verify skips the comparison"
        ) from error
    gc.collect()
    return answers


class _Original:
    """A checkpoint in transformers, as pipelines open it."""

    def __init__(self, tokenizer: Any, folder: Path, config: ModelConfig, adapter: Adapter | None) -> None:
        self.tokenizer = tokenizer
        self.folder = folder
        self.config = config
        self._adapter = adapter

    def pipeline(self, kind: str, class_name: str) -> Any:
        """Return a pipeline with the original as this class. Names of an adapter's labels are those that we read."""
        import transformers

        model = load_original(self.folder, class_name, self.config, self._adapter)
        labels = [head.labels for head in self.config.heads if head.task in ("classify", "tag")]
        if self._adapter is not None and labels:
            model.config.id2label = dict(enumerate(labels[0]))
        make: Any = getattr(transformers, f"{kind}Pipeline")
        return make(model=model, tokenizer=self.tokenizer, device="cpu")

    def readable(self, *texts: str) -> bool:
        """Return whether the original has a row for each token and each position, and takes no token as padding."""
        ids = self.tokenizer(*texts).input_ids
        is_known = max(ids) < self.config.vocab_size and self.config.pad_id not in ids
        return is_known and len(ids) <= self.config.max_source_len

    def texts(self) -> list[str]:
        """Return the readable texts, each with the default prompt."""
        embedding = self.config.embedding
        prompt = (embedding.prompt if embedding is not None else None) or ""
        texts = [prompt + text for text in _TEXTS]
        return [text for text in texts if self.readable(text)]


def _compared(config: ModelConfig, reference: str, *, is_adapted: bool) -> Iterator[tuple[Task | None, str]]:
    """Yield the tasks of the pipelines, None for feature extraction, each with the class of the original."""
    tasks = {head.task for head in config.heads}
    if labelled := [head.task for head in config.heads if head.task in ("classify", "tag")]:
        yield labelled[0], reference
    elif "fill_mask" in tasks and reference.endswith("ForMaskedLM"):
        yield "fill_mask", reference
    elif "fill_mask" in tasks and reference.endswith("ForPreTraining") and not is_adapted:
        yield "fill_mask", "AutoModelForMaskedLM"
    if config.embedding is None and not tasks <= {"pool"}:
        return
    if reference.endswith("Model"):
        yield None, reference
    elif not is_adapted:
        yield None, "AutoModel"


def _answers(original: _Original, task: Task | None, class_name: str) -> Iterator[PipelineAnswer]:
    """Yield the answers of the pipeline of a task to the texts that the original can read."""
    if task is None:
        extract = original.pipeline("FeatureExtraction", class_name)
        for text in original.texts():
            states = extract(text, return_tensors=True)[0]
            yield PipelineAnswer(task=None, text=text, values=states.numpy())
    elif task == "fill_mask":
        mask = original.tokenizer.mask_token
        if mask and original.readable(text := _MASKED.format(mask)):
            best = original.pipeline("FillMask", class_name)(text)
            labels = [entry["token"] for entry in best]
            yield PipelineAnswer(task=task, text=text, labels=labels, values=_scores(best))
    elif task == "tag":
        tag = original.pipeline("TokenClassification", class_name)
        for text in original.texts():
            best = tag(text, ignore_labels=[])
            spans = [(entry["entity"], entry["start"], entry["end"]) for entry in best]
            yield PipelineAnswer(task=task, text=text, labels=spans, values=_scores(best))
    else:
        classify = original.pipeline("TextClassification", class_name)
        pairs = [_PAIR] if original.readable(*_PAIR) else []
        for text, *pair in [*((text,) for text in original.texts()), *pairs]:
            asked = {"text": text, "text_pair": pair[0]} if pair else text
            entries = classify(asked, top_k=None, function_to_apply=declared_scores(original.folder))
            yield _classified(((entry["label"], entry["score"]) for entry in entries), text, *pair)


def _scores(entries: Sequence[dict[str, Any]]) -> _Floats:
    return np.array([entry["score"] for entry in entries])


def _classified(entries: Iterable[tuple[str, float]], text: str, pair: str | None = None) -> PipelineAnswer:
    """Return all labels with their scores in the order of their names."""
    labels, scores = zip(*sorted(entries), strict=True)
    return PipelineAnswer(task="classify", text=text, pair=pair, labels=labels, values=np.array(scores))


@torch.no_grad()
def compare_pipeline(
    model: Transformer, tokenizer: Tokenizer, text: TextFormat, answers: Sequence[PipelineAnswer]
) -> None:
    """Compare the answers of our model to the same texts. Raises VerificationError naming a text and both answers."""
    for answer in answers:
        ours, expected = _ours(model, tokenizer, text, answer), answer
        if answer.task is None and model.config.embedding is not None:
            ours, expected = _embedded(model, ours), _declared(model, expected)
        size = max(1.0, float(np.abs(expected.values).max(initial=0.0)))
        are_close = ours.values.shape == expected.values.shape and bool(
            (np.abs(ours.values - expected.values) <= _TOLERANCE * size).all()
        )
        if [*ours.labels] != [*expected.labels] or not are_close:
            raise VerificationError(
                f"the imported model differs from the original: for {answer.text!r}"
                f"{'' if answer.pair is None else f' and {answer.pair!r}'} the pipeline of transformers gives "
                f"{_shown(expected)}, and the import {_shown(ours)}; --no-verify skips the comparison"
            )


def _shown(answer: PipelineAnswer) -> str:
    values = np.array2string(answer.values.ravel()[:6], precision=5)
    return f"{f'{[*answer.labels[:6]]} ' if len(answer.labels) else ''}{values} of shape {list(answer.values.shape)}"


def _ours(model: Transformer, tokenizer: Tokenizer, text: TextFormat, answer: PipelineAnswer) -> PipelineAnswer:
    """Return our model's answer in place of the original's.

    Of labels with equal scores, the original's is the best one here too.
    """
    encoding = tokenizer.encode_source(answer.text)
    pair = None if answer.pair is None else tokenizer.encode(answer.pair)
    states = _states(model, text, encoding.ids, pair)
    if answer.task is None:
        return PipelineAnswer(task=None, text=answer.text, values=states.numpy())
    first, ends = num_before(text), num_before(text) + len(encoding.ids)
    masks = [index for index, token_id in enumerate(encoding.ids, first) if token_id == text.mask_id]
    rows = {"classify": [0], "tag": range(first, ends), "fill_mask": masks[:1]}[answer.task]
    head = next(head for head in model.config.heads if head.task == answer.task)
    scores = scores_of(model.read_out(answer.task, states[list(rows)]).numpy(), head.scores)
    if answer.task == "classify":
        return _classified(zip(head.labels, scores[0].tolist(), strict=True), answer.text, answer.pair)
    if answer.task == "fill_mask":
        return _at(answer, answer.labels, scores[0, list(answer.labels)] if len(scores) else np.empty(0))
    best = scores.argmax(axis=1).tolist()
    for row, (name, *_) in enumerate(answer.labels[: len(best)]):
        same = head.labels.index(name)
        best[row] = same if scores[row].max() - scores[row, same] < _TOLERANCE else best[row]
    labels = [(head.labels[index], *offset) for index, offset in zip(best, encoding.offsets, strict=True)]
    return _at(answer, labels, scores[range(len(best)), best])


def _at(answer: PipelineAnswer, labels: Sequence[Any], values: _Floats) -> PipelineAnswer:
    return PipelineAnswer(task=answer.task, text=answer.text, labels=labels, values=values)


def _states(model: Transformer, text: TextFormat, ids: Sequence[int], pair: Sequence[int] | None) -> Tensor:
    """Return the states [S, M] of a text or a pair."""
    filled, types = fill(text, ids, pair)
    kinds = torch.tensor([types]) if model.config.token_types else None
    return model.encode(torch.tensor([filled]), None, kinds)[0]


def _embedded(model: Transformer, states: PipelineAnswer) -> PipelineAnswer:
    """Return the declared embedding of states as a server computes it."""
    embedding = model.config.embedding
    assert embedding is not None
    vector = pool(states.values.astype(np.float32), embedding.poolings)
    if "embed" in model.heads:
        vector = model.read_out("embed", torch.from_numpy(vector.astype(np.float32))[None])[0].numpy().astype(float)
    return _at(states, (), finished(vector, embedding))


def _declared(model: Transformer, states: PipelineAnswer) -> PipelineAnswer:
    """Return the declared embedding of the original's states as sentence-transformers computes it."""
    embedding = model.config.embedding
    assert embedding is not None
    values = torch.from_numpy(states.values)
    vector = torch.cat([_pooled(values, pooling) for pooling in embedding.poolings])
    if "embed" in model.heads:
        vector = model.read_out("embed", vector[None])[0]
    vector = torch.nn.functional.normalize(vector, dim=0) if embedding.normalize else vector
    return _at(states, (), vector[: embedding.width].numpy())


def _pooled(states: Tensor, pooling: Pooling) -> Tensor:
    """Return one pooling [M] of states [S, M]; formulas of the module Pooling of sentence-transformers."""
    places = torch.arange(1, len(states) + 1, dtype=states.dtype)[:, None]
    pooled: dict[Pooling, Tensor] = {
        "cls": states[0],
        "max": states.max(dim=0).values,
        "mean": states.mean(dim=0),
        "mean_sqrt_len_tokens": states.sum(dim=0) / len(states) ** 0.5,
        "weightedmean": (states * places).sum(dim=0) / places.sum(),
        "lasttoken": states[-1],
    }
    return pooled[pooling]
