"""`antiphon evaluate` for checkpoints: translations and texts in PyTorch, and the same weights in CTranslate2.

torch is imported when a checkpoint is opened.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from antiphon.tools.evaluation import EvaluationError
from antiphon.tools.evaluation.texts import SHORTEST, NoTextError, TextScore, windows
from antiphon.tools.evaluation.translations import Decode, Reader, Score, TestSet, in_batches, score_system

if TYPE_CHECKING:
    from antiphon.checkpoints.checkpoint import Checkpoint


def _open(path: Path, num_threads: int) -> Checkpoint:
    import torch

    from antiphon.checkpoints.checkpoint import load_checkpoint
    from antiphon.errors import CheckpointError

    torch.set_num_threads(num_threads)
    try:
        return load_checkpoint(path)
    except CheckpointError as error:
        raise EvaluationError(str(error)) from None


def evaluate_checkpoint(args: argparse.Namespace, test_set: TestSet) -> list[Score]:
    """Score the translations of a checkpoint, and with --ctranslate2 those of CTranslate2. Raises EvaluationError."""
    if args.beam_width != 1:
        raise EvaluationError("--beam-width needs a bundle or a server; a checkpoint decodes greedily")
    from antiphon.transformer.greedy import greedy

    checkpoint = _open(args.model, args.threads)
    reader = Reader(checkpoint.tokenizer, checkpoint.text, checkpoint.config.max_source_len)

    def decode(sources: Sequence[list[int]]) -> list[list[int]]:
        max_new_tokens = checkpoint.config.max_target_len
        return in_batches(sources, args.rows, lambda part: greedy(checkpoint.model, part, max_new_tokens))

    systems: list[tuple[str, Decode]] = [("pytorch float32", decode)]
    with TemporaryDirectory() as folder:
        if args.ctranslate2:
            systems += _ctranslate2_systems(checkpoint, Path(folder), args)
        return [
            score_system(name, system, reader, test_set, args.output if index == 0 else None)
            for index, (name, system) in enumerate(systems)
        ]


def _ctranslate2_systems(checkpoint: Checkpoint, folder: Path, args: argparse.Namespace) -> list[tuple[str, Decode]]:
    try:
        import ctranslate2
    except ModuleNotFoundError:
        raise EvaluationError("--ctranslate2: CTranslate2 is not installed; run: pip install ctranslate2") from None

    from antiphon.errors import CheckpointError
    from antiphon.tools.bench.ctranslate2_conversion import save_ctranslate2_model, translate

    try:
        save_ctranslate2_model(checkpoint, folder)
    except CheckpointError as error:
        raise EvaluationError(f"--ctranslate2: {error}") from None

    def system(compute_type: str) -> Decode:
        translator = ctranslate2.Translator(str(folder), compute_type=compute_type, intra_threads=args.threads)
        limit = checkpoint.config.max_target_len
        return lambda sources: translate(translator, sources, max_batch_size=args.rows, max_decoding_length=limit)

    return [(f"ctranslate2 {name}", system(name)) for name in ("float32", "int8")]


def score_text_in_pytorch(path: Path, num_threads: int, text: str) -> TextScore:
    """Score a decoder-only checkpoint on a text, in float32.

    Raises EvaluationError for another architecture, and NoTextError if the text has fewer than two tokens.
    """
    from antiphon.training.language_model import language_loss

    checkpoint = _open(path, num_threads)
    if (architecture := checkpoint.config.architecture) != "decoder":
        raise EvaluationError(f"{path} has architecture={architecture!r}; it must be 'decoder'")
    ids = checkpoint.tokenizer.encode(text)
    if len(ids) < SHORTEST:
        raise NoTextError(f"the text has {len(ids)} tokens; it needs {SHORTEST}, the first of which is given")
    started = time.perf_counter()
    loss = language_loss(checkpoint.model, checkpoint.tokenizer, ids)
    return TextScore(
        system="pytorch float32",
        perplexity=math.exp(loss.nats / (len(ids) - 1)),
        nats_per_character=loss.nats_per_character,
        bits_per_byte=loss.bits_per_byte,
        tokens=len(ids) - 1,
        texts=1,
        skipped=0,
        windows=len(windows(ids, checkpoint.config.max_target_len)),
        seconds=time.perf_counter() - started,
    )
