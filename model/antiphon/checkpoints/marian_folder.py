"""Directory of a Marian model: the YAML file of its decoder, the model file, vocabularies and SentencePiece models.

The decoder's file (decoder.yml, config.*.yml) names model and vocabularies. Without one the directory must have one
model, and one vocabulary or two whose names begin or end like "source" and "target". Files can be compressed with gzip.
A vocabulary is a SentencePiece model, a YAML or JSON file from token to id, or a list of tokens, one a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.marian_files import SUFFIXES, MarianFile, is_model_file, read_file
from antiphon.checkpoints.settings import Settings
from antiphon.checkpoints.text_formats import language_codes
from antiphon.errors import SourceError, TokenizerError
from antiphon.text.format import TextFormat
from antiphon.text.segmenters import read_pieces
from antiphon.text.shortlist import SHORTLIST_NAME

END, UNKNOWN = "</s>", "<unk>"
_PIECES, _MAPPINGS = (".spm", ".spm.gz"), (".yml", ".yaml", ".json")
_SOURCE, _TARGET = ("source", "src"), ("target", "trg", "tgt")
# Names of Nematus for the tokens of the ids 0 and 1, which Marian accepts too.
_OLDER_NAMES = {"eos": END, "UNK": UNKNOWN}
_ESCAPES = {
    "0": "\0", "a": "\a", "b": "\b", "t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "e": "\x1b", "N": "\x85",
    "_": "\xa0", "L": "\u2028", "P": "\u2029",
}  # fmt: skip
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
Tokens = dict[str, int]


def decoder_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the decoder: the only YAML file with a list of models; empty without one.

    Raises SourceError naming the files if there are several, or one that cannot be read.
    """
    found = {
        path: settings for path in _yaml_files(folder) if isinstance((settings := _yaml(path)).get("models"), list)
    }
    if len(found) > 1:
        raise SourceError(f"{folder} has several decoder configurations: {_names(found)}; keep one")
    return next(iter(found.values()), {})


def model_path(folder: Path) -> Path | None:
    """Return the model that the decoder's file names, or the only one of the directory; None without one.

    Raises SourceError naming the files if there are several.
    """
    found = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIXES) and is_model_file(path))
    try:
        named = [_beside(folder, name) for name in decoder_settings(folder).get("models", [])]
    except SourceError:
        if found:
            raise
        return None  # a directory of another format can have any YAML files
    if len(named or found) > 1:
        raise SourceError(
            f"{folder} has several Marian models: {_names(named or found)}; ensembles are not supported: keep one"
        )
    return next(iter(named or found), None)


def open_model(folder: Path) -> MarianFile:
    """Open the model of a directory. Raises SourceError."""
    path = model_path(folder)
    if path is None:
        raise SourceError(f"{folder} has no Marian model, a file .npz or .bin")
    return MarianFile(path)


def vocabularies(folder: Path, decoder: Mapping[str, Any]) -> list[Path]:
    """Return the vocabulary files: one for both sides, or source and target.

    Raises SourceError naming the files if they are missing, or it is unclear which is the source's.
    """
    named = [_beside(folder, name) for name in decoder.get("vocabs") or []]
    found = list(dict.fromkeys(named)) or _found_vocabularies(folder)
    if named:
        is_clear = len(found) <= 2
    else:
        sides = [[path for path in found if _is_named(path, names)] for names in (_SOURCE, _TARGET)]
        is_clear = len(found) == 1 or (len(found) == 2 and all(len(side) == 1 for side in sides))
        if len(found) == 2 and is_clear:
            found = [*sides[0], *sides[1]]
    if not is_clear:
        raise SourceError(
            f"{folder} has {len(found)} vocabularies ({_names(found) or '.spm, *vocab*.yml, *vocab*.txt'}); it must "
            "have one, or two with names like source.spm and target.spm, or a decoder.yml that names them in vocabs"
        )
    if factored := [path.name for path in found if path.suffix == ".fsv"]:
        raise SourceError(f"{folder / factored[0]}: factored vocabularies (.fsv) are not supported")
    if len({is_pieces(path) for path in found}) > 1:
        raise SourceError(f"{folder} has vocabularies of two kinds: {_names(found)}; SentencePiece is for both or none")
    return found


def _found_vocabularies(folder: Path) -> list[Path]:
    """Return vocabularies that no decoder's file names: lists of tokens, else SentencePiece models."""
    files = sorted(folder.iterdir())
    listed = [path for path in files if path.suffix in (*_MAPPINGS, ".txt", ".vocab", ".fsv") and "vocab" in path.name]
    return listed or [path for path in files if is_pieces(path)]


def is_pieces(path: Path) -> bool:
    """Return whether a vocabulary is a SentencePiece model."""
    return path.name.endswith(_PIECES)


def read_tokens(path: Path) -> Tokens:
    """Return the id of each token of a vocabulary, with </s> among them. Raises SourceError naming the file."""
    if is_pieces(path):
        pieces = _read_pieces(path)
        tokens = {pieces.id_to_piece(index): index for index in reversed(range(pieces.get_piece_size()))}
    else:
        try:
            tokens = _mapping(path) if path.suffix in _MAPPINGS else _list(path)
        except (ValueError, TypeError, RecursionError) as error:
            raise SourceError(f"{path} cannot be read: {error}") from None
        if not tokens or min(tokens.values()) < 0:
            raise SourceError(f"{path} has no tokens, or an id below 0")
    if END not in tokens:
        raise SourceError(f"{path} has no {END}")
    return tokens


def _list(path: Path) -> Tokens:
    """Return the tokens of a list; the first of equal ones counts, and keeps the ids of the others."""
    lines = read_file(path).decode("utf-8").removesuffix("\n").replace("\r\n", "\n").split("\n")
    if "" in lines:
        raise ValueError(f"line {lines.index('') + 1} is empty")
    return {token: index for index, token in reversed(list(enumerate(lines)))}


def _mapping(path: Path) -> Tokens:
    """Return the tokens of a YAML or JSON mapping. As in Marian the first of equal tokens counts."""
    content = read_file(path).decode("utf-8")
    pairs = json.loads(content, object_pairs_hook=list) if content.lstrip()[:1] == "{" else _yaml_pairs(content)
    tokens: Tokens = {}
    for token, index in pairs:
        tokens.setdefault(token, int(index))
    older = {_OLDER_NAMES[token]: index for token, index in tokens.items() if token in _OLDER_NAMES and index < 2}
    return older | tokens


def _yaml_pairs(content: str) -> Iterator[tuple[str, str]]:
    """Yield tokens and ids of a vocabulary in YAML, a token a line as Marian writes it, or "? token" before ": id".

    A YAML library would refuse characters that tokens contain, and would read some tokens as numbers or nothing.
    """
    key: str | None = None
    for number, line in enumerate(content.split("\n"), start=1):
        line = line.removesuffix("\r")
        if key is None and (not line.strip() or line.startswith(("#", "---", "...", "%YAML"))):
            continue
        if key is None and line.startswith("? "):
            key = line[2:]
            continue
        token, colon, index = (key, line[:1], line[1:]) if key is not None else line.rpartition(":")
        if colon != ":" or not index.strip().isdecimal():
            raise ValueError(f"line {number} is {line[:60]!r}; expected a token, a colon and its id")
        yield _unquoted(token.strip(" ")), index
        key = None


def _unquoted(token: str) -> str:
    if len(token) > 1 and token[0] == token[-1] == "'":
        return token[1:-1].replace("''", "'")
    if len(token) > 1 and token[0] == token[-1] == '"':
        return _ESCAPE.sub(_unescaped, token[1:-1])
    return token


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    return chr(int(code, 16)) if code else _ESCAPES.get(match[4], match[4])


def text(folder: Path, settings: Settings, config: ModelConfig) -> TextFormat:
    """Return the text format: SentencePiece models, with the ids of the vocabularies where these are other files.

    Tokens between spaces without SentencePiece models. Raises SourceError if texts need another program.
    """
    source, tokens = settings["tokens"][0], settings["tokens"]
    languages = language_codes(source)
    common: dict[str, Any] = dict(
        special_ids=tuple(sorted({config.eos_id, config.bos_id})),
        template=(*(("$target_language",) if languages else ()), "$text", source[END]),
        languages=languages,
        shortlist=SHORTLIST_NAME if settings["shortlist"] is not None else None,
    )
    paths = [Path(path) for path in settings["vocabularies"]]
    if is_pieces(paths[0]):
        names = [path.name.removesuffix(".gz") for path in paths]
        return TextFormat(kind="sentencepiece", source=names[0], target=names[-1], **common)
    pieces = _pieces_beside(folder)
    written = _written(tokens, "json" if pieces else "txt")
    if pieces:
        common |= dict(source_vocabulary=written[0], target_vocabulary=written[-1])
        names = [path.name.removesuffix(".gz") for path in pieces]
        return TextFormat(kind="sentencepiece", source=names[0], target=names[-1], **common)
    _refuse_other_segmenters(folder, tokens)
    return TextFormat(kind="words", source=written[0], target=written[-1], **common)


def write_text(folder: Path, settings: Settings, to: Path) -> None:
    """Write the files of `text` that the directory has in another form.

    Unpacked SentencePiece models; vocabularies with one token a line, or in JSON for SentencePiece models.
    """
    paths = [Path(path) for path in settings["vocabularies"]]
    pieces = paths if is_pieces(paths[0]) else _pieces_beside(folder)
    for path in pieces:
        if path.suffix == ".gz":
            (to / path.stem).write_bytes(read_file(path))
    if is_pieces(paths[0]):
        return
    for name, ids in zip(_written(settings["tokens"], "json" if pieces else "txt"), settings["tokens"], strict=True):
        by_id = {index: token for token, index in ids.items()}
        lines = "".join(f"{by_id.get(index, '')}\n" for index in range(max(by_id) + 1))
        content = json.dumps(ids, ensure_ascii=False) if pieces else lines
        (to / name).write_text(content, encoding="utf-8", newline="\n")


def _written(tokens: Sequence[Tokens], suffix: str) -> list[str]:
    sides = ("shared",) if len(tokens) == 1 else ("source", "target")
    return [f"{side}_vocabulary.{suffix}" for side in sides]


def _pieces_beside(folder: Path) -> list[Path]:
    """Return the SentencePiece models of a directory whose vocabularies are other files: source and target, or one."""
    found = sorted(path for path in folder.iterdir() if is_pieces(path))
    sides = [next((path for path in found if _is_named(path, names)), None) for names in (_SOURCE, _TARGET)]
    if sides[0] is not None and sides[1] is not None:
        return [sides[0], sides[1]]
    if len(found) > 1:
        raise SourceError(
            f"{folder} has several SentencePiece models: {_names(found)}; name them source.spm, target.spm"
        )
    return found


def _refuse_other_segmenters(folder: Path, tokens: Sequence[Tokens]) -> None:
    """Raise SourceError if tokens are pieces of words that another program than SentencePiece makes."""
    codes = sorted(
        path.name for path in folder.iterdir() if path.suffix in (".bpe", ".codes") or "bpe" in path.suffixes
    )
    if codes or any(token.endswith("@@") for token in tokens[0]):
        reason = f"it has {codes[0]}" if codes else "tokens end with @@"
        raise SourceError(
            f"{folder}: texts are segmented by subword-nmt, often after Moses ({reason}), which is not supported; "
            "supported are SentencePiece models (.spm), and vocabularies whose tokens stand between spaces"
        )


def _is_named(path: Path, sides: tuple[str, ...]) -> bool:
    """Return whether the name of a file, or a part of it, begins or ends with one of these names."""
    parts = re.split(r"[._-]", path.name)
    return any(part.startswith(sides) or part.endswith(sides) for part in parts)


def _read_pieces(path: Path) -> Any:
    if path.suffix != ".gz":
        try:
            return read_pieces(path)
        except TokenizerError as error:
            raise SourceError(str(error)) from None
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_proto=read_file(path))
    except (RuntimeError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None


def _yaml_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".yml", ".yaml") and "vocab" not in path.name)


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    return content if isinstance(content, dict) else {}


def _beside(folder: Path, name: object) -> Path:
    """Return a file that the decoder's file names, perhaps by a path on another machine, or its compressed form."""
    path = folder / Path(str(name)).name
    packed = path.with_name(f"{path.name}.gz")
    if not path.is_file() and packed.is_file():
        return packed
    if not path.is_file():
        raise SourceError(f"{folder} has no {path.name}, which its decoder's YAML file names")
    return path


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(path.name for path in paths)
