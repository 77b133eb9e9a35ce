"""Functions that read inputs of clients, each with the invariants for every input; for fuzz.py and its tests.

A target takes bytes. It returns None, or raises an exception, which is a finding.
"""

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from antiphon.bundle.checksum import with_checksum
from antiphon.bundle.manifest import MANIFEST_NAME, load_bundle
from antiphon.domain.errors import InvalidArgument
from antiphon.domain.sampling_params import check_combination
from antiphon.engine.stop_strings import StopFilter, TokenStopMatcher
from antiphon.errors import BundleError
from antiphon.rpc.parsing import parser
from antiphon.rpc.v1.options import read_options
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.text.format import LanguageIds, Template, TextFormat, fill
from antiphon.text.tokenizer import Tokenizer
from antiphon.v1 import inference_pb2 as pb
from tests.reliability.answers import check_field

METHODS = pb.DESCRIPTOR.services_by_name["InferenceService"].methods
VOCABULARY = 10_000


@cache
def shipped_tokenizer() -> Tokenizer:
    return Tokenizer.load(SHIPPED_BUNDLE / "tokenizer.json")


def messages(data: bytes) -> None:
    """Read bytes as each request in turn: they are parsed like by protobuf, or refused with a field of the message."""
    if not data:
        return
    kind = METHODS[data[0] % len(METHODS)].input_type
    payload = data[1:]
    found = parser(GetMessageClass(kind))(payload)
    try:
        expected = GetMessageClass(kind).FromString(payload)
    except DecodeError:
        assert not isinstance(found, Message)
        check_field(found.error.field, kind)
    else:
        assert found == expected or str(found) == str(expected)  # NaN differs from itself


def options(data: bytes) -> None:
    """Read bytes as GenerateOptions: they become domain values, or are refused with the option's name."""
    try:
        message = pb.GenerateOptions.FromString(data)
    except DecodeError:
        return
    try:
        check_combination(read_options(message, VOCABULARY))
    except InvalidArgument as error:
        check_field(error.field, pb.GenerateRequest.DESCRIPTOR)


def texts(data: bytes) -> None:
    """Encode any text: the decoded text is the normalised text, and offsets are in order and within the text."""
    check_text(shipped_tokenizer(), data.decode("utf-8", "replace"))


def check_text(tokenizer: Tokenizer, text: str) -> None:
    """Check the invariants of byte-level BPE for a text."""
    ids = tokenizer.encode(text)
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
    assert tokenizer.min_tokens(text) <= len(ids)
    assert tokenizer.encode_batch([text]) == [ids]
    assert tokenizer.decode(ids) == tokenizer.normalize(text)
    found = tokenizer.encode_source(text)
    assert list(found.ids) == ids
    assert all(0 <= start <= end <= len(text) for start, end in found.offsets)
    starts = [start for start, _ in found.offsets]
    assert starts == sorted(starts)
    check_pieces(tokenizer, ids)


def check_pieces(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Check that decoding token by token gives the same text as decoding all tokens."""
    stream = tokenizer.stream()
    assert "".join(stream.push((token_id,)) for token_id in ids) + stream.finish() == tokenizer.decode(ids)


def ids(data: bytes) -> None:
    """Decode any token ids, as a model can generate them: they give a text, the same token by token."""
    tokenizer = shipped_tokenizer()
    check_pieces(tokenizer, [int.from_bytes(data[at : at + 2], "little") % VOCABULARY for at in range(0, len(data), 2)])


def stops(data: bytes) -> None:
    """Apply any stop strings to any text: the text ends before the first complete one, and filter and matcher agree."""
    head, _, tail = data.partition(b"\xff")
    tokenizer = shipped_tokenizer()
    strings = [stop for stop in head.decode("utf-8", "replace").split("\n") if stop][:4]
    token_ids = [int.from_bytes(tail[at : at + 2], "little") % VOCABULARY for at in range(0, len(tail), 2)]
    text = tokenizer.decode(token_ids)
    filtered = StopFilter(strings, tokenizer.stream())
    heard = "".join(filtered.push((token_id,)) for token_id in token_ids) + filtered.finish()
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in strings if stop in text]
    expected = text[: sum(min(ends))] if ends else text
    assert heard == expected, (heard, expected)
    if strings:
        matcher = TokenStopMatcher(strings, tokenizer.stream())
        is_stopped = [matcher.push(token_id) for token_id in token_ids]
        assert ends or True not in is_stopped, "stopped without a stop string"


def manifests(data: bytes) -> None:
    """Read bytes as manifest.json of a bundle: they are refused, because the bundle has no other file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / MANIFEST_NAME).write_bytes(_with_its_checksum(data))
        try:
            load_bundle(path)
        except BundleError as error:
            complaint = str(error)
        else:
            complaint = "none"
        assert complaint.startswith(str(path)), complaint


def templates(data: bytes) -> None:
    """Apply a template to any tokens: its tokens are there once, even if the input already contains some of them."""
    tokenizer = shipped_tokenizer()
    text = TextFormat(special_ids=(0, 1, 2, 3), template=_template(data[:1]), source="tokenizer.json")
    given = [byte % 8 for byte in data[1:65]]
    for are_ids in (False, True):
        filled, types = fill(text, given, None, LanguageIds(), is_partly_filled=are_ids)
        assert set(filled) <= {*given, *range(4)}
        assert len(types) in (0, len(filled))
        assert len(given) <= len(filled) <= len(given) + len(text.template)
        if are_ids:
            again, _ = fill(text, filled, None, LanguageIds(), is_partly_filled=True)
            assert list(again) == list(filled), (given, filled, again)
    assert tokenizer.vocab_size == VOCABULARY


def _template(choice: bytes) -> Template:
    templates: list[Template] = [("$text", 2), (1, "$text", 2), ("$text",), (1, "$text"), (1, 3, "$text", 2)]
    return templates[choice[0] % len(templates) if choice else 0]


def _seed_manifest() -> bytes:
    manifest = json.loads((SHIPPED_BUNDLE / MANIFEST_NAME).read_bytes())
    del manifest["checksum"]
    return json.dumps(manifest).encode()


def _with_its_checksum(data: bytes) -> bytes:
    """Return a JSON object with its checksum, so that changes in it are read; other bytes as they are."""
    try:
        manifest = json.loads(data)
        return with_checksum(manifest) if isinstance(manifest, dict) else data
    except (ValueError, RecursionError):
        return data


TARGETS: dict[str, Callable[[bytes], None]] = {
    "messages": messages,
    "options": options,
    "texts": texts,
    "ids": ids,
    "stops": stops,
    "manifests": manifests,
    "templates": templates,
}
# Initial inputs, in addition to the empty one.
SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "messages": lambda: [
        b"\x00" + pb.GenerateRequest(text="a", options=pb.GenerateOptions(top_k=3)).SerializeToString()
    ],
    "options": lambda: [pb.GenerateOptions(beam_width=2, stop_strings=["a"], logit_bias={3: 1.0}).SerializeToString()],
    "texts": lambda: ["Wie geht’s? 日本語 🜁 e\u0301".encode()],
    "ids": lambda: [bytes(range(64))],
    "stops": lambda: [b"e\nnicht\xff" + bytes(range(64))],
    "manifests": lambda: [_seed_manifest()],
    "templates": lambda: [b"\x01\x04\x05\x02"],
}
