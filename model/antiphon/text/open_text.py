"""Opening of the tokenizer files of imported models: one function for each kind of TextFormat."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from antiphon.errors import TokenizerError
from antiphon.text.format import TextFormat
from antiphon.text.segmenters import Backend, Bytes, Pieces, Segmenter, Words, may_be_typed
from antiphon.text.token_bytes import byte_piece, space_before, token_decoding_of, word_marked
from antiphon.text.token_table import Strips, TokenTable, table_of

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
