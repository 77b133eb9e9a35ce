"""Greedy translations of a trained model in PyTorch, and their BLEU."""

from __future__ import annotations

from collections.abc import Sequence

from sacrebleu.metrics.bleu import BLEU

from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.training.corpus import Pair
from antiphon.transformer.greedy import greedy

_ROWS = 64


def translations(checkpoint: Checkpoint, sources: Sequence[str], max_new_tokens: int) -> list[str]:
    """Return the greedy translation of each source; similar lengths are decoded together."""
    tokenizer = checkpoint.tokenizer
    encoded = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(list(sources))]
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
    answers = [""] * len(encoded)
    for start in range(0, len(order), _ROWS):
        chosen = order[start : start + _ROWS]
        ids = greedy(checkpoint.model, [encoded[index] for index in chosen], max_new_tokens)
        for index, target in zip(chosen, ids, strict=True):
            answers[index] = tokenizer.decode(target)
    return answers


def bleu_of(hypotheses: Sequence[str], pairs: Sequence[Pair], *, is_tokenised: bool) -> float:
    """Return sacreBLEU of translations of all pairs; is_tokenised: texts are split by Moses already."""
    score = BLEU(tokenize="none" if is_tokenised else "13a", force=is_tokenised)
    return float(score.corpus_score(list(hypotheses), [[target for _, target in pairs]]).score)
