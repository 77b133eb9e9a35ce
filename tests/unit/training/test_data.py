"""Batches by length, runs of sentences, masking by the 80/10/10 rule, and batches made ahead by a process."""

import math
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from antiphon.text.tokenizer import Tokenizer
from antiphon.training.batches import IGNORED_LABEL, LENGTH_STEP, rows_of
from antiphon.training.masked_model import Masking
from antiphon.training.passages import TokenDocuments, sentence_runs
from antiphon.training.recipe import Augmentation, MaskingConfig, Recipe
from antiphon.training.task import Group, RunFolders
from antiphon.training.trainer import Place, batches_beside, batches_from, open_task
from antiphon.training.translation import Example, collate, encode_pairs, plan_batches
from tests.unit.training.test_train import make_recipe

TOKENIZER = Tokenizer.train([], vocab_size=260)


def examples(count: int, seed: int) -> list[Example]:
    chance = random.Random(seed)
    return [Example(source=[5] * chance.randint(1, 30), target=[6] * chance.randint(1, 30)) for _ in range(count)]


@given(st.integers(1, 200), st.integers(40, 400), st.integers(0, 5))
def test_plan_uses_every_example_once_within_the_budget(count: int, budget: int, seed: int) -> None:
    made = examples(count, seed)
    plan = plan_batches(made, budget, seed)
    assert sorted(index for batch in plan for index in batch) == list(range(count))
    for batch in plan:
        longest = max(len(made[index].target) for index in batch) + 1
        assert len(batch) == 1 or len(batch) * longest <= budget


def test_plan_is_a_function_of_the_seed() -> None:
    made = examples(300, seed=1)
    assert plan_batches(made, 200, seed=4) == plan_batches(made, 200, seed=4)
    assert plan_batches(made, 200, seed=4) != plan_batches(made, 200, seed=5)


def test_collate_shifts_targets_and_ignores_padding() -> None:
    batch = collate([Example(source=[7, 2], target=[8, 9]), Example(source=[7, 5, 2], target=[8])], TOKENIZER, rows=3)
    bos, eos, pad, ignored = TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id, IGNORED_LABEL
    assert batch.source.tolist() == [[7, 2, pad, pad], [7, 5, 2, pad], [pad] * 4]
    assert batch.source_lens.tolist() == [2, 3, 1]
    assert batch.inputs.tolist() == [[bos, 8, 9, pad], [bos, 8, pad, pad], [pad] * 4]
    assert batch.labels.tolist() == [[8, 9, eos, ignored], [8, eos, ignored, ignored], [ignored] * 4]


def test_padding_is_cut_to_the_limits_of_the_model() -> None:
    """If a limit is not a multiple of LENGTH_STEP, padding must not use positions that the model does not have."""
    longest = Example(source=[7] * 9 + [2], target=[8] * 9)
    batch = collate([longest, Example(source=[7, 2], target=[8])], TOKENIZER)
    cut = batch.within(10, 10)
    assert (batch.source.shape[1], cut.source.shape[1], cut.inputs.shape[1], cut.labels.shape[1]) == (12, 10, 10, 10)
    assert cut.source[0].tolist() == longest.source
    assert cut.labels[0].tolist() == [*longest.target, TOKENIZER.eos_id]
    assert (cut.source_lens == batch.source_lens).all()


def test_batches_have_few_shapes() -> None:
    """Every new shape needs a compilation; there are about (length steps of targets) x (of sources) shapes."""
    made = examples(3000, seed=2)
    batches = (
        collate(chosen, TOKENIZER, rows_of(max(len(e.target) for e in chosen) + 1, 200))
        for chosen in ([made[i] for i in plan] for plan in plan_batches(made, 200, seed=0))
    )
    shapes = {(tuple(batch.source.shape), tuple(batch.inputs.shape)) for batch in batches}
    steps = 31 // LENGTH_STEP + 1
    assert len({rows for (rows, _), _ in shapes}) <= steps
    assert len(shapes) <= steps * steps


def test_pairs_beyond_the_models_limits_are_left_out() -> None:
    pairs = [("abc", "de"), ("", "x"), ("x", " "), ("a" * 40, "b"), ("b", "c" * 40)]
    kept = encode_pairs(pairs, TOKENIZER, max_source=20, max_target=20)
    assert [TOKENIZER.decode(example.source) for example in kept] == ["abc"]
    assert kept[0].source[-1] == TOKENIZER.eos_id


def taken(batches: Iterator[tuple[Place, Any]], count: int) -> list[tuple[Place, list[list[list[int]]]]]:
    """Return places and tensors of the first batches."""
    found = islice(batches, count)
    return [(place, [part.tolist() for part in (b.source, b.inputs, b.labels)]) for place, b in found]


def augmented(folder: Path) -> Recipe:
    return make_recipe(folder).model_copy(update={"augmentation": Augmentation(joined=0.5, lower_case=0.5)})


def test_a_process_beside_makes_the_same_batches_across_epochs(tmp_path: Path) -> None:
    recipe, group = augmented(tmp_path), Group(rank=0, size=1, device=torch.device("cpu"))
    folders = RunFolders(data=tmp_path, run=tmp_path / "run", group=group)
    task = open_task(recipe, folders)
    per_epoch = len(task.batches("train", recipe.train.seed * 1_000_003))
    start = Place(epoch=0, batch=per_epoch - 3)

    expected = taken(batches_from(task, start, folders, recipe.train.seed), 8)
    found = taken(batches_beside(open_task, recipe, folders, start), 8)

    assert found == expected
    assert [place.epoch for place, _ in found[:4]] == [0, 0, 0, 1]
    assert found[3][0] == Place(epoch=1, batch=1)


def test_the_processes_of_a_group_share_the_batches_of_an_epoch(tmp_path: Path) -> None:
    recipe, device = augmented(tmp_path), torch.device("cpu")
    alone, *pair = (
        RunFolders(data=tmp_path, run=tmp_path / "run", group=Group(rank=rank, size=size, device=device))
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    task, start = open_task(recipe, alone), Place(epoch=0, batch=0)
    whole = taken(batches_from(task, start, alone, recipe.train.seed), 8)
    first, second = (taken(batches_from(task, start, folders, recipe.train.seed), 4) for folders in pair)
    assert [batch for _, batch in first] == [batch for _, batch in whole[::2]]
    assert [batch for _, batch in second] == [batch for _, batch in whole[1::2]]


def documents(count: int, seed: int) -> list[list[list[int]]]:
    """Return documents of sentences whose tokens are all different."""
    chance = random.Random(seed)
    numbers = iter(range(10**9))
    return [
        [[next(numbers) for _ in range(chance.randint(1, 9))] for _ in range(chance.randint(1, 8))]
        for _ in range(count)
    ]


@given(st.integers(1, 12), st.integers(0, 1000), st.integers(9, 60))
def test_runs_are_whole_sentences_that_fit_and_lose_nothing(count: int, seed: int, max_tokens: int) -> None:
    made = documents(count, seed)
    packed = TokenDocuments(made)
    runs = [list(run.parts(packed)[0]) for run in sentence_runs(packed, max_tokens)]
    assert [token for run in runs for token in run] == [
        t for document in made for sentence in document for t in sentence
    ]
    first_tokens = {sentence[0]: len(sentence) for document in made for sentence in document}
    homes = {token: index for index, document in enumerate(made) for sentence in document for token in sentence}
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        assert len(run) <= max_tokens
        assert run[0] in first_tokens
        assert len({homes[token] for token in run}) == 1
        if following is not None and homes[following[0]] == homes[run[0]]:
            assert len(run) + first_tokens[following[0]] > max_tokens, "the next sentence would have fitted"


def test_the_end_of_a_sentence_that_is_too_long_is_left_out() -> None:
    packed = TokenDocuments([[[1, 2], [3, 4, 5, 6, 7], [8]]])
    assert [list(run.parts(packed)[0]) for run in sentence_runs(packed, 3)] == [[1, 2], [3, 4, 5], [8]]


def test_a_length_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        sentence_runs(TokenDocuments([[[1]]]), 0)


VOCAB = 60
SPECIAL = (0, 1, 2, 3, 4, 17)
MASK = 4


def masking(**settings: float) -> Masking:
    return Masking(MaskingConfig.model_validate(settings), vocab_size=VOCAB, special_ids=SPECIAL, mask_id=MASK)


def texts(rows: int, length: int, seed: int) -> Tensor:
    """Return random texts of ordinary tokens and special ones, such as begin, end and padding."""
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def within(found: int, trials: int, share: float) -> bool:
    """Return whether a count is within five standard deviations of a binomial distribution's mean."""
    return abs(found - trials * share) < 5 * math.sqrt(trials * share * (1 - share)) + 1e-9


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 10_000), st.floats(0.01, 1.0))
def test_masking_changes_only_predicted_tokens(rows: int, length: int, seed: int, rate: float) -> None:
    ids = texts(rows, length, seed)
    inputs, labels = masking(rate=rate).apply(ids, seed)
    chosen = labels != IGNORED_LABEL
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(inputs[~chosen], ids[~chosen])
    special = torch.isin(ids, torch.tensor(SPECIAL))
    assert not (chosen & special).any(), "special tokens are never predicted"
    replaced = chosen & (inputs != ids) & (inputs != MASK)
    assert not torch.isin(inputs[replaced], torch.tensor(SPECIAL)).any(), "special tokens are never random replacements"
    for row in range(rows):
        ordinary = int((~special[row]).sum())
        assert int(chosen[row].sum()) == min(ordinary, max(1, round(ordinary * rate)))


def test_masking_predicts_nothing_when_a_text_has_no_ordinary_tokens() -> None:
    inputs, labels = masking().apply(torch.tensor([[1, 2, 0, 0]]), seed=1)
    assert inputs.tolist() == [[1, 2, 0, 0]]
    assert (labels == IGNORED_LABEL).all()


def test_masking_follows_the_80_10_10_rule() -> None:
    """Of predicted tokens 80 % are masked, 10 % random and 10 % unchanged; a random token can be the same token."""
    ids = texts(2000, 100, seed=5)
    inputs, labels = masking().apply(ids, seed=6)
    chosen = labels != IGNORED_LABEL
    count, ordinary = int(chosen.sum()), VOCAB - len(SPECIAL)
    assert within(int((inputs[chosen] == MASK).sum()), count, 0.8)
    assert within(int((inputs[chosen] == ids[chosen]).sum()), count, 0.1 + 0.1 / ordinary)
    drawn = inputs[chosen & (inputs != MASK) & (inputs != ids)]
    assert within(len(drawn), count, 0.1 * (1 - 1 / ordinary))
    for token in set(range(VOCAB)) - set(SPECIAL):
        assert within(int((drawn == token).sum()), len(drawn), 1 / ordinary), token


def test_masking_chooses_all_positions_equally_often() -> None:
    ids = torch.full((4000, 20), 9)
    labels = masking().apply(ids, seed=3)[1]
    for place in (labels != IGNORED_LABEL).sum(dim=0).tolist():
        assert within(place, 4000, 0.15)


def test_masking_shares_are_those_of_the_recipe() -> None:
    ids = torch.full((50, 20), 9)
    inputs, labels = masking(masked=1.0, random=0.0).apply(ids, seed=3)
    assert (inputs[labels != IGNORED_LABEL] == MASK).all()
    inputs, labels = masking(masked=0.0, random=0.0).apply(ids, seed=3)
    assert torch.equal(inputs, ids)
    assert (labels != IGNORED_LABEL).any()


def test_masking_is_a_function_of_its_seed() -> None:
    ids = texts(4, 50, seed=1)
    first, again, other = (masking().apply(ids, seed)[0] for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
