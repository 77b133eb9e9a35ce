"""Measures of trained models: forced log-probabilities, recomputation, other lengths, BLEU."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import sacrebleu
import torch

from antiphon.architecture.config import Positions
from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint, with_lengths
from antiphon.errors import CheckpointError
from antiphon.lab.accuracy import bleu_of, exact_match, forced, share_correct, translations
from antiphon.lab.costs import crossing, growth, median_seconds
from antiphon.lab.experiments.decoding import recomputed
from antiphon.lab.trial import train
from antiphon.text.tokenizer import Tokenizer, byte_bpe_format
from antiphon.training.corpus import load_corpus
from antiphon.transformer.greedy import greedy
from antiphon.transformer.random_model import random_transformer
from antiphon.transformer.transformer import Transformer
from tests.parity.exports import small_config
from tests.unit.lab.recurrent_models import toy_trial

pytestmark = pytest.mark.training

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, list[tuple[str, str]]]:
    folder = tmp_path_factory.mktemp("trained")
    trial = toy_trial(folder)
    train(trial, folder / "run")
    return load_checkpoint(folder / "run/averaged"), load_corpus(trial.pairs, trial.data).test


def test_forced_log_probabilities_are_those_of_each_alone(
    trained: tuple[Checkpoint, list[tuple[str, str]]],
) -> None:
    checkpoint, pairs = trained
    tokenizer, model = checkpoint.tokenizer, checkpoint.model
    for (source, target), found in zip(pairs, forced(checkpoint, pairs), strict=True):
        labels = torch.tensor([*tokenizer.encode(target), tokenizer.eos_id])
        inputs = torch.tensor([[tokenizer.bos_id, *labels[:-1].tolist()]])
        with torch.no_grad():
            logits = model(torch.tensor([[*tokenizer.encode(source), tokenizer.eos_id]]), inputs)[0]
        expected = logits.log_softmax(dim=1)[range(len(labels)), labels]
        torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-4, rtol=0)
        assert found.is_best == (logits.argmax(dim=1) == labels).tolist()


def test_translations_keep_the_order_of_their_sources(trained: tuple[Checkpoint, list[tuple[str, str]]]) -> None:
    checkpoint, pairs = trained
    sources = [source for source, _ in pairs]
    together = translations(checkpoint, sources, max_new_tokens=12)
    assert together == [translations(checkpoint, [source], max_new_tokens=12)[0] for source in sources]


def test_bleu_is_that_of_sacrebleu() -> None:
    pairs = [("a", "the cat sat on the mat today"), ("b", "a bird sings in the green tree")]
    answers = ["the cat sat on a mat today", "a bird sings in the tree"]
    references = [[target for _, target in pairs]]
    assert bleu_of(answers, pairs, is_tokenised=False) == sacrebleu.corpus_bleu(answers, references).score


@pytest.mark.parametrize("positions", ["sinusoidal", "rope", "t5_relative", "alibi", "none"])
def test_model_of_other_lengths_computes_the_same_and_takes_longer_texts(positions: Positions, tmp_path: Path) -> None:
    model = random_transformer(small_config(positions=positions, max_source_len=16, max_target_len=16))
    checkpoint = _checkpoint(model, tmp_path)
    longer = with_lengths(checkpoint, max_source_len=64, max_target_len=48)
    source, target = torch.randint(4, 90, (2, 16)), torch.randint(4, 90, (2, 16))
    torch.testing.assert_close(longer.model(source, target), model(source, target), atol=0, rtol=0)
    assert longer.model(torch.randint(4, 90, (1, 64)), torch.randint(4, 90, (1, 48))).isfinite().all()
    assert (longer.config.max_source_len, longer.config.max_target_len) == (64, 48)


def test_learned_positions_can_only_become_fewer(tmp_path: Path) -> None:
    model = random_transformer(small_config(positions="learned", max_source_len=16, max_target_len=16))
    checkpoint = _checkpoint(model, tmp_path)
    with pytest.raises(CheckpointError, match="max_source_len=17 is above 16: learned positions have no vectors"):
        with_lengths(checkpoint, max_source_len=17)
    with pytest.raises(CheckpointError, match="max_target_len: Input should be greater than or equal to 1"):
        with_lengths(checkpoint, max_target_len=0)
    shorter = with_lengths(checkpoint, max_source_len=8)
    ids = torch.randint(4, 90, (1, 8))
    torch.testing.assert_close(shorter.model.encode(ids), model.encode(ids), atol=0, rtol=0)


def _checkpoint(model: Transformer, folder: Path) -> Checkpoint:
    tokenizer = Tokenizer.train(["some words"], 300)
    text = byte_bpe_format(tokenizer)
    return Checkpoint(
        config=model.config, model=model, tokenizer=tokenizer, text=text, text_folder=folder, provenance=None
    )


def test_recomputation_gives_the_tokens_of_decoding_with_a_cache() -> None:
    model = random_transformer(small_config())
    source = [5, 9, 17, 30, 2]
    assert recomputed(model, source, 12) == greedy(model, [source], 12, ends=False)[0]


def test_growth_is_the_exponent_of_a_power_law() -> None:
    points = {str(length): {"s": 3e-4 * length**1.7} for length in (16, 32, 64, 128, 256)}
    assert growth(points, "s") == pytest.approx(1.7)


def test_crossing_is_where_one_power_law_passes_another() -> None:
    points = {str(length): {"square": length**2 / 100, "line": float(length)} for length in (16, 64, 256)}
    assert crossing(points, "square", "line") == pytest.approx(100)
    assert crossing(points, "line", "square") is None, "it is above at first and never passes from below"
    del points["256"]
    assert crossing(points, "square", "line") is None, "it stays below"


def test_median_seconds_alternate_and_leave_out_the_first_round() -> None:
    calls: list[str] = []
    took = {"one": iter([9.0, 3.0, 1.0, 2.0]), "other": iter([9.0, 10.0, 30.0, 20.0])}
    now = 0.0

    def run(name: str) -> None:
        nonlocal now
        calls.append(name)
        now += next(took[name])

    runs = {name: partial(run, name) for name in took}
    assert median_seconds(runs, 3, clock=lambda: now) == {"one": 2.0, "other": 20.0}
    assert calls == ["one", "other"] * 4


PAIRS = [("a", "a"), ("a b", "a b"), ("b a", "a b"), ("a b c", "a b c"), ("c", "c")]


def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a b c"], 300)


def test_exact_match_counts_by_target_length() -> None:
    """A decoder that copies its source is wrong for "b a" only."""

    def copying(sources: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        return [list(source[:-1])[:max_new_tokens] for source in sources]

    found = exact_match(copying, tokenizer(), PAIRS, batch_rows=2)
    assert found == {1: [True, True], 2: [True, False], 3: [True]}
    assert share_correct(found) == 0.8


def test_output_that_does_not_end_is_wrong() -> None:
    def endless(sources: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        return [(list(source[:-1]) * 100)[:max_new_tokens] for source in sources]

    assert share_correct(exact_match(endless, tokenizer(), PAIRS)) == 0


def test_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="pairs is empty"):
        exact_match(lambda sources, max_new_tokens: [], tokenizer(), [])
