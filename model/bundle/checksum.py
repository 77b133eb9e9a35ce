"""Checksum that manifest.json carries of itself: SHA-256 of the file's bytes, the checksum's own digits at zero.

It covers bytes, not values: any changed bit is refused, in white space and in the last digit of a number too. A check
of values would accept some damaged files, and a file that is damaged at one place may be damaged at others. Knows
nothing of what a manifest holds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

_BLANK = "0" * 64
# No text inside the JSON can look like this: its quotation marks would be escaped.
_FIELD = re.compile(rb'("checksum": ")([0-9a-f]{64})(")')


class ChecksumError(ValueError):
    """The bytes are not those that the checksum was made of."""


def with_checksum(manifest: Mapping[str, object]) -> bytes:
    """Return a manifest as the bytes of its file, the checksum first."""
    text = json.dumps({"checksum": _BLANK, **manifest}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    content = text.encode("utf-8")
    return _with_digits(content, _digest(content))


def verify_checksum(content: bytes) -> bool:
    """Compare a manifest's bytes with their checksum; False where they hold none. Raises ChecksumError."""
    found = _FIELD.search(content)
    if found is None:
        return False
    said, actual = found[2].decode("ascii"), _digest(_with_digits(content, _BLANK))
    if said != actual:
        raise ChecksumError(f"its sha256 is {actual[:12]}..., its checksum says {said[:12]}...")
    return True


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _with_digits(content: bytes, digits: str) -> bytes:
    return _FIELD.sub(rb"\g<1>" + digits.encode("ascii") + rb"\g<3>", content, count=1)
