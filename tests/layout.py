"""Prints the layout of the source code, for people: `make layout`. It sets no limits.

Generated stubs are left out. Lines are counted as `wc -l` does. An importer is another module of the source code, of
any package; tests are not counted.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("protos", "service", "model")
SMALL_LINES = 60
NUM_SHOWN = 12
# They name nothing. A noun says more.
PRONOUNS = ("one", "each", "found", "given", "held", "others", "further")


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One module. path: from the root of the checkout, such as service/antiphon/engine/stream.py."""

    path: Path
    num_lines: int
    pronouns: Counter[str]

    @property
    def name(self) -> str:
        """Dotted name, such as antiphon.engine.stream; that of the package for its `__init__.py`."""
        parts = self.path.with_suffix("").parts[1:]
        return ".".join(parts[:-1] if self.is_init else parts)

    @property
    def is_init(self) -> bool:
        """Return whether this is the `__init__.py` of a package."""
        return self.path.name == "__init__.py"

    @property
    def package(self) -> str:
        """Folder of the package below `antiphon`, such as service/antiphon/engine."""
        return "/".join(self.path.parts[:3]) if len(self.path.parts) > 3 else "/".join(self.path.parts[:2])


def read_modules(root: Path) -> list[Module]:
    """Read all modules of a checkout, in order of their paths."""
    paths = sorted(path for source in SOURCES for path in (root / source).rglob("*.py"))
    return [_read(path, root) for path in paths if "_pb2" not in path.name]


def _read(path: Path, root: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    return Module(path=path.relative_to(root), num_lines=text.count("\n"), pronouns=_pronouns(text))


def _pronouns(text: str) -> Counter[str]:
    """Count the pronouns among names of variables, arguments, attributes, functions and classes."""
    names: Counter[str] = Counter()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                names[name] += 1
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names[name] += 1
    return Counter({name: names[name] for name in PRONOUNS if names[name]})


def read_importers(packages: Sequence[str]) -> dict[str, set[str]]:
    """Return the importers of every module of these packages, by name. Imports for types count too."""
    graph = grimp.build_graph(*packages, cache_dir=None)
    return {name: graph.find_modules_that_directly_import(name) for name in graph.modules}


def describe(modules: Sequence[Module], importers: Mapping[str, set[str]]) -> str:
    """Return the layout as text."""
    files = sorted((module for module in modules if not module.is_init), key=lambda module: module.num_lines)
    single = [module for module in files if len(importers.get(module.name, ())) == 1]
    pronouns = sum((module.pronouns for module in modules), Counter[str]())
    return "\n\n".join(
        [
            _packages(modules),
            "pronouns among names: " + ", ".join(f"{name} {pronouns[name]}" for name in PRONOUNS),
            _section("largest modules", map(_sized, files[: -NUM_SHOWN - 1 : -1])),
            _section("smallest modules, without __init__.py", map(_sized, files[:NUM_SHOWN])),
            _section("folders of one or two modules", _small_folders(files)),
            _section(
                f"modules with exactly one importer: {len(single)}",
                (f"{_sized(module)}  <- {min(importers[module.name])}" for module in single),
            ),
        ]
    )


def _packages(modules: Sequence[Module]) -> str:
    """Return a table with a line for each package, for each source root, and for all of them."""
    rows: defaultdict[str, list[Module]] = defaultdict(list)
    for module in modules:
        for row in (module.package, module.path.parts[0], "all"):
            rows[row].append(module)
    lines = [f"{'package':<34} {'files':>6} {'__init__':>9} {'lines':>7} {f'under {SMALL_LINES}':>9} {'pronouns':>9}"]
    for row, members in sorted(rows.items(), key=lambda item: (item[0] == "all", item[0])):
        files = [module for module in members if not module.is_init]
        num_lines = sum(module.num_lines for module in members)
        small = sum(module.num_lines < SMALL_LINES for module in files) / max(1, len(files))
        pronouns = sum(module.pronouns.total() for module in members)
        num_init = len(members) - len(files)
        lines.append(f"{row:<34} {len(members):>6} {num_init:>9} {num_lines:>7} {small:>9.1%} {pronouns:>9}")
    return "\n".join([*lines, f"under {SMALL_LINES}: share of the files with fewer lines, without __init__.py"])


def _small_folders(files: Iterable[Module]) -> list[str]:
    """Return folders within a package with one or two modules, those of inner folders included."""
    members: Counter[Path] = Counter(folder for module in files for folder in module.path.parents)
    return [f"{count}  {folder}" for folder, count in sorted(members.items()) if count < 3 and len(folder.parts) > 2]


def _sized(module: Module) -> str:
    return f"{module.num_lines:>5}  {module.path}"


def _section(heading: str, lines: Iterable[str]) -> str:
    return "\n".join([heading, *(f"  {line}" for line in lines)])


def main() -> None:
    """Print the layout of this checkout."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = settings["tool"]["importlinter"]["root_packages"]
    print(describe(read_modules(ROOT), read_importers(packages)))


if __name__ == "__main__":
    main()
