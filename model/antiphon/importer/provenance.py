"""Provenance of an imported bundle: names of the checkpoint and of its adapter, and the licences that they state."""

from __future__ import annotations

import re
from pathlib import Path

from antiphon.bundle.manifest import Provenance
from antiphon.checkpoints.adapters.adapter import Adapter


def provenance_of(source: str, revision: str | None, folder: Path, adapter: Adapter | None) -> Provenance:
    """Return the provenance of a checkpoint in `folder`, whose name or directory is `source`.

    The licences are those that the README.md of the checkpoint and that of the adapter state.
    """
    name = Path(source).resolve().name if Path(source).is_dir() else source
    described = f"{name} at revision {revision}" if revision else name
    licence = _stated_licence(folder) or "unknown"
    meaning = "weights unchanged in meaning"
    if adapter is not None:
        described += f", with the adapter {adapter.described}"
        of_adapter = _stated_licence(adapter.folder)
        licence += f"; adapter: {of_adapter}" if of_adapter not in (None, licence) else ""
        meaning = "with an adapter merged into the weights"
    return Provenance(
        source=described,
        licence=licence,
        attribution=f"{name}, by its authors; imported by Antiphon, {meaning}",
    )


def _stated_licence(folder: Path) -> str | None:
    """Return `license:` of the front matter of a README.md; None without one."""
    try:
        readme = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    front = re.match(r"---\n(.*?)\n---", readme, re.DOTALL)
    match = re.search(r"^license:[ \t]*([^\s#]+)", front.group(1), re.MULTILINE) if front else None
    return match.group(1).strip("'\"") if match else None
