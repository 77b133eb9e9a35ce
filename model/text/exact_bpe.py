"""Byte-level BPE of exact texts (GPT-2, Radford et al. 2019), for language models trained by this project.

Nothing is normalised: a text is the concatenation of its tokens' bytes, with every space and line break. The smallest
vocabulary has no merges, so each token is a byte, and in ASCII texts a character.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from antiphon.model.text.format import TextFormat

END_TOKEN = "</s>"
END_ID = 0
SMALLEST_VOCABULARY = 257  # END_TOKEN and all bytes


def write_exact_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Learn byte-level BPE from texts until the vocabulary has vocab_size entries, and write a tokenizer.json.

    vocab_size: at least SMALLEST_VOCABULARY. Texts with few different words give fewer entries.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.save(str(path))


def exact_bpe_format() -> TextFormat:
    """Return the text format of language models trained by this project: a prompt has the tokens of its text only."""
    return TextFormat(kind="tokenizers", special_ids=(END_ID,), template=("$text",))
