"""Debian packages by version and hash, and the lists of those that corpora are made of; it reads no package."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from antiphon.errors import CorpusError

PACKAGE_LIST = Path(__file__).parent / "debian_docs.toml"
PROGRAM_LIST = Path(__file__).parent / "debian_games.toml"

ReaderName = Literal["html", "xml", "pod", "backticks", "json", "r_strings", "dict"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DebianPackage(_Strict):
    """One Debian package and the files of it that are read.

    version, sha256: those of the .deb file.
    files: patterns of the paths in the package, without "./"; "*" also matches "/".
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")
    version: str = Field(pattern=r"^[0-9][A-Za-z0-9.+:~-]*$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    files: tuple[str, ...] = Field(min_length=1)


class Package(DebianPackage):
    """One Debian package with English prose.

    licence: licence of the prose, from the package's debian/copyright.
    reader: format of the files, see readers.py.
    """

    licence: str
    reader: ReaderName


class Program(_Strict):
    """A program whose texts are translated: the packages that have its message catalogues.

    name: name of the program and of its file of sentence pairs. licence: that of texts and translations, from the
    packages' debian/copyright.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")
    licence: str
    package: tuple[DebianPackage, ...] = Field(min_length=1)


class _PackageList(_Strict):
    package: tuple[Package, ...] = Field(min_length=1)


class _ProgramList(_Strict):
    program: tuple[Program, ...] = Field(min_length=1)


_List = TypeVar("_List", bound=BaseModel)


def load_packages(path: Path = PACKAGE_LIST) -> tuple[Package, ...]:
    """Read a list of packages with prose. Raises CorpusError naming the file and field."""
    return _load(path, _PackageList).package


def load_programs(path: Path = PROGRAM_LIST) -> tuple[Program, ...]:
    """Read a list of translated programs. Raises CorpusError naming the file and field."""
    return _load(path, _ProgramList).program


def _load(path: Path, kind: type[_List]) -> _List:
    try:
        return kind.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise CorpusError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
