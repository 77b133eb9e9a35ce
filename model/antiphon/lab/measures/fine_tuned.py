"""Fine-tuning of a pre-trained encoder on labelled texts, and its scores."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from antiphon.checkpoints.checkpoint import load_checkpoint
from antiphon.training.recipe import FineTuneRecipe
from antiphon.training.task import Group
from antiphon.training.trainer import Trainer


def fine_tune(recipe: FineTuneRecipe, data: Path, averaged: Path, *, keep_weights: bool = True) -> Path:
    """Fine-tune the checkpoint `averaged`, once for each recipe, in a folder beside it; return the new checkpoint.

    keep_weights: False: begin with random weights of the same shape.
    """
    described = f"{recipe.model_dump_json(exclude_defaults=True)}|{keep_weights}"
    folder = averaged.with_name(f"{recipe.name}.{hashlib.sha256(described.encode()).hexdigest()[:8]}")
    if not (folder / "averaged" / "scores.json").is_file():
        init = load_checkpoint(averaged)
        Trainer(recipe, data, folder, Group.join(), init=init, keep_weights=keep_weights).run()
    return folder / "averaged"


def score_of(fine_tuned: Path) -> float:
    """Return the accuracy of a classifier or the F1 of a tagger on its test part, in percent."""
    scores = json.loads((fine_tuned / "scores.json").read_text(encoding="utf-8"))
    return 100 * float(scores["accuracy"] if "accuracy" in scores else scores["f1"])
