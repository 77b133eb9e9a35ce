"""Scores of the precisions of a bundle on a file, recorded in its manifest with the score of the float32 model.

Knows manifests and numbers; evaluate.py computes the numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from antiphon.bundle.manifest import Bundle, Measure, Precision, Quality, write_manifest


def file_name(paths: Sequence[Path]) -> str:
    """Return the names of the scored files, in order. For translations: sources, then references."""
    *others, last = (path.name for path in paths)
    return f"{', '.join(others)} and {last}" if others else last


def digest(paths: Sequence[Path]) -> str:
    """Return the SHA-256 (hex) of the concatenated bytes of the files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()


def record(
    bundle: Bundle, measure: Measure, scores: Mapping[Precision, float], float32: float, paths: Sequence[Path]
) -> None:
    """Write the score of each precision, atomically. It replaces earlier scores of the same measure and files.

    float32: score of the model whose weights these precisions round. Other entries and all hashes stay unchanged.
    """
    name, sha256 = file_name(paths), digest(paths)
    added = tuple(
        Quality(precision=precision, measure=measure, value=value, float32=float32, file=name, sha256=sha256)
        for precision, value in scores.items()
    )
    kept = tuple(
        entry
        for entry in bundle.manifest.quality
        if entry.measure != measure or entry.sha256 != sha256 or entry.precision not in scores
    )
    write_manifest(bundle.path, bundle.manifest.model_copy(update={"quality": (*kept, *added)}))
