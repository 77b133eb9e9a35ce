"""Collections of made-up sentence pairs as files of a recipe."""

from __future__ import annotations

import hashlib
from pathlib import Path

from antiphon.training.corpus import Pair
from antiphon.training.recipe import DataConfig


def pairs_of(language: str, count: int) -> list[Pair]:
    return [(f"{language} source {index}", f"{language} target {index}") for index in range(count)]


def collections(folder: Path, parts: dict[str, list[Pair]]) -> DataConfig:
    described = []
    for name, pairs in parts.items():
        content = "".join(f"{source}\t{target}\n" for source, target in pairs).encode()
        (folder / f"{name}.tsv").write_bytes(content)
        described.append(
            {"name": name, "path": f"{name}.tsv", "sha256": hashlib.sha256(content).hexdigest()}
            | {"origin": f"origin of {name}", "licence": f"licence of {name}", "attribution": f"authors of {name}"}
        )
    return DataConfig.model_validate({"collections": described, "source_language": "en", "target_language": "de"})
