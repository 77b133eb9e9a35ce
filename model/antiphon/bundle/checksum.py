"""Checksum inside manifest.json of the file itself: SHA-256 of its bytes, with the checksum's own digits set to zero.

It covers bytes, not values. Every changed bit is detected, also in white space and in the last digit of a number. A
check of values would accept some damaged files, and a file with one damaged place can have others. This module does
not know the fields of a manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

_BLANK = "0" * 64
# No string inside the JSON can match: its quotation marks are escaped.
_FIELD = re.compile(rb'("checksum": ")([0-9a-f]{64})(")')


class ChecksumError(ValueError):
    """The bytes do not match their checksum."""


def with_checksum(manifest: Mapping[str, object]) -> bytes:
    """Return the bytes of manifest.json, with the checksum as the first field."""
    text = json.dumps({"checksum": _BLANK, **manifest}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    content = text.encode("utf-8")
    return _with_digits(content, _digest(content))


def verify_checksum(content: bytes) -> bool:
    """Compare a manifest's bytes with their checksum; return False if they have no checksum. Raises ChecksumError."""
    match = _FIELD.search(content)
    if match is None:
        return False
    expected, actual = match[2].decode("ascii"), _digest(_with_digits(content, _BLANK))
    if expected != actual:
        raise ChecksumError(f"its sha256 is {actual[:12]}..., its checksum says {expected[:12]}...")
    return True


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _with_digits(content: bytes, digits: str) -> bytes:
    return _FIELD.sub(rb"\g<1>" + digits.encode("ascii") + rb"\g<3>", content, count=1)
