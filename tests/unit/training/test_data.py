import random

from hypothesis import given
from hypothesis import strategies as st

from antiphon.text.tokenizer import Tokenizer
from antiphon.training.batches import IGNORED_LABEL, LENGTH_STEP, rows_of
from antiphon.training.translation import Example, collate, encode_pairs, plan_batches

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
