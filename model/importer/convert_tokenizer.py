"""Conversion of older tokenizer files (vocab.txt, merges.txt or a SentencePiece model) to tokenizer.json.

transformers converts them, as it does when it runs the original. Only the importer uses this module.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from antiphon.model.text.format import TokenizerError

OLDER_FILES = ("vocab.txt", "vocab.json", "*.model")


def convert_tokenizer(folder: Path, to: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json from a checkpoint's older files.

    Raises TokenizerError naming the directory if it has no tokenizer files or they cannot be converted.
    """
    from transformers import AutoTokenizer

    if not any(path.match(pattern) for path in folder.iterdir() for pattern in OLDER_FILES):
        # transformers would create an empty tokenizer without an error.
        raise TokenizerError(f"{folder} has no tokenizer: neither tokenizer.json nor {', '.join(OLDER_FILES)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            tokenizer.save_pretrained(to)
    except Exception as error:  # errors of the libraries below transformers share no base class
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise TokenizerError(
            f"{folder} has no tokenizer.json, and transformers cannot make one from the other files: {reason}"
        ) from None
    if not (to / "tokenizer.json").is_file():
        raise TokenizerError(f"{folder} has no tokenizer.json, and its kind of tokenizer cannot be converted to one")
