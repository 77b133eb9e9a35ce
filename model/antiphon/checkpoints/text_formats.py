"""TextFormat of a checkpoint's tokenizer files: common code of all families.

Templates, special tokens, added tokens and languages come from the files; a family gives only what the files do not
have. Ids are those of the files; the importer checks them against the model's vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from antiphon.errors import NoTokenizersFile, TokenizerError
from antiphon.text.format import Slot, Template, TextFormat
from antiphon.text.segmenters import read_pieces

# Language tokens of public checkpoints. The named group is the language code for users.
_LANGUAGE_TOKEN = re.compile(
    r">>(?P<marian>[^<>\s]+)<<|__(?P<m2m>[a-z]{2,3})__|(?P<mbart>[a-z]{2,3}_[A-Z]{2})|(?P<nllb>[a-z]{3}_[A-Z][a-z]{3})"
)
_SLOTS: tuple[Slot, ...] = ("$text", "$pair", "$source_language", "$target_language")
NamedTemplate = Sequence[str]
_Templates = tuple[tuple[str | int, ...], tuple[str | int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Languages:
    """Facts about a multilingual model that its files do not have.

    place: position of the target's language token, see TextFormat.target_language_place.
    source, target: default language codes; None: those of tokenizer_config.json.
    """

    place: Literal["first", "begin"] | None = None
    source: str | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True)
class _Settings:
    """Token settings of a checkpoint's small JSON files: merged settings, added tokens by id, special tokens."""

    described: Mapping[str, Any]
    added: dict[str, int] = field(default_factory=dict)
    special: set[str] = field(default_factory=set)

    @property
    def listed(self) -> tuple[str, ...]:
        """Special tokens without a role name."""
        listed = self.described.get("additional_special_tokens") or self.described.get("extra_special_tokens")
        return tuple(filter(None, map(_content, listed))) if isinstance(listed, list) else ()

    def token(self, name: str) -> str | None:
        """Return the token with a role name such as "mask_token"; None if the settings have none."""
        return _content(self.described.get(name))


@dataclass(frozen=True, slots=True)
class _TokenizersFile:
    """Contents of a tokenizer.json: id of each token, special ids, and templates of texts and pairs."""

    ids: dict[str, int]
    special: set[int]
    templates: _Templates
    pair_start: int | None


def tokenizers_format(
    folder: Path,
    *,
    languages: Languages | None = None,
    template: NamedTemplate | None = None,
    pair_template: NamedTemplate | None = None,
) -> TextFormat:
    """Return the text format of a checkpoint with a tokenizer.json.

    template, pair_template: token names and slots, such as ("$text", "</s>"); None: those of the file's post-processor.
    Raises TokenizerError naming the file.
    """
    path = folder / "tokenizer.json"
    settings, file = _settings(folder), _read_tokenizers(path)
    added = {token: index for token, index in settings.added.items() if token not in file.ids}
    special = file.special | {index for token, index in added.items() if token in settings.special}
    return _format(
        path,
        settings,
        file.ids | added,
        languages,
        kind="tokenizers",
        source=path.name,
        added_tokens=added,
        special_ids=tuple(sorted(special)),
        template=template or file.templates[0],
        pair_template=pair_template or file.templates[1],
        pair_start=None if pair_template else file.pair_start,
    )


def sentencepiece_format(
    folder: Path,
    model: str,
    *,
    template: NamedTemplate,
    pair_template: NamedTemplate | None = None,
    target_model: str | None = None,
    vocabulary: str | None = None,
    target_vocabulary: str | None = None,
    id_offset: int = 0,
    added_tokens: Mapping[str, int] | None = None,
    special_tokens: Sequence[str] = (),
    languages: Languages | None = None,
) -> TextFormat:
    """Return the text format of a checkpoint with a SentencePiece model and possibly a separate vocabulary.

    model, target_model: file of the SentencePiece model, and of the target's if it is a different one.
    vocabulary, target_vocabulary: JSON files from piece to id; None: the ids of the model plus id_offset.
    template, pair_template: token names and slots, such as ("$source_language", "$text", "</s>").
    added_tokens: tokens whose ids are not those of the model plus id_offset: {"<s>": 0, "<pad>": 1, ...}.
    special_tokens: special tokens; those without an id in the files get the next free ids in this order (M2M-100's
        languages).
    Raises TokenizerError naming the file.
    """
    settings = _settings(folder)
    pieces, control = _own_pieces(folder / model, id_offset)
    if vocabulary is not None:
        pieces = _read(folder / vocabulary)
    own_tokens = added_tokens or {}
    added = {token: index for token, index in settings.added.items() if token not in pieces} | dict(own_tokens)
    _assign_free_ids((*settings.listed, *special_tokens), pieces, added)
    ids = {**pieces, **added}
    special = {*settings.special, *special_tokens, *own_tokens, *control}
    return _format(
        folder / model,
        settings,
        ids,
        languages,
        kind="sentencepiece",
        source=model,
        target=target_model,
        source_vocabulary=vocabulary,
        target_vocabulary=target_vocabulary,
        id_offset=id_offset,
        added_tokens=added,
        special_ids=tuple(sorted({ids[token] for token in special if token in ids})),
        template=tuple(template),
        pair_template=tuple(pair_template) if pair_template else None,
    )


def bytes_format(folder: Path) -> TextFormat:
    """Return the text format of ByT5, which has no files: three special tokens, 256 bytes, sentinel tokens."""
    settings = _settings(folder)
    special = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    sentinels = {f"<extra_id_{index}>": 259 + index for index in range(125)}
    added = special | (settings.added or sentinels)
    return TextFormat(
        kind="bytes",
        source=None,
        id_offset=3,
        added_tokens=added,
        special_ids=tuple(sorted({*special.values(), *(added[token] for token in sentinels if token in added)})),
        template=("$text", 1),
        pair_template=("$text", 1, "$pair", 1),
    )


def _format(
    path: Path, settings: _Settings, ids: Mapping[str, int], languages: Languages | None, **fields: Any
) -> TextFormat:
    """Return a TextFormat with the fields that all kinds share: templates with ids, languages and the mask token.

    Raises TokenizerError naming the file for an unknown default language or template token.
    """
    special = set(fields["special_ids"])
    codes = {} if languages is None else language_codes(ids, special)
    facts = languages or Languages()
    mask = settings.token("mask_token")
    source = (facts.source or settings.token("src_lang")) if codes else None
    target = (facts.target or settings.token("tgt_lang")) if codes else None
    for name, code in (("src_lang", source), ("tgt_lang", target)):
        if code is not None and code not in codes:
            raise TokenizerError(f"{path}: {name} is {code!r}, which is not one of the {len(codes)} language codes")
    for name in ("template", "pair_template"):
        if fields[name] is not None:
            fields[name] = _with_ids(path, fields[name], ids, codes)
    return TextFormat(
        **fields,
        languages=codes,
        default_source_language=source,
        default_target_language=target,
        target_language_place=facts.place if codes else None,
        mask_id=ids.get(mask) if mask else None,
    )


def language_codes(ids: Mapping[str, int], special: Collection[int] = ()) -> dict[str, int]:
    """Return the id of each language token by its language code; those of Marian need not be special."""
    matches = ((_LANGUAGE_TOKEN.fullmatch(token), index) for token, index in ids.items())
    named = [(match, index) for match, index in matches if match is not None]
    codes = {
        match[match.lastgroup or 0]: index
        for match, index in named
        if index in special or match.lastgroup == "marian"  # in other vocabularies ordinary pieces can look like codes
    }
    return dict(sorted(codes.items()))


def _with_ids(path: Path, template: Sequence[str | int], ids: Mapping[str, int], codes: Mapping[str, int]) -> Template:
    """Return a template with ids instead of names; a language token becomes the slot of the source language."""
    languages = set(codes.values())
    elements: list[int | Slot] = []
    for name in template:
        if slot := next((slot for slot in _SLOTS if slot == name), None):
            elements.append(slot)
        elif isinstance(name, str) and name not in ids:
            raise TokenizerError(f"{path}: the vocabulary has no {name}")
        else:
            index = ids[name] if isinstance(name, str) else name
            elements.append("$source_language" if index in languages else index)
    return tuple(elements)


def _read_tokenizers(path: Path) -> _TokenizersFile:
    described = _read(path)
    if not described:
        raise NoTokenizersFile(f"{path.parent} has no tokenizer.json, which is needed for its tokenizer")
    try:
        templates, pair_start = _templates(described.get("post_processor"), _settings(path.parent))
        special = {token["id"] for token in described.get("added_tokens", ()) if token["special"]}
        return _TokenizersFile(_vocabulary(described), special, templates, pair_start)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise TokenizerError(f"{path} is not in the format of the library `tokenizers`: {error!r}") from None


def _vocabulary(described: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of every token of a tokenizer.json, added tokens included; Unigram models have a list."""
    entries = described.get("model", {}).get("vocab", {})
    vocabulary = (
        {entry[0]: index for index, entry in enumerate(entries)} if isinstance(entries, list) else dict(entries)
    )
    return vocabulary | {token["content"]: token["id"] for token in described.get("added_tokens", ())}


def _own_pieces(path: Path, id_offset: int) -> tuple[dict[str, int], set[str]]:
    """Return the pieces of a SentencePiece model with id + id_offset, and the pieces without text."""
    processor = read_pieces(path)
    names = [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
    hidden = {name for index, name in enumerate(names) if processor.is_control(index) or processor.is_unknown(index)}
    return {name: index + id_offset for index, name in enumerate(names)}, hidden


def _assign_free_ids(listed: Sequence[str], pieces: Mapping[str, int], added: dict[str, int]) -> None:
    """Add listed tokens without an id to `added`, with the next ids after the largest one, in their order."""
    last = max([*pieces.values(), *added.values()], default=-1)
    for token in listed:
        if token not in pieces and token not in added:
            last += 1
            added[token] = last


def _settings(folder: Path) -> _Settings:
    """Read tokenizer_config.json, special_tokens_map.json and added_tokens.json, if they exist."""
    described = _read(folder / "tokenizer_config.json")
    described = {**_read(folder / "special_tokens_map.json"), **described}
    added = {token: index for token, index in _read(folder / "added_tokens.json").items() if isinstance(index, int)}
    special = {token for name, value in described.items() if name.endswith("_token") and (token := _content(value))}
    for index, token in (described.get("added_tokens_decoder") or {}).items():
        added[token["content"]] = int(index)
        if token.get("special"):
            special.add(token["content"])
    settings = _Settings(described, added, special)
    special.update(settings.listed)
    return settings


def _templates(processor: Mapping[str, Any] | None, settings: _Settings) -> tuple[_Templates, int | None]:
    """Return the templates of texts and pairs, and the index in the pair template where token type 1 begins."""
    for step in _steps(processor):
        if step["type"] == "TemplateProcessing":
            return _template_processing(step)
        if step["type"] in ("BertProcessing", "RobertaProcessing"):
            cls, sep = step["cls"][1], step["sep"][1]
            if step["type"] == "BertProcessing":
                return ((cls, "$text", sep), (cls, "$text", sep, "$pair", sep)), 3
            return ((cls, "$text", sep), (cls, "$text", sep, sep, "$pair", sep)), None
    before = [token for token in (settings.token("bos_token"),) if settings.described.get("add_bos_token") and token]
    after = [token for token in (settings.token("eos_token"),) if settings.described.get("add_eos_token") and token]
    return ((*before, "$text", *after), (*before, "$text", *after, *before, "$pair", *after)), None


def _steps(processor: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if processor is not None:
        if processor["type"] == "Sequence":
            for step in processor["processors"]:
                yield from _steps(step)
        else:
            yield processor


def _template_processing(step: Mapping[str, Any]) -> tuple[_Templates, int | None]:
    """Return the templates of a TemplateProcessing. Raises TokenizerError unless token types are 0s, then 1s."""
    single = [name for name, _ in _elements(step["single"], step["special_tokens"])]
    pair = list(_elements(step["pair"], step["special_tokens"]))
    types = [token_type for _, token_type in pair]
    if types != sorted(types) or not {*types} <= {0, 1}:
        raise TokenizerError(f"tokenizer.json: token types of pairs are {types}; only zeros, then ones are supported")
    return (tuple(single), tuple(name for name, _ in pair)), types.index(1) if 1 in types else None


def _elements(elements: Sequence[Mapping[str, Any]], special: Mapping[str, Any]) -> Iterator[tuple[str | int, int]]:
    """Yield slot or id, and token type, of each element of a TemplateProcessing."""
    for element in elements:
        if "Sequence" in element:
            yield ("$text" if element["Sequence"]["id"] == "A" else "$pair"), element["Sequence"]["type_id"]
        else:
            for index in special[element["SpecialToken"]["id"]]["ids"]:
                yield index, element["SpecialToken"]["type_id"]


def _content(value: object) -> str | None:
    """Return a token's text, which files store as a string or as `content` of an object; None for other values."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; empty if the file does not exist. Raises TokenizerError naming the file."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):  # the second: the checkpoint is a file
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} cannot be read: it contains a {type(content).__name__}, expected an object")
    return content
