"""Debian packages: lists of those that corpora are made of, and their files.

A package is pinned by version and SHA-256, fetched by apt-get from the machine's own archive, verified, and unpacked in
memory.
"""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from antiphon.errors import CorpusError
from antiphon.training.recipe import Strict

PACKAGE_LIST = Path(__file__).parent / "debian_docs.toml"
PROGRAM_LIST = Path(__file__).parent / "debian_games.toml"

ReaderName = Literal["html", "xml", "pod", "backticks", "json", "r_strings", "dict"]


class DebianPackage(Strict):
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


class Program(Strict):
    """A program whose texts are translated: the packages that have its message catalogues.

    name: name of the program and of its file of sentence pairs. licence: that of texts and translations, from the
    packages' debian/copyright.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")
    licence: str
    package: tuple[DebianPackage, ...] = Field(min_length=1)


class _PackageList(Strict):
    package: tuple[Package, ...] = Field(min_length=1)


class _ProgramList(Strict):
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


def fetch(package: DebianPackage, folder: Path) -> Path:
    """Return the package's .deb in `folder`, downloaded if it is not there.

    Raises CorpusError if apt-get is missing or does not find this version, or if the file has another SHA-256.
    """
    path = _in(folder, package)
    if path is None:
        folder.mkdir(parents=True, exist_ok=True)
        _run(["apt-get", "download", "-q", f"{package.name}={package.version}"], package, cwd=folder)
        path = _in(folder, package)
    if path is None:
        raise CorpusError(f"{package.name} {package.version}: apt-get wrote no file to {folder}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise CorpusError(f"{path} has sha256 {digest[:12]}..., the list names {package.sha256[:12]}...")
    return path


def members(package: DebianPackage, path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path and contents of the package's files that match its patterns, sorted; gzip is decompressed.

    Raises CorpusError if the file is no Debian package, or if no file matches.
    """
    contents = {}
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    name = member.name.removeprefix("./")
                    stream = archive.extractfile(member) if member.isreg() and _matches(package, name) else None
                    if stream is not None:
                        contents[name] = stream.read()
        except tarfile.TarError as error:
            raise CorpusError(f"{path} is not a Debian package: {error}") from None
    if not contents:
        raise CorpusError(f"{path} has no file that matches {', '.join(package.files)}")
    for name in sorted(contents):
        yield name, gzip.decompress(contents[name]) if name.endswith(".gz") else contents[name]


def _matches(package: DebianPackage, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in package.files)


def _in(folder: Path, package: DebianPackage) -> Path | None:
    # apt-get writes the colon of an epoch as %3a.
    return next(iter(sorted(folder.glob(f"{package.name}_{package.version.replace(':', '%3a')}_*.deb"))), None)


def _run(command: list[str], package: DebianPackage, cwd: Path) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise CorpusError(f"{command[0]} is not installed; a machine with Debian is needed to fetch packages") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [""])[-1]
        raise CorpusError(
            f"{package.name} {package.version} was not downloaded: {last}; put its .deb into {cwd}"
        ) from None
