"""Tensors of a checkpoint somebody else made: found, read one at a time, and accounted for.

Safetensors by memory map, or PyTorch's .bin with weights only, in one file or in shards. Knows no family: what is
missing and what nobody asked for is noted, and told at the end.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

_SHOWN = 5


class SourceError(Exception):
    """A checkpoint cannot be imported; the message names the file, the setting or the tensors, and what to do."""


class SourceWeights:
    """The tensors of a checkpoint by name, each read when it is taken.

    With `on_meta` nothing is read: tensors have shapes and no numbers, and filling compares shapes alone.
    """

    def __init__(self, readers: dict[str, Callable[[], Tensor]], files: ExitStack, *, on_meta: bool = False) -> None:
        self._readers = readers
        self._files = files
        self._on_meta = on_meta
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._misshapen: list[str] = []
        self._ignored: list[str] = []

    def __enter__(self) -> SourceWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers = {}
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._readers

    @property
    def names(self) -> frozenset[str]:
        """Of every tensor, as far as prefixes are left."""
        return frozenset(self._readers)

    def strip_prefix(self, prefix: str) -> None:
        """Let names that begin with this prefix be known without it; checkpoints have it or not."""
        self._readers = {name.removeprefix(prefix): reader for name, reader in self._readers.items()}

    def rename_ending(self, old: str, new: str) -> None:
        """Let names that end in `old` end in `new`."""
        self._readers = {
            name.removesuffix(old) + new if name.endswith(old) else name: reader
            for name, reader in self._readers.items()
        }

    def take(self, name: str) -> Tensor:
        """A tensor as float32, its own copy or none of the file's. Raises SourceError where it is missing."""
        if name not in self._readers:
            raise SourceError(f"the tensor {name} is missing")
        self._taken.add(name)
        return self._readers[name]().float()

    def first_of(self, *names: str) -> str:
        """The first of these names that there is a tensor of; the first where there is none."""
        return next((name for name in names if name in self._readers), names[0])

    def differ(self, first: str, second: str) -> bool:
        """Do both tensors exist, and hold different numbers?"""
        if first == second or first not in self._readers or second not in self._readers:
            return False
        left, right = self._readers[first](), self._readers[second]()
        if left.shape != right.shape:
            return True
        return left.data_ptr() != right.data_ptr() and not torch.equal(left, right)

    def fill(self, ours: Tensor, *names: str) -> None:
        """Copy these tensors into ours, one behind the other along its first axis. Missing ones are noted."""
        absent = [name for name in names if name not in self._readers]
        self._missing += absent
        if absent:
            return
        sources = [self._readers[name]() for name in names]
        self._taken.update(names)
        shapes = [list(source.shape) for source in sources]
        if sum(shape[0] for shape in shapes) != ours.shape[0] or any(s[1:] != list(ours.shape[1:]) for s in shapes):
            self._misshapen.append(f"{' + '.join(names)} {shapes} where {list(ours.shape)} is expected")
            return
        with torch.no_grad():
            for part, source in zip(torch.split(ours, [shape[0] for shape in shapes]), sources, strict=True):
                part.copy_(source)

    def fill_view(self, ours: Tensor, name: str) -> None:
        """Copy a tensor into a view of ours that has its numbers in its order, whatever its own shape."""
        if name not in self._readers:
            self._missing.append(name)
            return
        source = self._readers[name]()
        self._taken.add(name)
        if source.numel() != ours.numel():
            self._misshapen.append(f"{name} {list(source.shape)} where {ours.numel()} numbers are expected")
            return
        with torch.no_grad():
            ours.copy_(source.view(ours.shape))

    def fill_module(self, module: nn.Module, *names: str) -> None:
        """Fill every parameter that is the module's own, weight or bias, from those of these modules of theirs."""
        for part, ours in module.named_parameters(recurse=False):
            self.fill(ours, *(f"{name}.{part}" for name in names))

    def fill_start(self, ours: Tensor, name: str) -> None:
        """Copy the first rows of a tensor that may have more than ours: a table of positions."""
        if name not in self._readers:
            self._missing.append(name)
            return
        source = self._readers[name]()
        self._taken.add(name)
        if len(source) < len(ours) or source.shape[1:] != ours.shape[1:]:
            self._misshapen.append(f"{name} {list(source.shape)} where at least {list(ours.shape)} is expected")
            return
        with torch.no_grad():
            ours.copy_(source[: len(ours)])

    def add(self, ours: Tensor, name: str) -> None:
        """Add a tensor of one row to every row of ours. A missing one is noted."""
        if name not in self._readers:
            self._missing.append(name)
            return
        source = self._readers[name]()
        self._taken.add(name)
        if list(source.shape) != [1, *ours.shape[1:]]:
            self._misshapen.append(f"{name} {list(source.shape)} where {[1, *ours.shape[1:]]} is expected")
            return
        with torch.no_grad():
            ours.add_(source)

    def fill_tied(self, ours: Tensor, *names: str) -> None:
        """Copy a tensor that goes by several names; `differ` has told that they are one."""
        self.fill(ours, self.first_of(*names))
        self._taken.update(name for name in names if name in self._readers)

    def ignore(self, pattern: str) -> None:
        """Tensors that nobody needs to take, as a shell pattern: buffers that our model computes."""
        self._ignored.append(pattern)

    def check(self, family: str) -> None:
        """Raise SourceError where tensors were missing, of another shape, or left over."""
        left = [name for name in self._readers if name not in self._taken and not self._is_ignored(name)]
        found = [
            f"{len(names)} {kind}: {', '.join(sorted(names)[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
            for kind, names in (("missing", self._missing), ("unexpected", left), ("of another shape", self._misshapen))
            if names
        ]
        if found:
            raise SourceError(
                f"the tensors are not those of {family} as config.json describes it: {'; '.join(found)}. "
                "Is this the whole checkpoint, and config.json its own?"
            )

    def _is_ignored(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._ignored)


def open_weights(folder: Path, *, on_meta: bool = False) -> SourceWeights:
    """The tensors of a checkpoint directory, safetensors before .bin. Raises SourceError."""
    for stem, suffix, open_file in (("model", "safetensors", _open_safetensors), ("pytorch_model", "bin", _open_bin)):
        files = _files(folder, f"{stem}.{suffix}")
        if files:
            with ExitStack() as stack:
                readers: dict[str, Callable[[], Tensor]] = {}
                for path in files:
                    readers.update(open_file(path, stack, on_meta=on_meta))
                return SourceWeights(readers, stack.pop_all(), on_meta=on_meta)
    raise SourceError(
        f"{folder} has no weights: model.safetensors or pytorch_model.bin, or an index of either's parts, is needed"
    )


def _files(folder: Path, name: str) -> list[Path]:
    """The file of this name, or the parts that its index lists; empty where there is neither."""
    if (folder / name).is_file():
        return [folder / name]
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return []
    try:
        parts = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{index} cannot be read: {error}") from None
    for part in parts:
        if Path(part).name != part or not (folder / part).is_file():
            raise SourceError(f"{index} names {part!r}, which is not in its directory; download the whole checkpoint")
    return [folder / part for part in parts]


def _open_safetensors(path: Path, stack: ExitStack, *, on_meta: bool) -> dict[str, Callable[[], Tensor]]:
    try:
        opened: Any = stack.enter_context(safe_open(path, framework="pt"))
        names: Iterable[str] = opened.keys()
        if on_meta:
            return {name: _shaped(opened.get_slice(name).get_shape()) for name in names}
        return {name: _reader(opened.get_tensor, name) for name in names}
    except (OSError, SafetensorError) as error:
        raise SourceError(f"{path} cannot be read: {error}; download it again") from None


def _open_bin(path: Path, stack: ExitStack, *, on_meta: bool) -> dict[str, Callable[[], Tensor]]:
    held = _load_bin(path)
    stack.callback(held.clear)
    if on_meta:
        return {name: _shaped(tensor.shape) for name, tensor in held.items()}
    return {name: _reader(held.__getitem__, name) for name in held}


def _load_bin(path: Path) -> dict[str, Tensor]:
    """A pickle of tensors and nothing else; by memory map where its format, that of PyTorch 1.6 and later, allows."""
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise SourceError(
            f"{path} holds more than tensors, and is not read, for a pickle may run any code: {reason} "
            "Ask its authors for safetensors."
        ) from None
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise SourceError(f"{path} cannot be read: {error}; download it again") from None
    if not isinstance(held, dict) or not all(isinstance(tensor, Tensor) for tensor in held.values()):
        raise SourceError(f"{path} is not a dictionary of tensors")
    return dict(held)


def _is_zip(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(4) == b"PK\x03\x04"


def _reader(read: Callable[[str], Tensor], name: str) -> Callable[[], Tensor]:
    return lambda: read(name)


def _shaped(shape: Iterable[int]) -> Callable[[], Tensor]:
    size = tuple(shape)
    return lambda: torch.empty(size, device="meta")
