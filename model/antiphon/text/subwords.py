"""Subword vocabularies of models trained by this project, each a `tokenizers.Tokenizer`, stored in tokenizer.json.

Byte-level BPE (Sennrich et al. 2016): each token represents a fixed string of bytes. A text is the concatenation of its
tokens' bytes without the leading space, which marks the start of a word. Decoding restores the normalised text exactly.
Normalisation: NFC; each sequence of white space becomes one space; white space at both ends is removed. It is stored
with the vocabulary, so training and serving cannot differ.

Exact BPE (GPT-2, Radford et al. 2019), for language models: nothing is normalised, so a text is the concatenation of
its tokens' bytes, with every space and line break. The smallest vocabulary has no merges, so each token is a byte, and
in ASCII texts a character.

WordPiece (BERT, Devlin et al. 2019, section 3): normaliser, pre-tokeniser, templates and special tokens are those of
bert-base-uncased, so that a model trained here has the text format of an imported BERT. Texts lose upper case and
accents; characters outside the alphabet become [UNK].
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from antiphon.errors import TokenizerError
from antiphon.text.format import TextFormat
from antiphon.text.segmenters import Backend, Vocabularies
from antiphon.text.token_table import alphabet_bytes, byte_level, table_of

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
MASK_TOKEN = "<mask>"  # only in vocabularies of encoders that fill masks
EXACT_END_TOKEN = "</s>"
EXACT_END_ID = 0
SMALLEST_EXACT_VOCABULARY = 257  # EXACT_END_TOKEN and all bytes


def train_byte_bpe(texts: Iterable[str], vocab_size: int, extra_special: Sequence[str]) -> Any:
    """Learn byte-level BPE from texts until the vocabulary has vocab_size entries.

    extra_special: special tokens after SPECIAL_TOKENS.
    """
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    return _train_bpe(backend, texts, vocab_size, [*SPECIAL_TOKENS, *extra_special], add_prefix_space=True)


def train_exact_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    """Learn exact BPE from texts until the vocabulary has vocab_size entries, at least SMALLEST_EXACT_VOCABULARY.

    Texts with few different words give fewer entries.
    """
    return _train_bpe(Tokenizer(models.BPE()), texts, vocab_size, [EXACT_END_TOKEN], add_prefix_space=False)


def _train_bpe(
    backend: Any, texts: Iterable[str], vocab_size: int, special_tokens: list[str], *, add_prefix_space: bool
) -> Any:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def read_byte_bpe(path: Path) -> Any:
    """Read a tokenizer.json as a `tokenizers.Tokenizer`. Raises TokenizerError naming the file."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception for any defect of the file
        raise TokenizerError(f"{path} cannot be read: {error}") from None


def exact_vocabularies(backend: Any) -> Vocabularies:
    """Return segmenter and token table of an exact BPE backend, the same for source and target."""
    backend.encode_special_tokens = True  # "</s>" in a text is text, not the end token
    return Vocabularies(Backend(backend), table_of(backend.get_vocab().items(), byte_level, [EXACT_END_ID]))


def byte_vocabularies(backend: Any) -> Vocabularies:
    """Return segmenter and token table of a byte-level BPE backend, the same for source and target.

    Raises TokenizerError if the backend is not byte-level BPE or lacks one of SPECIAL_TOKENS.
    """
    vocabulary = backend.get_vocab()
    if missing := [token for token in SPECIAL_TOKENS if token not in vocabulary]:
        raise TokenizerError(f"the vocabulary has no {missing[0]}")
    backend.encode_special_tokens = True  # "</s>" typed by a user is text, not the end token
    special = {vocabulary[token] for token in SPECIAL_TOKENS} | special_ids(backend)
    try:
        table = table_of(vocabulary.items(), alphabet_bytes, special, strips="one space")
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
    return [(vocabulary[start + end], vocabulary[start], vocabulary[end]) for start, end in merges]


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


WORD_PIECE_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD_ID, UNK_ID, CLS_ID, SEP_ID, MASK_ID = range(len(WORD_PIECE_TOKENS))
# Each character of the alphabet takes two entries of the vocabulary: alone, and as the inside of a word.
_ALPHABET_LIMIT = 1000

WORD_PIECE_FORMAT = TextFormat(
    kind="tokenizers",
    special_ids=tuple(range(len(WORD_PIECE_TOKENS))),
    template=(CLS_ID, "$text", SEP_ID),
    pair_template=(CLS_ID, "$text", SEP_ID, "$pair", SEP_ID),
    pair_start=3,
    mask_id=MASK_ID,
)


def train_word_piece(texts: Sequence[str], vocab_size: int) -> Any:
    """Learn WordPiece from texts until the vocabulary has vocab_size entries; few texts give fewer entries.

    The alphabet has the 1,000 most frequent characters of the texts. The same texts
    give the same vocabulary.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    alphabet = _alphabet(texts, normalizer)
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizers.Sequence([normalizer, normalizers.Replace(_outside(alphabet), " ")])
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # The trainer would number ## characters in the order of a hash table, which differs from run to run, and so would
    # its choice between equally frequent pairs. As special tokens they have fixed ids.
    fixed = [*WORD_PIECE_TOKENS, *alphabet, *(f"##{char}" for char in alphabet)]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=fixed, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    return _backend(learner.get_vocab(), normalizer)


def _alphabet(texts: Iterable[str], normalizer: Any) -> list[str]:
    """Return the most frequent characters of the normalised texts, sorted."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    frequent = sorted(counts, key=lambda char: (-counts[char], char))[:_ALPHABET_LIMIT]
    return sorted(char for char in frequent if not char.isspace())


def _outside(alphabet: Iterable[str]) -> Regex:
    return Regex("[^" + "".join(f"\\x{{{ord(char):X}}}" for char in alphabet) + "]")


def _backend(vocabulary: dict[str, int], normalizer: Any) -> Any:
    """Return BERT's tokenizer with this vocabulary."""
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS_ID), ("[SEP]", SEP_ID)],
    )
    backend.add_special_tokens(list(WORD_PIECE_TOKENS))
    return backend
