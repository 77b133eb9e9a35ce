"""Our own vocabularies: byte-level BPE, exact in both directions.

Normalisation: NFC, every run of white space becomes one space, none at the ends. It is stored in tokenizer.json, so
training and serving cannot differ. After it nothing is lost: each token stands for a fixed string of bytes, and a text
is the concatenation of its tokens' bytes (after the leading space that marks a word's beginning).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from antiphon.model.text.format import TokenizerError
from antiphon.model.text.open_text import Opened
from antiphon.model.text.segmenters import Backend
from antiphon.model.text.token_reading import byte_alphabet
from antiphon.model.text.token_table import table_of

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
MASK_TOKEN = "<mask>"  # of encoders that fill masks; others do without


def train(texts: Iterable[str], vocab_size: int, extra_special: Sequence[str]) -> Any:
    """Learn merges (Sennrich et al. 2016) over bytes from texts until the vocabulary has vocab_size entries."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *extra_special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def read(path: Path) -> Any:
    """Read a tokenizer.json. Raises TokenizerError naming the file."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception for any defect of the file
        raise TokenizerError(f"{path} cannot be read: {error}") from None


def opened(backend: Any) -> Opened:
    """Both sides of a model with this vocabulary. Raises TokenizerError for one of another kind."""
    vocabulary = backend.get_vocab()
    if missing := [token for token in SPECIAL_TOKENS if token not in vocabulary]:
        raise TokenizerError(f"the vocabulary has no {missing[0]}")
    backend.encode_special_tokens = True  # "</s>" typed by a user is text, not the end token
    special = {vocabulary[token] for token in SPECIAL_TOKENS} | special_ids(backend)
    try:
        table = table_of(vocabulary.items(), _bytes_of_token, special, strips="one space")
    except KeyError as error:
        raise TokenizerError(f"not a byte-level vocabulary, it holds the character {error}") from None
    longest_token = max(1, *map(len, table.texts))
    if mask_id(backend) is None:
        return Opened(Backend(backend, longest_token), table)
    return Opened(Backend(_with_typed_mask(backend), max(longest_token, len(f" {MASK_TOKEN}"))), table)


def _with_typed_mask(backend: Any) -> Any:
    """The same vocabulary for texts that name the mask token, which is matched as RoBERTa's is: with the space before.

    What follows the token keeps its own space or has none; so the space before a text, which otherwise every stretch
    between tokens is given, becomes part of normalisation.
    """
    described = json.loads(backend.to_str())
    described["normalizer"]["normalizers"].append({"type": "Prepend", "prepend": " "})
    described["pre_tokenizer"]["add_prefix_space"] = False
    (mask,) = (token for token in described["added_tokens"] if token["content"] == MASK_TOKEN)
    mask.update(special=False, lstrip=True, normalized=True)
    typed = Tokenizer.from_str(json.dumps(described))
    typed.encode_special_tokens = True
    return typed


def mask_id(backend: Any) -> int | None:
    """Id of the mask token; None where the vocabulary has none."""
    index: int | None = backend.token_to_id(MASK_TOKEN)
    return index if index in special_ids(backend) else None


def special_ids(backend: Any) -> set[int]:
    """Ids that a vocabulary declares to stand for nothing."""
    return {index for index, token in backend.get_added_tokens_decoder().items() if token.special}


def _bytes_of_token(token: str) -> bytes:
    alphabet = byte_alphabet()
    return bytes([alphabet[char] for char in token])
