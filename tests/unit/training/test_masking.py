"""The 80/10/10 rule of masking: properties of every sample, and frequencies over many samples."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from antiphon.training.batches import IGNORED_LABEL
from antiphon.training.masked_model import Masking
from antiphon.training.recipe import MaskingConfig

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
