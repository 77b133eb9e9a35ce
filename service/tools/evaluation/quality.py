"""What each precision of a bundle scores on a file, written into its manifest beside the float32 model's score.

Knows manifests and numbers; evaluate.py makes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from antiphon.model.bundle.manifest import Bundle, Measure, Precision, Quality, write_manifest


def file_name(paths: Sequence[Path]) -> str:
    """The names of the files that a score is of, in their order: of translations sources, then references."""
    *others, last = (path.name for path in paths)
    return f"{', '.join(others)} and {last}" if others else last


def digest(paths: Sequence[Path]) -> str:
    """SHA-256 (hex) of the files' bytes, one behind the other."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()


def record(
    bundle: Bundle, measure: Measure, scores: Mapping[Precision, float], float32: float, paths: Sequence[Path]
) -> None:
    """Write what each precision scores, in place of what was recorded of the same measure and files; atomically.

    float32: of the model whose weights these precisions round. Other entries and every file's hash stay.
    """
    name, sha256 = file_name(paths), digest(paths)
    added = tuple(
        Quality(precision=precision, measure=measure, value=value, float32=float32, file=name, sha256=sha256)
        for precision, value in scores.items()
    )
    kept = tuple(
        held
        for held in bundle.manifest.quality
        if held.measure != measure or held.sha256 != sha256 or held.precision not in scores
    )
    write_manifest(bundle.path, bundle.manifest.model_copy(update={"quality": (*kept, *added)}))
