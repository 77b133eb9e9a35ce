"""Debian packages by version and hash, and the list of those with English prose; it reads no package."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PACKAGE_LIST = Path(__file__).parent / "debian_docs.toml"

ReaderName = Literal["html", "xml", "pod", "backticks", "json", "r_strings", "dict"]


class CorpusError(Exception):
    """A corpus cannot be made; the message names the package or file."""


class DebianPackage(BaseModel):
    """One Debian package and the files of it that are read.

    version, sha256: those of the .deb file.
    files: patterns of the paths in the package, without "./"; "*" also matches "/".
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

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


class _PackageList(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    package: tuple[Package, ...] = Field(min_length=1)


def load_packages(path: Path = PACKAGE_LIST) -> tuple[Package, ...]:
    """Read a list of packages. Raises CorpusError naming the file and field."""
    try:
        return _PackageList.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).package
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise CorpusError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
