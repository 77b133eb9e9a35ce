"""Forged or edited manifests, with a checksum that fits the new content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from antiphon.bundle.checksum import with_checksum
from antiphon.bundle.manifest import MANIFEST_NAME


def edit_manifest(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a bundle, and write it with the matching checksum."""
    manifest = json.loads((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    manifest.pop("checksum", None)
    change(manifest)
    (bundle / MANIFEST_NAME).write_bytes(with_checksum(manifest))
