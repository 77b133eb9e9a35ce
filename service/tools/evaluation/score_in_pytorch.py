"""`antiphon evaluate` for checkpoints of decoder-only models: the loss of a text in PyTorch. Imports torch."""

from __future__ import annotations

import math
import time

from antiphon.model.checkpoints.checkpoint import Checkpoint
from antiphon.model.training.data.text_windows import adjacent_starts
from antiphon.model.training.tasks.language_loss import language_loss
from antiphon.service.tools.evaluation.evaluate_texts import TextScore


def score_text(checkpoint: Checkpoint, text: str) -> TextScore:
    """Score a decoder-only checkpoint on a text of at least two tokens, in float32."""
    ids = checkpoint.tokenizer.encode(text)
    started = time.perf_counter()
    loss = language_loss(checkpoint.model, checkpoint.tokenizer, ids)
    seconds = time.perf_counter() - started
    return TextScore(
        system="pytorch float32",
        perplexity=math.exp(loss.nats / (len(ids) - 1)),
        nats_per_character=loss.nats_per_character,
        bits_per_byte=loss.bits_per_byte,
        tokens=len(ids) - 1,
        texts=1,
        skipped=0,
        windows=len(adjacent_starts(len(ids), checkpoint.config.max_target_len - 1)),
        seconds=seconds,
    )
