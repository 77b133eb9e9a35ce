"""Byte-level BPE of exact texts (GPT-2, Radford et al. 2019), for language models trained by this project.

Nothing is normalised: a text is the concatenation of its tokens' bytes, with every space and line break. The smallest
vocabulary has no merges, so each token is a byte, and in ASCII texts a character.
"""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from antiphon.text.format import TextFormat
from antiphon.text.open_text import Vocabularies
from antiphon.text.segmenters import Backend
from antiphon.text.token_bytes import byte_level
from antiphon.text.token_table import table_of
from antiphon.text.tokenizer import Tokenizer

END_TOKEN = "</s>"
END_ID = 0
SMALLEST_VOCABULARY = 257  # END_TOKEN and all bytes


def train_exact_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn byte-level BPE from texts until the vocabulary has vocab_size entries, at least SMALLEST_VOCABULARY.

    Texts with few different words give fewer entries.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.encode_special_tokens = True  # "</s>" in a text is text, not the end token
    table = table_of(backend.get_vocab().items(), byte_level, [END_ID])
    return Tokenizer(Vocabularies(Backend(backend), table), backend)


def exact_bpe_format() -> TextFormat:
    """Return the text format of language models trained by this project: a prompt has the tokens of its text only."""
    return TextFormat(kind="tokenizers", special_ids=(END_ID,), template=("$text",))
