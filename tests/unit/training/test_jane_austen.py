"""Novels of a package that is made here: an ar archive with data.tar.xz, in which R's objects are."""

import hashlib
import io
import lzma
import struct
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from antiphon.model.training.corpora import jane_austen
from antiphon.model.training.recipe import LanguageModelRecipe, load_any_recipe

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


def write_package(path: Path) -> Path:
    vectors = [r_strings(lines) for lines in NOVELS.values()]
    held = b"".join(struct.pack(">i", len(vector)) + zlib.compress(vector) for vector in vectors)
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        member = tarfile.TarInfo("./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
        member.size = len(held)
        archive.addfile(member, io.BytesIO(held))
    content = b"!<arch>\n"
    for name, part in (
        ("debian-binary", b"2.0"),
        ("control.tar.xz", b"-"),
        ("data.tar.xz", lzma.compress(tar.getvalue())),
    ):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(part):<10}".encode() + b"\x60\n"
        content += header + part + b"\n" * (len(part) % 2)
    path.write_bytes(content)
    return path


def test_novels_are_written_with_a_paragraph_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = write_package(tmp_path / "package.deb")
    monkeypatch.setattr(jane_austen, "PACKAGE_SHA256", hashlib.sha256(package.read_bytes()).hexdigest())
    assert jane_austen.main([str(package), str(tmp_path / "data")]) == 0
    written = {path.name: path.read_bytes().decode() for path in (tmp_path / "data/jane-austen").iterdir()}
    assert written == TEXTS
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_another_version_of_the_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = write_package(tmp_path / "package.deb")
    assert jane_austen.main([str(package), str(tmp_path / "data")]) == 2
    assert f"{package} has sha256" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("arguments", [[], ["/nowhere/a.deb", "data"]])
def test_wrong_argument_ends_with_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert jane_austen.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ("usage" if not arguments else "/nowhere/a.deb") in line


def test_recipe_names_the_files_of_all_novels() -> None:
    recipe = load_any_recipe("austen-gpt")
    assert isinstance(recipe, LanguageModelRecipe)
    assert len({file.path for file in recipe.data.text}) == 6
    assert all(file.path.startswith(f"{jane_austen.FOLDER}/") for file in recipe.data.text)
