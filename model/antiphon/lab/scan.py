"""Splits of SCAN (Lake and Baroni 2018): commands such as "jump left twice" and the sequence of their actions.

Every split is trained only on its own training file. The test parts of `length` and of the templates (Loula et al.
2018) are not among the files. They are derived from all 20,910 examples, which the simple split holds:

    length      examples with more than 22 actions
    templates   examples outside the training file, without "turn" in the place of the template's verb. Examples such
                as "turn around right" belong to neither part: 1,209 in each split, because the paper leaves them out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from antiphon.errors import RecipeError
from antiphon.lab.datasets import Dataset, write_parts
from antiphon.training.corpus import Pair, read_verified
from antiphon.training.recipe import DataFile

Split = Literal[
    "simple",
    "length",
    "addprim_jump",
    "addprim_turn_left",
    "template_around_right",
    "template_jump_around_right",
    "template_opposite_right",
    "template_right",
]
SPLITS: tuple[Split, ...] = get_args(Split)

VOCAB_SIZE = 400
"""Limit of the vocabulary. Byte-level BPE ends at 334, when each word of commands and actions is one token."""

MAX_TRAINED_ACTIONS = 22
"""Largest number of actions in the training file of the length split."""

VALID_SALT = "antiphon-scan-valid-v1|"
VALID_PER_CENT = 2

_SHA256 = {
    "test_addprim_jump": "db9c50a9043d2d9eb92bffed5f1074471c98cabbdb18f5b8de54488c01c80e0a",
    "test_addprim_turn_left": "268578e6c0ea4d5f3a55916bdaf14e698f1dee4860779f567b5be32a96eceea0",
    "test_simple": "39ad070514b562eb8b0a1a6cfd56dab521fe0b550e53eadecbec808689a9ff1d",
    "train_addprim_jump": "a093d139dd9d8b4fab8d13ac9c99b814f56b3a65a01baafb0971c880aed45cd7",
    "train_addprim_turn_left": "6d28a2b03b7258c1d48abe68118c3148a8655d30dd2f02a87879836d1a98df89",
    "train_length": "d8f66d634c0bb3c5c3c9029299ac31f407efd49e66286305cb4fcdfc51dbf6c3",
    "train_simple": "8e0061ff764df7d0eace2f3112e6b4a10f89d5a1cd92bbddb37a4aba61cfb4d2",
    "train_template_around_right": "87421d26ca5f3902bbb043502ddb52a6c898decf38b77638b4cc7cf8c41a8fc7",
    "train_template_jump_around_right": "5745ada07097a0fd1bbfc022751a99603325138c69eb237a4adc5d9ea664d792",
    "train_template_opposite_right": "744c46a8f664554c5d4beb79bf39274d01fdff64cabaf06e2857a4001a99ac3e",
    "train_template_right": "fd048b80788d5fa07b99c3ceec3350926e6ba99d4136cb789e721220a10ee07d",
}


def scan_dataset(source: Path, split: Split, folder: Path) -> Dataset:
    """Write one split as files of a recipe into `folder`.

    source: data folder with SCAN's files in `scan/`. Repeated training examples, as of the primitive "jump", stay
    repeated and are never chosen for validation. Raises RecipeError naming a file that is missing, changed or damaged.
    """
    examples = _read(source, f"train_{split}")
    repeated = {pair for pair, count in Counter(examples).items() if count > 1}
    is_valid = [_is_validation(pair[0]) and pair not in repeated for pair in examples]
    test = _test_part(source, split, examples)
    parts = {
        "train": [pair for pair, is_valid_pair in zip(examples, is_valid, strict=True) if not is_valid_pair],
        "valid": [pair for pair, is_valid_pair in zip(examples, is_valid, strict=True) if is_valid_pair],
        "test": test,
    }
    origin = dict(
        origin=f"SCAN, split {split}; github.com/brendenlake/SCAN, commit c4b756cbc010d75c912f16c42c8f15dc6b7e6c8f",
        licence="BSD 3-clause",
        attribution="SCAN, Copyright (c) 2016-present, Facebook, Inc. (Lake and Baroni 2018)",
    )
    written = write_parts(folder, f"scan-{split.replace('_', '-')}", parts, languages=("commands", "actions"))
    return Dataset(data=written.model_copy(update=origin), vocab_size=VOCAB_SIZE, tests={"test": test})


def _test_part(source: Path, split: Split, examples: Sequence[Pair]) -> list[Pair]:
    if f"test_{split}" in _SHA256:
        return _read(source, f"test_{split}")
    everything = [*_read(source, "train_simple"), *_read(source, "test_simple")]
    if split == "length":
        return [pair for pair in everything if len(pair[1].split()) > MAX_TRAINED_ACTIONS]
    left_out = _left_out_phrase(split)
    trained = set(examples)
    return [pair for pair in everything if pair not in trained and left_out not in f" {pair[0]} "]


def _left_out_phrase(split: Split) -> str:
    """Return the template's phrase with "turn" as its verb, between spaces."""
    words = split.removeprefix("template_").removeprefix("jump_").split("_")
    return f" {' '.join(['turn', *words])} "


def _is_validation(command: str) -> bool:
    digest = hashlib.sha256((VALID_SALT + command).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < VALID_PER_CENT


def _read(source: Path, part: str) -> list[Pair]:
    file = DataFile(path=f"scan/tasks_{part}.txt.gz", sha256=_SHA256[part])
    pairs = []
    for number, line in enumerate(read_verified(source, file).decode().splitlines(), start=1):
        command, separator, actions = line.removeprefix("IN: ").partition(" OUT: ")
        if not separator:
            raise RecipeError(f"{source / file.path}: line {number} is not 'IN: command OUT: actions'")
        pairs.append((command, " ".join(_plain(action) for action in actions.split())))
    return pairs


def _plain(action: str) -> str:
    """Return an action's name of letters only: the pre-tokenizer would cut I_TURN_LEFT at each underscore."""
    return action.removeprefix("I_").removeprefix("TURN_")
