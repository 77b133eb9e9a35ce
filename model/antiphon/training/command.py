"""`antiphon train`: trains a recipe, or resumes its run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from antiphon.bundle.manifest import MANIFEST_NAME, load_bundle
from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint
from antiphon.errors import (
    CheckpointError,
    ModelError,
    RecipeError,
)
from antiphon.export.unpacking import unpack_checkpoint
from antiphon.training.recipe import AnyRecipe, FineTuneRecipe, PretrainRecipe, load_any_recipe
from antiphon.training.task import Group
from antiphon.training.trainer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "recipe", help="a recipe's name (tatoeba-en-de, mlm-small, shakespeare-gpt...) or the path of a TOML file"
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the recipe's data files")
    parser.add_argument("--output", type=Path, help="run folder; an existing run is resumed (default runs/RECIPE)")
    parser.add_argument(
        "--init",
        type=Path,
        metavar="CHECKPOINT",
        help="start from this checkpoint's weights, shape and tokenizer; or from a bundle's, if it translates",
    )
    parser.add_argument(
        "--random-weights", action="store_true", help="use only shape and tokenizer of --init: a baseline to compare"
    )
    parser.add_argument(
        "--teacher", type=Path, metavar="CHECKPOINT", help="encoder to learn from, for a recipe with [distillation]"
    )
    parser.add_argument("--freeze-encoder", action="store_true", help="fine-tuning: train only the new head")
    parser.add_argument(
        "--max-train-examples", type=int, metavar="N", help="fine-tuning: learn from N examples of the training part"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")


def run(args: argparse.Namespace) -> int:
    """Train; return 0 at the end, 2 after an error, with one line on standard error, 130 after an interrupt."""
    try:
        averaged = _trainer(args).run()
    except (ModelError, OSError) as error:
        print(f"antiphon train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("antiphon train: interrupted; the same command resumes from the last checkpoint", file=sys.stderr)
        return 130
    if averaged is not None:
        print(averaged)
        if (scores := averaged / "scores.json").is_file():
            print(scores.read_text(encoding="utf-8"), end="")
    return 0


def _trainer(args: argparse.Namespace) -> Trainer:
    if args.threads is not None:
        if args.threads < 1:
            raise RecipeError(f"--threads is {args.threads}; it must be at least 1")
        torch.set_num_threads(args.threads)
    recipe = load_any_recipe(args.recipe)
    if args.random_weights and args.init is None:
        raise RecipeError("--random-weights needs --init, because it uses the shape and tokenizer of --init")
    if args.freeze_encoder:
        recipe = frozen(recipe)
    if args.max_train_examples is not None:
        recipe = with_few_examples(recipe, args.max_train_examples)
    if args.teacher is not None and (not isinstance(recipe, PretrainRecipe) or recipe.distillation is None):
        raise RecipeError(f"--teacher needs a recipe with a distillation section; {recipe.name!r} has none")
    folder = args.output or Path("runs") / recipe.name
    # Tokenizer files of imported checkpoints are sometimes converted; the run copies the files to its own folder.
    with tempfile.TemporaryDirectory() as texts, tempfile.TemporaryDirectory() as teacher_texts:
        init = None if args.init is None else open_init(args.init, Path(texts))
        teacher = None if args.teacher is None else open_init(args.teacher, Path(teacher_texts))
        return Trainer(
            recipe, args.data, folder, Group.join(), init=init, keep_weights=not args.random_weights, teacher=teacher
        )


def open_init(path: Path, text_folder: Path) -> Checkpoint:
    """Open one of our checkpoints, a public one, or the model of a bundle, whose integer weights become float32.

    Raises CheckpointError, SourceError, BundleError or TokenizerError.
    """
    if (path / MANIFEST_NAME).is_file():
        return unpack_checkpoint(load_bundle(path))
    config = path / "config.json"
    if config.is_file() and b'"model_type"' in config.read_bytes():
        from antiphon.importer.importer import open_original

        checkpoint = open_original(str(path), text_folder)
        if checkpoint.config.output_cap is not None:
            raise CheckpointError(f"{path}: output_cap={checkpoint.config.output_cap} cannot be trained")
        return checkpoint
    return load_checkpoint(path)


def frozen(recipe: AnyRecipe) -> AnyRecipe:
    """Return the recipe with a frozen encoder. Raises RecipeError for a recipe other than fine-tuning."""
    return _fine_tuning(recipe, "--freeze-encoder").model_copy(update={"freeze_encoder": True})


def with_few_examples(recipe: AnyRecipe, count: int) -> AnyRecipe:
    """Return the recipe with data.max_train_examples=count. Raises RecipeError for a recipe other than fine-tuning."""
    recipe = _fine_tuning(recipe, "--max-train-examples")
    if count < 1:
        raise RecipeError(f"--max-train-examples is {count}; it must be at least 1")
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_train_examples": count})})


def _fine_tuning(recipe: AnyRecipe, option: str) -> FineTuneRecipe:
    if not isinstance(recipe, FineTuneRecipe):
        raise RecipeError(
            f"{option} needs a recipe with task classify or tag; the task of {recipe.name!r} is {recipe.task!r}"
        )
    return recipe
