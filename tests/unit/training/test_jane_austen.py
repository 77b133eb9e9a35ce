"""Novels of a package that is made here, in which R's objects are."""

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from antiphon.training.corpora.documents import NOVELS_PACKAGE, write_novels
from antiphon.training.corpora.packages import DebianPackage
from antiphon.training.recipe import LanguageModelRecipe, load_any_recipe
from tests.debian_packages import build_package, needs_dpkg

NOVELS = {
    "EMMA": ["EMMA", "", "", "CHAPTER I", "", "Emma Woodhouse, handsome,", "clever, and rich", " ", "Née—"],
    "Northanger Abbey": ["Northanger Abbey", "", "by", "Jane Austen"],
}
TEXTS = {
    "emma.txt": "EMMA\n\nCHAPTER I\n\nEmma Woodhouse, handsome, clever, and rich\n\nNée—\n",
    "northanger-abbey.txt": "Northanger Abbey\n\nby Jane Austen\n",
}


def r_strings(lines: Sequence[str]) -> bytes:
    """Serialise a character vector as R does: R Internals, section 1.8, version 3."""
    content = b"X\n" + struct.pack(">iiii", 3, 0x40201, 0x30500, 5) + b"UTF-8" + struct.pack(">ii", 16, len(lines))
    for line in lines:
        content += struct.pack(">ii", 0x40009 if line.isascii() else 0x8009, len(line.encode())) + line.encode()
    return content


@needs_dpkg
def test_novels_are_written_with_a_paragraph_a_line(tmp_path: Path) -> None:
    vectors = [r_strings(lines) for lines in NOVELS.values()]
    database = b"".join(struct.pack(">i", len(vector)) + zlib.compress(vector) for vector in vectors)
    (name,) = NOVELS_PACKAGE.files
    package = DebianPackage.model_validate({**build_package(tmp_path, {name: database}), "files": [name]})
    written = write_novels(tmp_path, tmp_path / "data", package)
    assert {path.name: path.read_bytes().decode() for path in written} == TEXTS


def test_recipe_names_the_files_of_all_novels() -> None:
    recipe = load_any_recipe("austen-gpt")
    assert isinstance(recipe, LanguageModelRecipe)
    assert len({file.path for file in recipe.data.text}) == 6
    assert all(file.path.startswith("jane-austen/") for file in recipe.data.text)
