"""Bearer tokens: reads a token file and finds the owner of a presented token. Keeps and compares SHA-256 digests only.

    # name:sha256 of the token, in hex; a name may have several while its token is renewed
    alice:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0bb822cd15d6c15b0f00a0

A leaked file reveals no token, provided that tokens are random: docs/SECURITY.md explains how to create them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.rpc.security.reload import FileProblem, read_bytes

_MAX_FILE_BYTES = 1 << 20
_LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63}):(?P<digest>[0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class Token:
    """Name of a token's owner, and the SHA-256 of the token."""

    name: str
    digest: bytes


def read_tokens(setting: str, path: Path) -> tuple[Token, ...]:
    """Return the tokens of a file, which may be empty. Raises FileProblem with the line's number, not its content."""
    try:
        text = read_bytes(setting, path, _MAX_FILE_BYTES).decode("ascii")
    except UnicodeDecodeError:
        raise FileProblem(f"{setting} is {path}, which holds other characters than ASCII") from None
    tokens = []
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise FileProblem(f"{setting} is {path}, whose line {number} is not NAME:SHA256 with 64 hex digits")
        tokens.append(Token(match["name"], bytes.fromhex(match["digest"])))
    return tuple(tokens)


def owner_of(presented: str, tokens: Sequence[Token]) -> str | None:
    """Return the owner of a presented token; None if it is unknown. Takes the same time for every token."""
    digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
    owner = None
    for token in tokens:
        if hmac.compare_digest(token.digest, digest):
            owner = token.name
    return owner
