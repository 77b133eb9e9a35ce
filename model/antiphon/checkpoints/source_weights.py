"""Tensors of a checkpoint to import: read one at a time, with a final check that all of them were used.

Reads safetensors by memory map, or PyTorch's .bin files with weights_only, as one file or in shards. The families
decide which tensors to take; this module records missing and unused tensors and reports them all at the end.
An adapter's changes are applied to a tensor when it is read, so no family has to know about adapters.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from antiphon.errors import SourceError

_SHOWN = 5
# Prefixes of names in checkpoints of a wrapped model, and what wrapped it; transformers does not remove them either.
_WRAPPERS = {"_orig_mod.": "torch.compile", "module.": "DataParallel"}
# Last parts of the names of tensors that only quantised weights have: GPTQ, AWQ, bitsandbytes, FP8, compressed tensors.
_QUANTISED = ("qweight", "qzeros", "g_idx", "SCB", "absmax", "weight_scale", "weight_scale_inv", "weight_packed")
_T = TypeVar("_T")
# Function from a tensor of a checkpoint, float32, to the tensor after a change of the same shape; raises SourceError.
Change = Callable[[Tensor], Tensor]


class SourceWeights:
    """Tensors of a checkpoint by name; each is read when it is taken.

    on_meta: True: no data is read; tensors are on PyTorch's meta device, and filling only compares shapes.
    """

    def __init__(self, readers: dict[str, Callable[[], Tensor]], files: ExitStack, *, on_meta: bool = False) -> None:
        self._readers = readers
        self._files = files
        self._on_meta = on_meta
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._misshapen: list[str] = []
        self._ignored: list[str] = []
        self._changes: dict[str, Change] = {}
        self._replaced: dict[str, Tensor] = {}

    def __enter__(self) -> SourceWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers = {}
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._readers

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors, after strip_prefix and rename_ending."""
        return frozenset(self._readers)

    def adapt(self, changes: Mapping[str, Change], replaced: Mapping[str, Tensor]) -> None:
        """Apply an adapter to the tensors that are read from now on; call it before names are changed.

        changes: by name of the tensor. replaced: tensors that replace the checkpoint's, or that it does not have.
        """
        self._changes = dict(changes)
        self._replaced = dict(replaced)
        self._rename(lambda name: name)

    def strip_prefix(self, prefix: str) -> None:
        """Remove a prefix, which only some checkpoints of a family have, from all names, those of an adapter too."""
        self._rename(lambda name: name.removeprefix(prefix))

    def rename_ending(self, old: str, new: str) -> None:
        """Replace the ending `old` of names by `new`."""
        self._rename(lambda name: name.removesuffix(old) + new if name.endswith(old) else name)

    def _rename(self, rename: Callable[[str], str]) -> None:
        """Rename all tensors. Replacements come last: their names can become equal to the checkpoint's only here."""
        self._changes = _renamed(self._changes, rename)
        self._replaced = _renamed(self._replaced, rename)
        replacements = {name: _reader(self._replacement, name) for name in self._replaced}
        self._readers = _renamed(self._readers, rename) | replacements

    def _replacement(self, name: str) -> Tensor:
        return self._replaced[name].to("meta") if self._on_meta else self._replaced[name]

    def _read(self, name: str) -> Tensor:
        """Return a tensor of the checkpoint, after the adapter's change if there is one."""
        change = self._changes.get(name)
        return self._readers[name]() if change is None else change(self._readers[name]().float())

    def take(self, name: str) -> Tensor:
        """Return a tensor as float32. Raises SourceError if it is missing."""
        if name not in self._readers:
            raise SourceError(f"the tensor {name} is missing")
        self._taken.add(name)
        return self._read(name).float()

    def first_of(self, *names: str) -> str:
        """Return the first of these names that exists; the first name if none exists."""
        return next((name for name in names if name in self._readers), names[0])

    def differ(self, first: str, second: str) -> bool:
        """Return whether both tensors exist and have different values before an adapter's low-rank changes."""
        if first == second or first not in self._readers or second not in self._readers:
            return False
        left, right = self._readers[first](), self._readers[second]()
        if left.shape != right.shape:
            return True
        return left.data_ptr() != right.data_ptr() and not torch.equal(left, right)

    def fill(self, ours: Tensor, *names: str) -> None:
        """Copy these tensors into `ours`, concatenated along the first axis; missing or misshapen ones are recorded."""
        absent = [name for name in names if name not in self._readers]
        self._missing += absent
        if absent:
            return
        sources = [self._read(name) for name in names]
        self._taken.update(names)
        shapes = [list(source.shape) for source in sources]
        if sum(shape[0] for shape in shapes) != ours.shape[0] or any(s[1:] != list(ours.shape[1:]) for s in shapes):
            self._misshapen.append(f"{' + '.join(names)} {shapes}, expected {list(ours.shape)}")
            return
        with torch.no_grad():
            for part, source in zip(torch.split(ours, [shape[0] for shape in shapes]), sources, strict=True):
                part.copy_(source)

    def _take_if(self, name: str, fits: Callable[[Tensor], bool], expected: object) -> Tensor | None:
        """Return a tensor; None, and a record of it, if it is missing or misshapen."""
        if name not in self._readers:
            self._missing.append(name)
            return None
        source = self._read(name)
        self._taken.add(name)
        if fits(source):
            return source
        self._misshapen.append(f"{name} {list(source.shape)}, expected {expected}")
        return None

    @torch.no_grad()
    def fill_view(self, ours: Tensor, name: str) -> None:
        """Copy a tensor into `ours`, a view with the same number of values in the same order; shapes can differ."""
        size = ours.numel()
        if (source := self._take_if(name, lambda tensor: tensor.numel() == size, f"{size} values")) is not None:
            ours.copy_(source.view(ours.shape))

    def fill_module(self, module: nn.Module, *names: str) -> None:
        """Fill the direct parameters of a module (weight and bias) from the source modules with these names."""
        for part, ours in module.named_parameters(recurse=False):
            self.fill(ours, *(f"{name}.{part}" for name in names))

    def has_rows(self, name: str, ours: Tensor) -> bool:
        """Return whether a tensor exists and has at least the rows of `ours`, with the same width."""
        if name not in self:
            return False
        rows, *width = self._read(name).shape
        return rows >= ours.shape[0] and width == list(ours.shape[1:])

    @torch.no_grad()
    def fill_start(self, ours: Tensor, name: str) -> None:
        """Copy the first rows of a tensor into `ours`; the tensor, a table of positions, can have more rows."""

        def fits(source: Tensor) -> bool:
            return len(source) >= len(ours) and source.shape[1:] == ours.shape[1:]

        source = self._take_if(name, fits, f"at least {list(ours.shape)}")
        if source is not None and not source.is_meta:  # computed positions are not on the meta device
            ours.copy_(source[: len(ours)])

    @torch.no_grad()
    def add(self, ours: Tensor, name: str) -> None:
        """Add a tensor of one row to every row of `ours`; a missing or misshapen one is recorded."""
        row = [1, *ours.shape[1:]]
        if (source := self._take_if(name, lambda tensor: list(tensor.shape) == row, row)) is not None:
            ours.add_(source)

    def fill_tied(self, ours: Tensor, *names: str) -> None:
        """Copy a tensor that is stored under several names; `differ` has shown that their values are equal.

        Raises SourceError if an adapter changes it under some of its names only.
        """
        self._refuse_untying(names)
        self.fill(ours, self.first_of(*names))
        self._taken.update(name for name in names if name in self._readers)

    def ignore(self, pattern: str) -> None:
        """Allow tensors whose names match this shell pattern to stay unused: buffers that our model computes."""
        self._ignored.append(pattern)

    def _refuse_untying(self, names: Iterable[str]) -> None:
        """Raise SourceError unless an adapter leaves this tied tensor as it is, or replaces it under all its names.

        peft adds a low-rank change to all names when it merges, but only to one in the model that was trained.
        """
        tied = set(names)
        changed, replaced = tied & self._changes.keys(), tied & self._replaced.keys()
        if len(tied) == 1 or not (changed or replaced) or (not changed and self._replaced_alike(tied)):
            return
        adapted = changed or replaced
        raise SourceError(
            f"the adapter changes {_listed(adapted)}, one tensor of this model with {_listed(tied - adapted or tied)}, "
            "so the model that was trained and the merged model can differ. Leave embeddings out of target_modules and "
            "modules_to_save, or untie the checkpoint before the training."
        )

    def _replaced_alike(self, names: set[str]) -> bool:
        """Return whether an adapter replaces all these tensors by equal ones."""
        if not names <= self._replaced.keys():
            return False
        first, *rest = [self._replaced[name] for name in names]
        return all(torch.equal(first, tensor) for tensor in rest)

    def check(self, family: str) -> None:
        """Raise SourceError if tensors were missing, had another shape, or were not used."""
        unused = [name for name in self._readers if name not in self._taken and not self._is_ignored(name)]
        self._check_adapter(family, unused)
        kinds = (("missing", self._missing), ("unexpected", unused), ("of another shape", self._misshapen))
        problems = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds if names]
        if problems:
            adapted = "; the adapter's if its training added layers: modules_to_save must list them"
            raise SourceError(
                f"the tensors do not fit the {family} model of config.json: {'; '.join(problems)}. "
                f"{_advice(unused)}{adapted if self._changes or self._replaced else ''}."
            )

    def _check_adapter(self, family: str, unused: Iterable[str]) -> None:
        """Raise SourceError if an adapter has tensors for which the model has no place."""
        alien = [name for name in self._changes if name not in self._taken and name not in self._missing]
        alien += [name for name in unused if name in self._replaced]
        if alien:
            raise SourceError(
                f"the adapter changes what the {family} model of config.json does not have, {len(alien)} in number: "
                f"{_listed(alien)}. Check that it was trained on this checkpoint."
            )

    def _is_ignored(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._ignored)


def _advice(unused: Iterable[str]) -> str:
    """Return what to do about tensors that do not fit, given the names of those that were not used."""
    names = list(unused)
    if any(name.endswith(_QUANTISED) for name in names):
        return "The weights are quantised: import the checkpoint from which they were quantised"
    for prefix, wrapper in _WRAPPERS.items():
        if any(name.startswith(prefix) for name in names):
            return f"Names begin with {prefix!r}, which {wrapper} adds: save the model inside it instead"
    return "Check that the checkpoint is complete and that config.json belongs to it"


def _listed(names: Iterable[str]) -> str:
    """Return the first names in order, separated by commas."""
    ordered = sorted(names)
    return f"{', '.join(ordered[:_SHOWN])}{', ...' if len(ordered) > _SHOWN else ''}"


def _renamed(values: Mapping[str, _T], rename: Callable[[str], str]) -> dict[str, _T]:
    return {rename(name): value for name, value in values.items()}


def open_weights(folder: Path, *, on_meta: bool = False) -> SourceWeights:
    """Open the tensors of a checkpoint directory, safetensors before .bin. Raises SourceError naming the file."""
    return open_tensors(folder, "model", "pytorch_model", on_meta=on_meta)


def open_tensors(folder: Path, stem: str, bin_stem: str, *, on_meta: bool = False) -> SourceWeights:
    """Open STEM.safetensors or BIN_STEM.bin of a directory, or their shards. Raises SourceError naming the file."""
    for name, open_file in ((f"{stem}.safetensors", _open_safetensors), (f"{bin_stem}.bin", _open_bin)):
        files = _files(folder, name)
        if files:
            with ExitStack() as stack:
                readers: dict[str, Callable[[], Tensor]] = {}
                for path in files:
                    readers.update(open_file(path, stack, on_meta=on_meta))
                return SourceWeights(readers, stack.pop_all(), on_meta=on_meta)
    raise SourceError(
        f"{folder} has no weights: it needs {stem}.safetensors or {bin_stem}.bin, or the index file of its shards"
    )


def _files(folder: Path, name: str) -> list[Path]:
    """Return the file of this name, or the shards that its index lists; empty if neither exists."""
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
            return {name: _meta_reader(opened.get_slice(name).get_shape()) for name in names}
        return {name: _reader(opened.get_tensor, name) for name in names}
    except (OSError, SafetensorError) as error:
        raise SourceError(f"{path} cannot be read: {error}; download it again") from None


def _open_bin(path: Path, stack: ExitStack, *, on_meta: bool) -> dict[str, Callable[[], Tensor]]:
    tensors = _load_bin(path)
    stack.callback(tensors.clear)
    if on_meta:
        return {name: _meta_reader(tensor.shape) for name, tensor in tensors.items()}
    return {name: _reader(tensors.__getitem__, name) for name in tensors}


def _load_bin(path: Path) -> dict[str, Tensor]:
    """Read a .bin file of tensors without running code; by memory map in the format of PyTorch 1.6 and later."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise SourceError(
            f"{path} contains objects other than tensors and is not read, because a pickle can run any code: {reason} "
            "Use a checkpoint in safetensors format."
        ) from None
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise SourceError(f"{path} cannot be read: {error}; download it again") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise SourceError(f"{path} is not a dictionary of tensors")
    return dict(tensors)


def _is_zip(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(4) == b"PK\x03\x04"


def _reader(read: Callable[[str], Tensor], name: str) -> Callable[[], Tensor]:
    return lambda: read(name)


def _meta_reader(shape: Iterable[int]) -> Callable[[], Tensor]:
    size = tuple(shape)
    return lambda: torch.empty(size, device="meta")
