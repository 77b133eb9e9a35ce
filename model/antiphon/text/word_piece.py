"""WordPiece: BERT's vocabulary of words and word parts (Devlin et al. 2019, section 3), learned from texts.

Normaliser, pre-tokeniser, templates and special tokens are those of bert-base-uncased, so that a model trained here has
the text format of an imported BERT. Texts lose upper case and accents; characters outside the alphabet become [UNK].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from antiphon.text.format import TextFormat

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD_ID, UNK_ID, CLS_ID, SEP_ID, MASK_ID = range(len(SPECIAL_TOKENS))
# Each character of the alphabet takes two entries of the vocabulary: alone, and as the inside of a word.
_ALPHABET_LIMIT = 1000

FORMAT = TextFormat(
    kind="tokenizers",
    special_ids=tuple(range(len(SPECIAL_TOKENS))),
    template=(CLS_ID, "$text", SEP_ID),
    pair_template=(CLS_ID, "$text", SEP_ID, "$pair", SEP_ID),
    pair_start=3,
    mask_id=MASK_ID,
)


def train(texts: Sequence[str], vocab_size: int) -> Any:
    """Learn WordPiece from texts until the vocabulary has vocab_size entries; few texts give fewer entries.

    Returns a `tokenizers.Tokenizer`. The alphabet has the 1,000 most frequent characters of the texts. The same texts
    give the same vocabulary.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    alphabet = _alphabet(texts, normalizer)
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizers.Sequence([normalizer, normalizers.Replace(_outside(alphabet), " ")])
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # The trainer would number ## characters in the order of a hash table, which differs from run to run, and so would
    # its choice between equally frequent pairs. As special tokens they have fixed ids.
    fixed = [*SPECIAL_TOKENS, *alphabet, *(f"##{char}" for char in alphabet)]
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
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return backend
