"""Byte-level BPE: the vocabulary of models trained by this project. Decoding restores the normalised text exactly.

Normalisation: NFC; each sequence of white space becomes one space; white space at both ends is removed. The
normalisation is stored in tokenizer.json, so training and serving cannot differ. Each token represents a fixed string
of bytes. A text is the concatenation of its tokens' bytes without the leading space, which marks the start of a word.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from antiphon.errors import TokenizerError
from antiphon.text.open_text import Vocabularies
from antiphon.text.segmenters import Backend
from antiphon.text.token_bytes import byte_alphabet
from antiphon.text.token_table import table_of

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
MASK_TOKEN = "<mask>"  # only in vocabularies of encoders that fill masks


def train(texts: Iterable[str], vocab_size: int, extra_special: Sequence[str]) -> Any:
    """Learn byte-level BPE (Sennrich et al. 2016) from texts until the vocabulary has vocab_size entries.

    extra_special: special tokens after SPECIAL_TOKENS. Returns a `tokenizers.Tokenizer`.
    """
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
    """Read a tokenizer.json as a `tokenizers.Tokenizer`. Raises TokenizerError naming the file."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception for any defect of the file
        raise TokenizerError(f"{path} cannot be read: {error}") from None


def vocabularies_of(backend: Any) -> Vocabularies:
    """Return segmenter and token table of a byte-level BPE backend, the same for source and target.

    Raises TokenizerError if the backend is not byte-level BPE or lacks one of SPECIAL_TOKENS.
    """
    vocabulary = backend.get_vocab()
    if missing := [token for token in SPECIAL_TOKENS if token not in vocabulary]:
        raise TokenizerError(f"the vocabulary has no {missing[0]}")
    backend.encode_special_tokens = True  # "</s>" typed by a user is text, not the end token
    special = {vocabulary[token] for token in SPECIAL_TOKENS} | special_ids(backend)
    try:
        table = table_of(vocabulary.items(), _bytes_of_token, special, strips="one space")
    except KeyError as error:
        raise TokenizerError(f"not a byte-level vocabulary: it has the character {error}") from None
    longest_token = max(1, *map(len, table.texts))
    if mask_id(backend) is None:
        return Vocabularies(Backend(backend, longest_token), table)
    return Vocabularies(Backend(_with_typed_mask(backend), max(longest_token, len(f" {MASK_TOKEN}"))), table)


def merges_of(backend: Any) -> list[tuple[int, int, int]]:
    """Return the ids of each merge of a byte-level BPE backend: merged token, left part, right part."""
    vocabulary = backend.get_vocab()
    merges = json.loads(backend.to_str())["model"]["merges"]
    return [(vocabulary[left + right], vocabulary[left], vocabulary[right]) for left, right in merges]


def _with_typed_mask(backend: Any) -> Any:
    """Return a backend that matches the mask token inside a text, together with the space before it, as in RoBERTa.

    The text after a mask token must keep its own leading space or none. With add_prefix_space the library would add a
    space there too, so the normaliser adds the space before the whole text instead.
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
    """Return the id of the mask token; None if the vocabulary has none."""
    index: int | None = backend.token_to_id(MASK_TOKEN)
    return index if index in special_ids(backend) else None


def special_ids(backend: Any) -> set[int]:
    """Return the ids of all special tokens: tokens without text."""
    return {index for index, token in backend.get_added_tokens_decoder().items() if token.special}


def _bytes_of_token(token: str) -> bytes:
    alphabet = byte_alphabet()
    return bytes([alphabet[char] for char in token])
