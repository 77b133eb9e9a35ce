"""The checkpoint's tokenizer as transformers opens it: its tokenizer.json for the bundle, and a comparison of texts.

transformers applies the flags of tokenizer_config.json (do_lower_case, add_prefix_space, legacy_behaviour and many
others) to the tokenizer when it opens it, and converts older files (vocab.txt, merges.txt or a SentencePiece model). So
the bundle gets the tokenizer.json of the opened tokenizer, not that of the checkpoint.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from antiphon.checkpoints.gguf_files import alone, is_gguf, read_metadata
from antiphon.checkpoints.settings import in_one_line, read_json
from antiphon.errors import TokenizerError, VerificationError
from antiphon.importer.original import quiet_transformers
from antiphon.text.format import LanguageIds, TextFormat, fill
from antiphon.text.segmenters import may_be_typed
from antiphon.text.tokenizer import Tokenizer

OLDER_FILES = ("vocab.txt", "vocab.json", "*.model", "*.spm")
_FILE = "tokenizer.json"
# Kinds of tokenizers of GGUF files, and what transformers leaves out of a pre-tokenizer: "whole words": a word of the
# vocabulary is taken without merges, and the begin token is added unless the file denies it; "digits": one by one.
_GGUF_KINDS = ("gpt2", "llama")
_PREFIX = "add_space_prefix"
_GGUF_SPLITS = {
    "gpt-2": "",
    "qwen2": "",
    "deepseek-r1-qwen": "",
    "llama3": "whole words",
    "llama-v3": "whole words",
    "llama-bpe": "whole words",
    "tekken": "whole words",
    "smollm": "digits",
}
# Texts of users, on which tokenizers of different settings differ.
TEXTS = (
    "The Cat sat on THE mat.",
    "Ärger über naïve Façades, señor Łukasz; ΑΒΓ, Привет",
    "  two  spaces  at  both ends  ",
    "tab\tand\nnew line\r\n\r\nand more",
    "3.14 1,234.56 2026-11-27 12:30 50% €9.99 (a+b)^2=c_d",
    "I'll don't it's we've -- 'quoted' \"double\" “curly” …",
    "https://example.org/a/b?c=d&e=%20#f user@example.org C:\\path\\file.txt",
    "emoji 😀 👩‍👩‍👧 🇩🇪 ❤️",
    "日本語の文章。中文字符，한국어 텍스트",
    "שלום עולם مرحبا بالعالم हिन्दी ไทย",
    "e\u0301 \u00e9 \ufb01 \uff21 \u00bd \u00a0 \u200b \u00ad x",
    "<b>html</b> [MASKED] {json: 1} `code` @user #tag",
    "supercalifragilisticexpialidocious" * 4,
    "word . word , word ! word ? n't 's do not",
    "",
    " ",
    ".",
)


def open_original_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a checkpoint, opened by transformers without code of the checkpoint.

    Raises TokenizerError naming the directory if it has no tokenizer files, or transformers cannot open them.
    """
    from transformers import AutoTokenizer

    if is_gguf(folder):
        return _open_gguf_tokenizer(folder)
    has_files = any(path.match(pattern) for path in folder.iterdir() for pattern in (_FILE, *OLDER_FILES))
    if not has_files and "ByT5" not in str(read_json(folder / "tokenizer_config.json").get("tokenizer_class")):
        # transformers would create an empty tokenizer without an error.
        raise TokenizerError(f"{folder} has no tokenizer: neither {_FILE} nor {', '.join(OLDER_FILES)}")
    settings = read_json(folder / "tokenizer_config.json").get("sp_model_kwargs") or {}
    # Sampling of SentencePiece's segmentations, like dropout, is a technique of training.
    calm = {"sp_model_kwargs": {**settings, "enable_sampling": False}} if settings.get("enable_sampling") else {}
    try:
        with warnings.catch_warnings(), quiet_transformers():
            warnings.simplefilter("ignore")
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **calm)
    except Exception as error:  # errors of the libraries below transformers share no base class
        raise TokenizerError(f"{folder}: transformers cannot open the tokenizer: {in_one_line(error)}") from None


def _open_gguf_tokenizer(path: Path) -> Any:
    """Return the tokenizer that transformers builds from a GGUF file's metadata, with what it leaves out.

    llama.cpp takes some settings from the name of the pre-tokenizer, tokenizer.ggml.pre, which decides how a text is
    split before merges. Raises TokenizerError naming a pre-tokenizer whose settings are not known here.
    """
    from transformers import AutoTokenizer

    keys = ("general.architecture", *(f"tokenizer.ggml.{key}" for key in ("model", "pre", "add_bos_token", _PREFIX)))
    stated = read_metadata(path, *keys)
    of_architecture = "gpt-2" if stated["general.architecture"] == "gpt2" else None  # files older than the key
    kind, pre = stated.get("tokenizer.ggml.model"), stated.get("tokenizer.ggml.pre", of_architecture)
    if kind not in _GGUF_KINDS:
        raise TokenizerError(f"{path}: tokenizer.ggml.model is {kind!r}; supported are {', '.join(_GGUF_KINDS)}")
    if kind == "gpt2" and pre not in _GGUF_SPLITS:
        raise TokenizerError(f"{path}: tokenizer.ggml.pre is {pre!r}; supported are {', '.join(_GGUF_SPLITS)}")
    if kind == "llama" and not stated.get(f"tokenizer.ggml.{_PREFIX}", True):
        raise TokenizerError(f"{path}: tokenizer.ggml.{_PREFIX} is False; only True is supported")
    try:
        with warnings.catch_warnings(), quiet_transformers(), alone(path) as folder:
            warnings.simplefilter("ignore")
            original = AutoTokenizer.from_pretrained(
                folder, gguf_file=path.name, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # errors of the libraries below transformers share no base class
        raise TokenizerError(f"{path}: transformers cannot open the tokenizer: {in_one_line(error)}") from None
    if kind == "gpt2":
        _complete_split(original, str(pre), has_begin=stated.get("tokenizer.ggml.add_bos_token"))
    return original


def _complete_split(original: Any, pre: str, *, has_begin: bool | None) -> None:
    """Add what llama.cpp's llama_vocab knows of a pre-tokenizer and transformers' reader of GGUF files does not."""
    from tokenizers import pre_tokenizers

    if _GGUF_SPLITS[pre] == "whole words":
        original.backend_tokenizer.model.ignore_merges = True
        original.add_bos_token = has_begin is not False and original.bos_token is not None
    elif _GGUF_SPLITS[pre] == "digits":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        original.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


def write_tokenizer(original: Any, to: Path, num_rows: int, notes: list[str]) -> None:
    """Write tokenizer.json and tokenizer_config.json of a tokenizer of transformers.

    num_rows: rows of the model's embedding; tokens with larger ids are left out and reported in `notes`, because the
    original fails for a text with one of them. Dropout, which is a technique of training, is removed and reported.
    Raises TokenizerError if it is a kind of tokenizer that has no tokenizer.json.
    """
    if not hasattr(original, "backend_tokenizer"):
        raise TokenizerError(f"{type(original).__name__} has no {_FILE}, and its kind of tokenizer cannot be converted")
    original.save_pretrained(to)
    described = json.loads((to / _FILE).read_bytes())
    model = described["model"]
    if model.get("dropout"):
        notes.append(f"dropout={model['dropout']} of {_FILE} is left out: a text has one tokenisation when served")
        model["dropout"] = original.backend_tokenizer.model.dropout = None
    if outside := _leave_out_rows(described, num_rows):
        shown = ", ".join(outside[:3]) + (f" and {len(outside) - 3} more" if len(outside) > 3 else "")
        notes.append(f"tokens without a row in the model are left out: {shown}; in a text they are ordinary characters")
    described["truncation"] = described["padding"] = None
    (to / _FILE).write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")


def _leave_out_rows(described: dict[str, Any], num_rows: int) -> list[str]:
    """Remove the tokens of a tokenizer.json from the id num_rows on, and return them in the order of their ids."""
    model, added = described["model"], described["added_tokens"]
    outside = {token["content"]: token["id"] for token in added if token["id"] >= num_rows}
    if isinstance(model["vocab"], list):
        outside |= {entry[0]: index for index, entry in enumerate(model["vocab"]) if index >= num_rows}
        model["vocab"] = model["vocab"][:num_rows]
    else:
        outside |= {token: index for token, index in model["vocab"].items() if index >= num_rows}
        model["vocab"] = {token: index for token, index in model["vocab"].items() if index < num_rows}
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if _is_kept(merge, model["vocab"])]
    described["added_tokens"] = [token for token in added if token["id"] < num_rows]
    return sorted(outside, key=outside.__getitem__)


def _is_kept(merge: str | Sequence[str], vocabulary: dict[str, int]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in vocabulary and right in vocabulary and left + right in vocabulary


def compare_texts(original: Any, tokenizer: Tokenizer, text: TextFormat, num_rows: int, notes: list[str]) -> None:
    """Compare texts to ids, and ids to texts, with the tokenizer of transformers.

    A difference that is on purpose is reported in `notes`: special tokens that a user types are ordinary text here,
    unless they are meant to be typed. num_rows: as for write_tokenizer.
    Raises VerificationError naming the text and both results for any other difference.
    """
    defaults = (text.default_source_language, text.default_target_language)
    languages = LanguageIds(*(None if code is None else text.languages[code] for code in defaults))
    special_ids, special = {*text.special_ids}, list(_special_texts(original))
    as_words = [_plain_ids(original, sample) for sample in special]
    if as_words != [_plain_ids(original, sample, split_special_tokens=False) for sample in special]:
        notes.append("special tokens that a user types are ordinary text")
    for sample in (*TEXTS, *special):
        ids = tokenizer.encode(sample)
        expected = _plain_ids(original, sample)
        if max(expected, default=0) >= num_rows:
            continue  # the original fails here
        if sample in special and not special_ids.intersection(ids):
            continue  # some vocabularies have a special token as a piece of text too
        if ids != expected:
            raise VerificationError(_difference(sample, ids, expected, "text has the ids"))
        filled, whole = list(fill(text, ids, None, languages)[0]), original(sample).input_ids
        if whole != filled and _plain_ids(original, sample, split_special_tokens=False) == expected:
            raise VerificationError(_difference(sample, filled, whole, "text has the ids with special tokens"))
        _compare_decoding(original, tokenizer, ids, notes)


def _compare_decoding(original: Any, tokenizer: Tokenizer, ids: list[int], notes: list[str]) -> None:
    decoded = tokenizer.decode(ids)
    theirs = original.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if decoded != theirs:
        raise VerificationError(_difference(str(ids), decoded, theirs, "token ids have the text"))
    if original.decode(ids, skip_special_tokens=True) != theirs:
        note = "clean_up_tokenization_spaces is left out: a text keeps its spaces before punctuation"
        notes.extend({note} - {*notes})


def _plain_ids(original: Any, sample: str, *, split_special_tokens: bool = True) -> list[int]:
    """Return the original's ids without special tokens around them; special tokens inside are split like words."""
    backend = getattr(original, "backend_tokenizer", None)
    if backend is None or not split_special_tokens:
        ids: list[int] = original(sample, add_special_tokens=False, split_special_tokens=split_special_tokens).input_ids
        return ids
    before, backend.encode_special_tokens = backend.encode_special_tokens, True
    try:
        ids = backend.encode(sample, add_special_tokens=False).ids
    finally:
        backend.encode_special_tokens = before
    return ids


def _special_texts(original: Any) -> Iterator[str]:
    """Yield texts with special tokens that are ordinary text here: those that users are not meant to write."""
    for token in original.all_special_tokens[:8]:
        if token != original.mask_token and not may_be_typed(token):
            yield f"the {token} cat"


def _difference(sample: str, ours: object, theirs: object, what: str) -> str:
    return (
        f"the imported tokenizer differs from the original: the {what} {_shown(theirs)} in transformers and "
        f"{_shown(ours)} here: {_shown(sample)}; --no-verify skips the comparison"
    )


def _shown(value: object) -> str:
    return repr(value)[:200]
