from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from antiphon.model.lab.exact_match import Count, exact_match
from antiphon.model.lab.recurrent.greedy import recurrent_greedy
from antiphon.model.lab.recurrent.recurrent_task import recurrent_task
from antiphon.model.text.tokenizer import Tokenizer
from antiphon.model.training.train import Trainer
from antiphon.model.transformer.greedy import greedy
from antiphon.model.transformer.transformer import Transformer
from tests.unit.lab.recurrent_models import ALONE, SHAPE, made_dataset, small_recipe

torch.set_num_threads(1)  # arrays this small are slower with several threads

PAIRS = [("a", "a"), ("a b", "a b"), ("b a", "a b"), ("a b c", "a b c"), ("c", "c")]


def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a b c"], 300)


def test_exact_match_counts_by_target_length() -> None:
    """A decoder that copies its source is wrong for "b a" only."""

    def copying(sources: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        return [list(source[:-1])[:max_new_tokens] for source in sources]

    found = exact_match(copying, tokenizer(), PAIRS, batch_rows=2)
    assert found.by_target_len == {
        1: Count(total=2, correct=2), 2: Count(total=2, correct=1), 3: Count(total=1, correct=1),
    }  # fmt: skip
    assert found.overall == Count(total=5, correct=4)
    assert found.overall.accuracy == 0.8


def test_output_that_does_not_end_is_wrong() -> None:
    def endless(sources: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        return [(list(source[:-1]) * 100)[:max_new_tokens] for source in sources]

    assert exact_match(endless, tokenizer(), PAIRS).overall.correct == 0


def test_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="pairs is empty"):
        exact_match(lambda sources, max_new_tokens: [], tokenizer(), [])


@pytest.mark.parametrize("kind", ["transformer", "lstm"])
def test_models_are_scored_like_pairs_one_by_one(kind: str, tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, max_steps=40)
    if kind == "lstm":
        trainer = Trainer(recipe, tmp_path, tmp_path / "run", ALONE, open_task=recurrent_task(SHAPE))
        decode = partial(recurrent_greedy, trainer.model)
    else:
        trainer = Trainer(recipe, tmp_path, tmp_path / "run", ALONE)
        assert isinstance(trainer.model, Transformer)
        decode = partial(greedy, trainer.model)
    trainer.run()
    trainer.model.eval()
    words = trainer.task.tokenizer
    pairs = made_dataset(tmp_path).tests["in range"]
    # The model's own outputs are targets of half of the examples, so that there are right ones and wrong ones.
    own = [(source, words.decode(decode([[*words.encode(source), words.eos_id]], 12)[0])) for source, _ in pairs[::2]]
    own = [pair for pair in own if 0 < len(words.encode(pair[1])) < 12]
    found = exact_match(decode, words, [*own, *((source, "a b c d e f g h i j") for source, _ in pairs[1::2])])
    assert found.overall.total > found.overall.correct >= len(own) > 0
