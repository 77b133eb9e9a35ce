"""Contents of an image, which must not include compilers, Python package managers, torch or caches."""

import collections
import re
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.image_check.podman import CheckError, Podman

# Matched with the path of a file from the root.
FORBIDDEN = re.compile(
    r"""(^|/)( bin/(\S+-linux-gnu-)?(gcc|g\+\+|cc|c\+\+|c89|c99|clang|ld|as|make)(-\d+)? | cc1(plus)? | collect2
             | pip\d?(\.\d+)? | torch | setuptools | \.cache | apt/lists/.+ | .+\.pyi | .+\.deb )$""",
    re.VERBOSE,
)
_MB = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """Contents of an image. files: bytes by path. writable_by_others: files and directories. uncompiled: modules."""

    files: dict[str, int]
    directories: frozenset[str]
    writable: tuple[str, ...]

    @property
    def forbidden(self) -> list[str]:
        return sorted(path for path in (*self.files, *self.directories) if FORBIDDEN.search(path))

    @property
    def uncompiled(self) -> list[str]:
        """Return the modules of the server's environment without bytecode, which every start would compile again."""
        return [
            path
            for path in self.files
            if path.startswith("opt/antiphon/lib") and path.endswith(".py") and _bytecode(path) not in self.files
        ]

    def largest(self, number: int = 14) -> list[tuple[str, int]]:
        sizes: collections.Counter[str] = collections.Counter()
        for path, size in self.files.items():
            sizes[_part(path)] += size
        return sizes.most_common(number)


def contents_of(podman: Podman, image: str) -> Contents:
    files, directories, writable = {}, set(), []
    with podman.files(image) as exporting, tarfile.open(fileobj=exporting.stdout, mode="r|") as archive:
        for entry in archive:
            if entry.isdir():
                directories.add(entry.name)
            else:
                files[entry.name] = entry.size
            # The sticky bit of /tmp has no effect on a root that is mounted read-only.
            if not entry.issym() and entry.mode & 0o002 and not entry.mode & 0o1000 and not entry.ischr():
                writable.append(entry.name)
            if entry.mode & 0o6000 and entry.isfile():
                writable.append(f"{entry.name} (setuid or setgid)")
    return Contents(files=files, directories=frozenset(directories), writable=tuple(writable))


def compressed_bytes(podman: Podman, image: str) -> int:
    """Return the compressed size of the layers, which a registry stores and a node downloads."""
    with tempfile.TemporaryDirectory() as folder:
        podman.run("push", "--quiet", "--compress", image, f"dir:{folder}")
        return sum(path.stat().st_size for path in Path(folder).iterdir())


def forbid(contents: Contents) -> None:
    """Raise CheckError for forbidden or missing files."""
    if contents.forbidden:
        raise CheckError(f"the image holds {', '.join(contents.forbidden[:10])}")
    if contents.uncompiled:
        raise CheckError(f"{len(contents.uncompiled)} modules have no bytecode, {contents.uncompiled[0]} for one")
    if not any("/antiphon_engine__mypyc." in path for path in contents.files):
        raise CheckError("the engine is not compiled")


def megabytes(size: float) -> str:
    return f"{size / _MB:,.1f} MB"


def _bytecode(path: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"{folder}/__pycache__/{name.removesuffix('.py')}.cpython-311.pyc"


def _part(path: str) -> str:
    """Return the part of a path: a Python package by its name, other files by their top folder."""
    found = re.match(r"opt/antiphon/lib/python[\d.]+/site-packages/([^/]+?)(\.libs)?(/|$)", path)
    if found:
        return f"Python: {found[1]}"
    if path.startswith("usr/lib/python3"):
        return "Debian: Python's library"
    if path in ("usr/bin/python3.11", "usr/bin/tini"):
        return f"Debian: {path}"
    return "Debian: " + "/".join(path.split("/")[:2])
