"""Segmenters: texts to token ids, one class for each kind of vocabulary, and opening of their files. Imports no torch.

Each class gives the same ids as the checkpoint's original tokenizer. Added tokens with text are matched as whole
tokens, as in the original. Special tokens inside a text are ordinary text where the original allows it, so that a text
cannot end the source or change its language. Exceptions are tokens that users are meant to write: the mask token, T5's
<extra_id_N> and Marian's >>fra<<.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from antiphon.errors import TokenizerError
from antiphon.text.format import TextFormat
from antiphon.text.token_table import (
    Strips,
    TokenTable,
    byte_piece,
    space_before,
    table_of,
    token_decoding_of,
    word_marked,
)

_SENTINEL = re.compile(r"<extra_id_\d+>|>>[^<>\s]+<<")
_WORD = re.compile(r"[^ \t\r\n]+")
# NFC makes UTF-8 shorter by less than this factor. The worst case is U+1FBE U+0308 U+0301: 7 bytes become the 2 bytes
# of U+0390.
_NFC_SHRINKING = 4
_PROBE_LEN = 20_000  # characters; segmenting them takes about 10 ms


@dataclass(frozen=True, slots=True)
class Encoding:
    """Token ids of a text, and the position of each: code points [start, end) of the original text."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Segmenter(ABC):
    """Splits texts into tokens; safe to share between threads."""

    @abstractmethod
    def encode(self, text: str) -> Encoding:
        """Return ids and offsets of a text, without the template's tokens."""

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text, without the template's tokens."""
        return self.encode(text).ids

    def ids_of_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, in parallel if the library supports it."""
        return [self.ids(text) for text in texts]

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of a text, in little time for any length.

        With unknown tokens the length gives no bound, because one unknown token can represent the whole text. So only
        the first words of a long text are segmented, up to 20,000 characters. The bound of a shorter text is 0:
        the caller can segment it.
        """
        end = text.rfind(" ", 0, _PROBE_LEN) if len(text) > _PROBE_LEN else 0
        return len(self.ids_of_many([text[:end]])[0]) if end > 0 else 0


def may_be_typed(token: str) -> bool:
    """Return whether users are meant to write this special token in a text."""
    return _SENTINEL.fullmatch(token) is not None


class Backend(Segmenter):
    """Segmenter with a `tokenizers` backend, whose encode_special_tokens must be True.

    longest_token: bytes of the longest token, if NFC and the removal of spaces are the only normalisation and there
        are no unknown tokens; else None.
    """

    def __init__(self, backend: Any, longest_token: int | None = None) -> None:
        self._backend = backend
        self._longest_token = longest_token

    def encode(self, text: str) -> Encoding:
        """Return ids and offsets as the library gives them. Releases the interpreter lock."""
        encoding = self._backend.encode_batch([text], add_special_tokens=False)[0]
        return Encoding(encoding.ids, encoding.offsets)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text. Holds the interpreter lock."""
        return self._backend.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]

    def ids_of_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, computed in parallel. Releases the interpreter lock."""
        return [item.ids for item in self._backend.encode_batch(texts, add_special_tokens=False)]

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens, from the length if the vocabulary has no unknown tokens."""
        if self._longest_token is None:
            return super().min_tokens(text)
        # The text is not normalised here: unordered combining marks take quadratic time under the interpreter lock.
        shrinking = 1 if text.isascii() else _NFC_SHRINKING
        return -(-len(" ".join(text.split()).encode()) // (shrinking * self._longest_token))


class Pieces(Segmenter):
    """Segmenter with a SentencePiece model, whose ids are mapped to the ids of the Transformer.

    ids: Transformer id for each id of the SentencePiece model, or for each piece. With pieces, a piece that the
        SentencePiece model does not know keeps its characters, and the separate vocabulary can contain it.
    unk_id: id of a piece that the separate vocabulary does not contain.
    typed: tokens that are matched as whole tokens before the rest is segmented.
    has_codes: True: a text can begin with a code like >>fra<<; a code outside the vocabulary is the unknown token.
    """

    def __init__(
        self,
        processor: Any,
        ids: Sequence[int] | Mapping[str, int],
        unk_id: int,
        typed: Mapping[str, int],
        *,
        has_codes: bool = False,
    ) -> None:
        self._processor = processor
        self._ids = ids
        self._unk_id = unk_id
        self._typed = WholeTokens(typed)
        self._has_codes = has_codes

    def encode(self, text: str) -> Encoding:
        """Return ids and offsets; a word mark that the model inserts at the start has an empty range."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, part, typed_id in self._parts(text):
            if typed_id is not None:
                ids.append(typed_id)
                offsets.append((start, start + len(part)))
                continue
            places = _code_points(part, start)
            pieces = self._processor.encode(part, return_type="proto").pieces
            is_by_piece = isinstance(self._ids, Mapping)
            ids.extend(self._ids_of([piece.piece if is_by_piece else piece.id for piece in pieces]))
            offsets.extend((places[piece.begin], places[piece.end]) for piece in pieces)
        return Encoding(ids, offsets)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text. Releases the interpreter lock while SentencePiece segments."""
        kind = str if isinstance(self._ids, Mapping) else int
        ids: list[int] = []
        for _, part, typed_id in self._parts(text):
            ids.extend(self._ids_of(self._processor.encode(part, out_type=kind)) if typed_id is None else [typed_id])
        return ids

    def _ids_of(self, pieces: Sequence[Any]) -> list[int]:
        """Return Transformer ids of pieces, or of ids of the SentencePiece model, depending on the mapping's keys."""
        if isinstance(self._ids, Mapping):
            ids, unk_id = self._ids, self._unk_id
            return [ids.get(piece, unk_id) for piece in pieces]
        return [self._ids[piece] for piece in pieces]

    def _parts(self, text: str) -> Iterator[tuple[int, str, int | None]]:
        """Yield start, text and id of each part; the id is None for a part that is not a whole token."""
        begin = 0
        if self._has_codes and text.startswith(">>") and (end := text.find("<<")) != -1:
            begin = end + 2
            yield 0, text[:begin], self._ids_of([text[:begin]])[0]
        yield from self._typed.split(text, begin)


class Bytes(Segmenter):
    """Segmenter into UTF-8 bytes; id = byte + id_offset (ByT5, Xue et al. 2022)."""

    def __init__(self, id_offset: int, typed: Mapping[str, int]) -> None:
        self._id_offset = id_offset
        self._typed = WholeTokens(typed)
        self._longest_typed = max(map(len, typed), default=1)

    def encode(self, text: str) -> Encoding:
        """Return ids and offsets; all bytes of a character have the character's offset."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, part, typed_id in self._typed.split(text):
            if typed_id is not None:
                ids.append(typed_id)
                offsets.append((start, start + len(part)))
                continue
            for place, char in enumerate(part, start):
                utf8 = char.encode()
                ids.extend(byte + self._id_offset for byte in utf8)
                offsets.extend([(place, place + 1)] * len(utf8))
        return Encoding(ids, offsets)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = []
        for _, part, typed_id in self._typed.split(text):
            ids.extend([byte + self._id_offset for byte in part.encode()] if typed_id is None else [typed_id])
        return ids

    def min_tokens(self, text: str) -> int:
        """Return a lower bound from the length: a character has at least one byte, except inside an added token."""
        return -(-len(text) // self._longest_typed)


class Words(Segmenter):
    """Segmenter at white space; each word is looked up without change."""

    def __init__(self, ids: Mapping[str, int], unk_id: int) -> None:
        self._ids = ids
        self._unk_id = unk_id

    def encode(self, text: str) -> Encoding:
        """Return ids and offsets of the words."""
        words = list(_WORD.finditer(text))
        return Encoding([self._ids.get(word[0], self._unk_id) for word in words], [word.span() for word in words])

    def min_tokens(self, text: str) -> int:
        """Return the number of words."""
        return sum(1 for _ in _WORD.finditer(text))


class WholeTokens:
    """Tokens that are matched anywhere in a text before it is segmented; the longest match wins."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if ids else None

    def split(self, text: str, begin: int = 0) -> Iterator[tuple[int, str, int | None]]:
        """Yield start, text and id of each non-empty part of text[begin:]; the id is None between whole tokens."""
        for match in self._pattern.finditer(text, begin) if self._pattern else ():
            if begin < match.start():
                yield begin, text[begin : match.start()], None
            yield match.start(), match[0], self._ids[match[0]]
            begin = match.end()
        if begin < len(text):
            yield begin, text[begin:], None


def _code_points(text: str, start: int) -> Sequence[int]:
    """Return the code point index of each UTF-8 byte of a text, and of the text's end; counted from `start`."""
    if text.isascii():
        return range(start, start + len(text) + 1)
    places = [start + index for index, char in enumerate(text) for _ in char.encode()]
    return [*places, start + len(text)]


_UNKNOWN_WORDS = ("<unk>", "<UNK>", "[UNK]")


class Vocabularies:
    """Segmenter and token table of source and target. By default the source has those of the target."""

    def __init__(
        self,
        target: Segmenter,
        table: TokenTable,
        source: Segmenter | None = None,
        source_table: TokenTable | None = None,
    ) -> None:
        self.source = source or target
        self.target = target
        self.table = table
        self.source_table = source_table or table


def open_text(folder: Path, text: TextFormat) -> Vocabularies:
    """Open the tokenizer files of an imported model. Raises TokenizerError naming the file."""
    kinds: Mapping[str, Callable[[Path, TextFormat], Vocabularies]] = {
        "tokenizers": _open_backend,
        "sentencepiece": _open_pieces,
        "bytes": _open_bytes,
        "words": _open_words,
    }
    return kinds[text.kind](folder, text)


def _added(text: TextFormat, special: frozenset[int]) -> dict[str, int]:
    """Return the added tokens that are matched as whole tokens in a text, with their ids."""
    return {
        token: index
        for token, index in text.added_tokens.items()
        if index not in special or index == text.mask_id or may_be_typed(token)
    }


def _open_backend(folder: Path, text: TextFormat) -> Vocabularies:
    path = folder / (text.source or "")
    return open_backend(_read_json(path), text, path)


def open_backend(described: dict[str, Any], text: TextFormat, path: Path) -> Vocabularies:
    """Open the object of a tokenizer.json, which this function changes. Raises TokenizerError naming the path."""
    special = set(text.special_ids)
    try:
        if "dropout" in described.get("model", {}):  # a technique of training: one text would have many tokenisations
            described["model"]["dropout"] = None
        for token in described.get("added_tokens", ()):
            if token["special"]:
                special.add(token["id"])
                token["special"] = not (token["id"] == text.mask_id or may_be_typed(token["content"]))
        backend = Tokenizer.from_str(json.dumps(described))
        decoding = token_decoding_of(described.get("decoder"))
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    except Exception as error:  # the Rust library raises bare Exception for any defect of the file
        raise TokenizerError(f"{path} cannot be read: {error!r}") from None
    _add_missing(backend, text, path)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    table = table_of(backend.get_vocab().items(), decoding.rest, special, first=decoding.first)
    return Vocabularies(Backend(backend), table)


def _add_missing(backend: Any, text: TextFormat, path: Path) -> None:
    """Add to the vocabulary all added_tokens that the file lacks. Raises TokenizerError if an id differs."""
    for token, index in sorted(text.added_tokens.items(), key=lambda item: item[1]):
        if backend.token_to_id(token) is None:
            is_special = index in text.special_ids and index != text.mask_id and not may_be_typed(token)
            backend.add_tokens([AddedToken(token, special=is_special, normalized=False)])
        if backend.token_to_id(token) != index:
            raise TokenizerError(f"{path}: {token} has the id {backend.token_to_id(token)}, expected {index}")


def _open_pieces(folder: Path, text: TextFormat) -> Vocabularies:
    target_file = text.target or text.source or ""
    target_vocabulary = text.target_vocabulary or text.source_vocabulary
    target, table = _open_side(folder, text, target_file, target_vocabulary)
    if (text.source, text.source_vocabulary) == (target_file, target_vocabulary):
        return Vocabularies(target, table)
    return Vocabularies(target, table, *_open_side(folder, text, text.source or "", text.source_vocabulary))


def _open_side(folder: Path, text: TextFormat, file: str, vocabulary: str | None) -> tuple[Segmenter, TokenTable]:
    processor = read_pieces(folder / file)
    if vocabulary is None:
        return _own_ids(processor, text)
    return _mapped_ids(processor, text, folder / vocabulary)


def _own_ids(processor: Any, text: TextFormat) -> tuple[Segmenter, TokenTable]:
    """Open with the SentencePiece model's ids plus id_offset; tokens in added_tokens have the ids given there."""
    size = processor.get_piece_size()
    names = [processor.id_to_piece(index) for index in range(size)]
    ids = [text.added_tokens.get(name, index + text.id_offset) for index, name in enumerate(names)]
    hidden = [ids[index] for index in range(size) if processor.is_control(index) or processor.is_unknown(index)]
    special = frozenset({*text.special_ids, *hidden})
    typed = {token: index for token, index in _added(text, special).items() if token not in names}
    tokens = [*zip(names, ids, strict=True), *text.added_tokens.items()]
    segmenter = Pieces(processor, ids, ids[processor.unk_id()], typed)
    # A model that replaces several spaces by one also removes spaces before a text.
    strips: Strips = "leading spaces" if processor.encode("a  a") == processor.encode("a a") else "one space"
    return segmenter, table_of(tokens, _piece_bytes, special, strips=strips)


def _mapped_ids(processor: Any, text: TextFormat, path: Path) -> tuple[Segmenter, TokenTable]:
    """Open with the ids of a separate vocabulary file, which maps pieces to ids."""
    vocabulary = _read_json(path)
    unk_id = vocabulary.get(processor.id_to_piece(processor.unk_id()))
    if unk_id is None or not all(isinstance(index, int) and index >= 0 for index in vocabulary.values()):
        unknown = processor.id_to_piece(processor.unk_id())
        raise TokenizerError(f"{path}: expected a JSON object from tokens to ids >= 0 that contains {unknown}")
    special = frozenset({*text.special_ids, unk_id})
    segmenter = Pieces(
        processor,
        vocabulary,
        unk_id,
        _added(text, special),
        has_codes=text.target not in (None, text.source),  # only Marian has a SentencePiece model for each side
    )
    tokens = [*vocabulary.items(), *text.added_tokens.items()]
    return segmenter, table_of(tokens, word_marked, special, strips="white space")


def _piece_bytes(piece: str) -> bytes:
    byte = byte_piece(piece)
    return word_marked(piece) if byte is None else byte


def _open_bytes(folder: Path, text: TextFormat) -> Vocabularies:
    special = frozenset(text.special_ids)
    tokens = {f"<0x{byte:02X}>": byte + text.id_offset for byte in range(256)} | text.added_tokens
    table = table_of(tokens.items(), _piece_bytes, special, errors="ignore")
    return Vocabularies(Bytes(text.id_offset, _added(text, special)), table)


def _open_words(folder: Path, text: TextFormat) -> Vocabularies:
    target_file = text.target or text.source or ""
    target = _open_list(folder / target_file, text)
    if text.source == target_file:
        return Vocabularies(*target)
    return Vocabularies(*target, *_open_list(folder / (text.source or ""), text))


def _open_list(path: Path, text: TextFormat) -> tuple[Segmenter, TokenTable]:
    try:
        words = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")  # a carriage return is a character
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    tokens = [(word, index) for index, word in enumerate(words)]
    ids = dict(reversed(tokens))  # the first of equal words wins
    unknown = next((ids[word] for word in _UNKNOWN_WORDS if word in ids), None)
    if unknown is None:
        raise TokenizerError(f"{path}: the vocabulary has no {' or '.join(_UNKNOWN_WORDS)}")
    table = table_of(tokens, space_before, text.special_ids, first=str.encode)
    return Words(ids, unknown), table


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} cannot be read: it contains a {type(content).__name__}, expected an object")
    return content


def read_pieces(path: Path) -> Any:
    """Read a SentencePiece model. Raises TokenizerError naming the file, or the missing package."""
    try:
        import sentencepiece
    except ImportError:
        raise TokenizerError(f"{path} needs the package sentencepiece, which is not installed") from None
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    except (OSError, RuntimeError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
