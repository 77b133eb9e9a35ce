"""Algorithmic tasks: copy, reverse, sort, addition, counting and brackets, by length.

Words are single characters between spaces, so that byte-level BPE makes one token of each. The length n of an example:

    copy, reverse, sort   n symbols; sort has digits, in ascending order
    addition              two numbers of n digits: "2 1 + 9 3" is 12 + 39, and its sum is "1 5". Digits start with the
                          lowest one, as in column addition; the sum has n or n + 1 digits
    counting              a symbol, a colon and n symbols: "a : b a a"; the output is the number of times it occurs, in
                          digits, the highest one first: "2"
    brackets              a prefix of n brackets of a balanced sequence, at least one of them open: "( [ ] {"; the
                          output closes the open ones: "} )". Its length is the depth
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from antiphon.lab.data.datasets import Dataset
from antiphon.lab.data.written import write_parts
from antiphon.training.corpus import Pair

Algorithm = Literal["copy", "reverse", "sort", "addition", "counting", "brackets"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

VOCAB_SIZE = 300
"""260 bytes and special tokens, and at most 40 words: each task has fewer."""

LONGEST_FACTOR = 4
"""Longest test length, as a multiple of the longest training length."""

_SYMBOLS = "abcdefghijklmnopqrst"
_DIGITS = "0123456789"
_COUNTED = "abcd"
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_TRIES = 20

Make = Callable[[int, random.Random], Pair]
"""Returns a random example of a length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Lengths and numbers of examples of a task. The model needs maximum lengths of `longest_tokens`.

    max_len: longest training length, at least 9, so that training has every digit as a count. Tests are at lengths
        1 to max_len, and at 1.5, 2, 3 and 4 times max_len.
    test: number of examples in range; there are a quarter as many for each longer length.
    """

    max_len: int = 12
    train: int = 20_000
    valid: int = 300
    test: int = 1000

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError naming the field."""
        for name, least in (("max_len", 9), ("train", 1), ("valid", 1), ("test", 4)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")

    @property
    def longer(self) -> tuple[int, ...]:
        """Test lengths beyond training."""
        return tuple(self.max_len * halves // 2 for halves in (3, 4, 6, 2 * LONGEST_FACTOR))

    @property
    def longest_tokens(self) -> int:
        """Longest source or target of all parts, with its end token: that of addition, with two numbers and a sign."""
        return 2 * LONGEST_FACTOR * self.max_len + 2


TOY_SIZES = Sizes(max_len=10, train=200, valid=20, test=16)
"""Sizes that show that an experiment works."""


def algorithm_dataset(algorithm: Algorithm, folder: Path, sizes: Sizes, seed: int = 1) -> Dataset:
    """Write one task as files of a recipe into `folder`; the seed decides all examples.

    Lengths are drawn uniformly. Sources of the validation part and of the test parts are not in the training part, so
    the shortest lengths, all of whose sources are trained, have few tests or none.
    """
    chance = random.Random(f"{algorithm}|{seed}")
    make = _EXAMPLES[algorithm]
    in_range = tuple(range(1, sizes.max_len + 1))
    train = [make(chance.choice(in_range), chance) for _ in range(sizes.train)]
    seen = {source for source, _ in train}
    draw = partial(_unseen, make, chance, seen)
    valid = draw(in_range, sizes.valid)
    tests = {"in range": draw(in_range, sizes.test)}
    tests.update({f"length {length}": draw((length,), sizes.test // 4) for length in sizes.longer})
    parts = {"train": train, "valid": valid, "test": tests["in range"]}
    name = f"{algorithm}-{sizes.max_len}-{sizes.train}-{seed}"
    return Dataset(data=write_parts(folder, name, parts), vocab_size=VOCAB_SIZE, tests=tests)


def _unseen(make: Make, chance: random.Random, seen: set[str], lengths: tuple[int, ...], count: int) -> list[Pair]:
    """Return up to `count` examples with sources outside `seen`, and add their sources to `seen`."""
    found: list[Pair] = []
    for _ in range(count * _TRIES):
        if len(found) == count:
            break
        pair = make(chance.choice(lengths), chance)
        if pair[0] not in seen:
            seen.add(pair[0])
            found.append(pair)
    return found


def _copy(length: int, chance: random.Random) -> Pair:
    symbols = chance.choices(_SYMBOLS, k=length)
    return " ".join(symbols), " ".join(symbols)


def _reverse(length: int, chance: random.Random) -> Pair:
    symbols = chance.choices(_SYMBOLS, k=length)
    return " ".join(symbols), " ".join(reversed(symbols))


def _sort(length: int, chance: random.Random) -> Pair:
    digits = chance.choices(_DIGITS, k=length)
    return " ".join(digits), " ".join(sorted(digits))


def _addition(length: int, chance: random.Random) -> Pair:
    first, second = (chance.choices(_DIGITS, k=length) for _ in range(2))
    total = int("".join(reversed(first))) + int("".join(reversed(second)))
    return f"{' '.join(first)} + {' '.join(second)}", " ".join(reversed(str(total).zfill(length)))


def _counting(length: int, chance: random.Random) -> Pair:
    """Return an example whose share of the asked symbol is uniform, so that training has counts up to its length."""
    asked, share = chance.choice(_COUNTED), chance.random()
    others = _COUNTED.replace(asked, "")
    symbols = [asked if chance.random() < share else chance.choice(others) for _ in range(length)]
    return f"{asked} : {' '.join(symbols)}", " ".join(str(symbols.count(asked)))


def _brackets(length: int, chance: random.Random) -> Pair:
    """Return a random walk over the depth, steps up and down with equal chance; at depth 0 it opens.

    The last bracket also opens if it could only close the last open one, so that the output is never empty.
    """
    brackets: list[str] = []
    still_open: list[str] = []
    for left in range(length, 0, -1):
        must_open = not still_open or (left == 1 and len(still_open) == 1)
        if must_open or chance.random() < 0.5:
            brackets.append(chance.choice(list(_CLOSING)))
            still_open.append(brackets[-1])
        else:
            brackets.append(_CLOSING[still_open.pop()])
    return " ".join(brackets), " ".join(_CLOSING[bracket] for bracket in reversed(still_open))


_EXAMPLES: dict[Algorithm, Make] = {
    "copy": _copy,
    "reverse": _reverse,
    "sort": _sort,
    "addition": _addition,
    "counting": _counting,
    "brackets": _brackets,
}
