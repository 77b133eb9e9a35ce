"""Encoder-only checkpoints with each kind of head: the model in transformers and its bundle, imported once."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from antiphon.importer.importer import ImportOptions, import_checkpoint
from tests.bundle_serving import serving_bundle
from tests.kept_models import kept_model
from tests.parity.encoder_checkpoints import write_checkpoint

SIZES: dict[str, Any] = dict(
    vocab_size=19, hidden_size=36, num_hidden_layers=1, num_attention_heads=3, intermediate_size=50,
    max_position_embeddings=40,
)  # fmt: skip
NAMES = {0: "O", 1: "B-ANIMAL", 2: "I-ANIMAL", 3: "B-PLACE"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "pretraining": ("BertForPreTraining", {}),
    "classify": ("BertForSequenceClassification", dict(id2label={0: "low", 1: "middle", 2: "high"})),
    "one_label": ("BertForSequenceClassification", dict(num_labels=1)),
    "several_labels": ("BertForSequenceClassification", dict(num_labels=3, problem_type="multi_label_classification")),
    "regression": ("BertForSequenceClassification", dict(num_labels=1, problem_type="regression")),
    "tag": ("BertForTokenClassification", dict(id2label=NAMES)),
}


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Checkpoint of transformers and its bundle."""

    folder: Path
    model: Any
    tokenizer: Any
    bundle: Path

    def pipeline(self, task: str, **settings: Any) -> Any:
        make: Any = transformers.pipeline
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(task, model=self.model, tokenizer=self.tokenizer, device="cpu", **settings)


def import_heads() -> dict[str, Imported]:
    """Return a model of every kind; nobody may change their files."""
    return {kind: _imported(kind) for kind in KINDS}


def _imported(kind: str) -> Imported:
    folder = kept_model(f"head-{kind}", lambda folder: _write(folder, kind))
    checkpoint = folder / "checkpoint"
    model = getattr(transformers, KINDS[kind][0]).from_pretrained(checkpoint).eval()
    load: Any = transformers.PreTrainedTokenizerFast
    named = {f"{part}_token": f"[{part.upper()}]" for part in ("pad", "unk", "cls", "sep", "mask")}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = load(tokenizer_file=str(checkpoint / "tokenizer.json"), model_input_names=inputs, **named)
    return Imported(folder=checkpoint, model=model, tokenizer=tokenizer, bundle=folder / "bundle")


def _write(folder: Path, kind: str) -> None:
    name, settings = KINDS[kind]
    checkpoint = folder / "checkpoint"
    model = write_checkpoint(checkpoint, transformers.BertConfig(**SIZES, **settings), name)
    if kind == "tag":  # so that the labels of the texts differ
        with torch.no_grad():
            model.classifier.weight.mul_(8)
            model.classifier.bias.zero_()
        model.save_pretrained(checkpoint)
    import_checkpoint(
        ImportOptions(source=str(checkpoint), target=folder / "bundle", precisions=("float32",), explain=False)
    )


def serving(bundles: dict[str, Imported], kind: str) -> Any:
    return serving_bundle(bundles[kind].bundle)
