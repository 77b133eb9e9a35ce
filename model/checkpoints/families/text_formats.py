"""From the text files of a checkpoint to the TextFormat that describes them: what all families have in common.

Templates, special tokens, added tokens and languages are read from the files where they say them; a family names only
what they leave open. Ids are those of the files; whether the model's vocabulary holds them is the importer's to check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from antiphon.model.text.format import NoTokenizersFile, Slot, Template, TextFormat, TokenizerError
from antiphon.model.text.open_text import read_pieces

# How public checkpoints spell the tokens of languages. A group is the code as users say it.
_LANGUAGE_TOKEN = re.compile(
    r">>(?P<marian>[^<>\s]+)<<|__(?P<m2m>[a-z]{2,3})__|(?P<mbart>[a-z]{2,3}_[A-Z]{2})|(?P<nllb>[a-z]{3}_[A-Z][a-z]{3})"
)
_SLOTS: tuple[Slot, ...] = ("$text", "$pair", "$source_language", "$target_language")
Named = Sequence[str]
_Templates = tuple[tuple[str | int, ...], tuple[str | int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Languages:
    """What the files do not say of a multilingual model.

    place: where a target's language stands, as TextFormat says.
    source, target: codes taken where a request names none; None: what tokenizer_config.json says.
    """

    place: Literal["first", "begin"] | None = None
    source: str | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a checkpoint's small JSON files say of its tokens."""

    described: Mapping[str, Any]
    added: dict[str, int] = field(default_factory=dict)
    special: set[str] = field(default_factory=set)

    @property
    def listed(self) -> tuple[str, ...]:
        """Special tokens that play no part with a name."""
        listed = self.described.get("additional_special_tokens") or self.described.get("extra_special_tokens")
        return tuple(filter(None, map(_content, listed))) if isinstance(listed, list) else ()

    def token(self, name: str) -> str | None:
        """The token that plays a part, such as mask_token."""
        return _content(self.described.get(name))


@dataclass(frozen=True, slots=True)
class _TokenizersFile:
    """What a tokenizer.json says: every token's id, special ids, and templates, single and of pairs."""

    ids: dict[str, int]
    special: set[int]
    templates: _Templates
    pair_start: int | None


def tokenizers_format(
    folder: Path,
    *,
    languages: Languages | None = None,
    template: Named | None = None,
    pair_template: Named | None = None,
) -> TextFormat:
    """The format of a checkpoint with a tokenizer.json; its post-processor gives the templates.

    template, pair_template: instead of the file's, tokens by name and slots, such as ("$text", "</s>").
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
    template: Named,
    pair_template: Named | None = None,
    target_model: str | None = None,
    vocabulary: str | None = None,
    target_vocabulary: str | None = None,
    id_offset: int = 0,
    added_tokens: Mapping[str, int] | None = None,
    special_tokens: Sequence[str] = (),
    languages: Languages | None = None,
) -> TextFormat:
    """The format of a checkpoint with a SentencePiece model, and maybe a vocabulary beside it.

    template, pair_template: tokens by name and slots, such as ("$source_language", "$text", "</s>").
    added_tokens: with id_offset, the ids that are not the model's own and shifted: {"<s>": 0, "<pad>": 1, ...}.
    special_tokens: those that follow all others in this order, as far as no file says so (M2M-100's languages).
    Raises TokenizerError naming the file.
    """
    settings = _settings(folder)
    pieces, control = _own_pieces(folder / model, id_offset)
    if vocabulary is not None:
        pieces = _read(folder / vocabulary)
    given = added_tokens or {}
    added = {token: index for token, index in settings.added.items() if token not in pieces} | dict(given)
    _number_the_rest((*settings.listed, *special_tokens), pieces, added)
    ids = {**pieces, **added}
    special = {*settings.special, *special_tokens, *given, *control}
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
    """The format of ByT5: bytes after three special tokens, sentinels after the bytes. It has no files."""
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
    """Fill in what is alike for every kind: templates by id, languages and the mask token."""
    special = set(fields["special_ids"])
    codes = {} if languages is None else _languages(ids, special)
    given = languages or Languages()
    mask = settings.token("mask_token")
    source = (given.source or settings.token("src_lang")) if codes else None
    target = (given.target or settings.token("tgt_lang")) if codes else None
    for name, code in (("src_lang", source), ("tgt_lang", target)):
        if code is not None and code not in codes:
            raise TokenizerError(f"{path}: {name} is {code!r}, which is none of the {len(codes)} languages' tokens")
    for name in ("template", "pair_template"):
        if fields[name] is not None:
            fields[name] = _by_id(path, fields[name], ids, codes)
    return TextFormat(
        **fields,
        languages=codes,
        default_source_language=source,
        default_target_language=target,
        target_language_place=given.place if codes else None,
        mask_id=ids.get(mask) if mask else None,
    )


def _languages(ids: Mapping[str, int], special: set[int]) -> dict[str, int]:
    """Id of each language by the code that users say."""
    found = ((_LANGUAGE_TOKEN.fullmatch(token), index) for token, index in ids.items())
    named = [(match, index) for match, index in found if match is not None]
    codes = {
        match[match.lastgroup or 0]: index
        for match, index in named
        if index in special or match.lastgroup == "marian"  # ordinary pieces may look like codes, but for Marian's
    }
    return dict(sorted(codes.items()))


def _by_id(path: Path, template: Sequence[str | int], ids: Mapping[str, int], codes: Mapping[str, int]) -> Template:
    """A template with ids in place of names; the token of a language stands for whichever is asked for."""
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
        raise NoTokenizersFile(f"{path.parent} has no tokenizer.json, which its tokenizer needs")
    try:
        templates, pair_start = _templates(described.get("post_processor"), _settings(path.parent))
        special = {token["id"] for token in described.get("added_tokens", ()) if token["special"]}
        return _TokenizersFile(_vocabulary(described), special, templates, pair_start)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise TokenizerError(f"{path} is not what `tokenizers` writes: {error!r}") from None


def _vocabulary(described: Mapping[str, Any]) -> dict[str, int]:
    """Every token of a tokenizer.json: of the model's vocabulary, which Unigram lists, and the added ones."""
    held = described.get("model", {}).get("vocab", {})
    vocabulary = {entry[0]: index for index, entry in enumerate(held)} if isinstance(held, list) else dict(held)
    return vocabulary | {token["content"]: token["id"] for token in described.get("added_tokens", ())}


def _own_pieces(path: Path, id_offset: int) -> tuple[dict[str, int], set[str]]:
    """Pieces of a SentencePiece model with their shifted ids, and those among them that stand for no text."""
    processor = read_pieces(path)
    names = [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
    hidden = {name for index, name in enumerate(names) if processor.is_control(index) or processor.is_unknown(index)}
    return {name: index + id_offset for index, name in enumerate(names)}, hidden


def _number_the_rest(listed: Sequence[str], pieces: Mapping[str, int], added: dict[str, int]) -> None:
    """Special tokens that no file numbers come after all others, in the order in which they are listed."""
    last = max([*pieces.values(), *added.values()], default=-1)
    for token in listed:
        if token not in pieces and token not in added:
            last += 1
            added[token] = last


def _settings(folder: Path) -> _Settings:
    """Read tokenizer_config.json, special_tokens_map.json and added_tokens.json, as far as there are any."""
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
    """Single and pair template, and where in the second one token type 1 begins."""
    for step in _steps(processor):
        if step["type"] == "TemplateProcessing":
            return _processed(step)
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


def _processed(step: Mapping[str, Any]) -> tuple[_Templates, int | None]:
    """The templates of a TemplateProcessing. Raises TokenizerError where token types do not just go from 0 to 1."""
    single = [name for name, _ in _elements(step["single"], step["special_tokens"])]
    pair = list(_elements(step["pair"], step["special_tokens"]))
    types = [token_type for _, token_type in pair]
    if types != sorted(types) or not {*types} <= {0, 1}:
        raise TokenizerError(f"tokenizer.json: token types of pairs are {types}; only 0, then 1 are supported")
    return (tuple(single), tuple(name for name, _ in pair)), types.index(1) if 1 in types else None


def _elements(elements: Sequence[Mapping[str, Any]], special: Mapping[str, Any]) -> Iterator[tuple[str | int, int]]:
    """Slot or id, and token type, of each element of a TemplateProcessing."""
    for element in elements:
        if "Sequence" in element:
            yield ("$text" if element["Sequence"]["id"] == "A" else "$pair"), element["Sequence"]["type_id"]
        else:
            for index in special[element["SpecialToken"]["id"]]["ids"]:
                yield index, element["SpecialToken"]["type_id"]


def _content(value: object) -> str | None:
    """A token's spelling: files hold it bare, or as `content` among its flags."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise TokenizerError(f"{path} cannot be read: it holds {type(found).__name__}, expected an object")
    return found
