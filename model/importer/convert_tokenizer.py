"""A tokenizer.json for checkpoints from before there were any: vocab.txt, merges.txt or a SentencePiece model alone.

transformers makes it, as it would to run the original. For the import command only.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from antiphon.model.text.format import TokenizerError

OLDER_FILES = ("vocab.txt", "vocab.json", "*.model")


def convert_tokenizer(folder: Path, to: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of a checkpoint's older files. Raises TokenizerError."""
    from transformers import AutoTokenizer

    if not any(path.match(pattern) for path in folder.iterdir() for pattern in OLDER_FILES):
        # transformers would make a tokenizer of nothing, and not say so.
        raise TokenizerError(f"{folder} has no tokenizer: neither tokenizer.json nor {', '.join(OLDER_FILES)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            tokenizer.save_pretrained(to)
    except Exception as error:  # transformers raises whatever the library below it did
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise TokenizerError(
            f"{folder} has no tokenizer.json, and transformers makes none of its other files: {reason}"
        ) from None
    if not (to / "tokenizer.json").is_file():
        raise TokenizerError(f"{folder} has no tokenizer.json, and its tokenizer is of a kind that has none")
