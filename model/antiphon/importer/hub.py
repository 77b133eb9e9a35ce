"""Origin of a checkpoint: its directory, local or downloaded from the model hub, and its provenance.

huggingface_hub downloads, with its cache, token, mirror and progress bar; only files that the importer needs.
"""

from __future__ import annotations

import re
from pathlib import Path

from antiphon.bundle.manifest import Provenance
from antiphon.checkpoints.adapter import Adapter
from antiphon.checkpoints.gguf_files import gguf_in, is_gguf, read_metadata
from antiphon.errors import SourceError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TEXT_FILES = ("*.json", "*.txt", "*.spm", "*.model", "*.bpe", "README.md")
# Weights of a dense layer of sentence-transformers; "*.json" matches the files of subdirectories too.
_DENSE_FILES = ("*_Dense/model.safetensors", "*_Dense/pytorch_model.bin")
_WEIGHTS = {
    "safetensors": ("model.safetensors", "model-*.safetensors"),
    "bin": ("pytorch_model*.bin",),
    "ctranslate2": ("model.bin",),
}


def find_checkpoint(source: str, revision: str | None) -> Path:
    """Return the directory of a checkpoint, or its GGUF file; an existing path takes precedence over a hub name.

    revision: branch, tag or commit on the hub; None: the default branch. Raises SourceError naming the source.
    """
    path = Path(source)
    if path.is_dir():
        return path if (path / "config.json").exists() else gguf_in(path) or path
    if is_gguf(path):
        return path
    if path.exists():
        raise SourceError(f"{source} is a file, but not in the GGUF format; give its directory, or a name on the hub")
    if not _NAME.fullmatch(source):
        raise SourceError(f"{source} is neither a directory nor a valid name on the hub, such as org/name")
    return _download(source, revision)


def _download(name: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    revised = f" at revision {revision}" if revision else ""
    try:
        patterns = [*_TEXT_FILES, *_DENSE_FILES, *_WEIGHTS[_kind_of_weights(_files_of(name, revision))]]
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError:
        raise SourceError(
            f"{name} is gated: accept its terms on the hub, then run `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise SourceError(f"{name} has no revision {revision}") from None
    except errors.RepositoryNotFoundError:
        raise SourceError(
            f"{name} is not a local directory, and the hub has no public checkpoint of that name; "
            "for a private one run `hf auth login` or set HF_TOKEN"
        ) from None
    except Exception as error:  # errors of the HTTP client below the library share no narrower base
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise SourceError(
            f"{name}{revised} is not a local directory, is not complete in the cache, "
            f"and the hub cannot be reached: {reason}"
        ) from None


def _files_of(name: str, revision: str | None) -> list[str]:
    """Return the names of a checkpoint's files on the hub, or in the cache if the hub cannot be reached."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        files = huggingface_hub.HfApi().model_info(name, revision=revision).siblings or []
        return [file.rfilename for file in files]
    except (errors.GatedRepoError, errors.RevisionNotFoundError, errors.RepositoryNotFoundError):
        raise
    except Exception:  # offline, by setting or by a failed connection
        # Without patterns a cached snapshot that lacks files that the importer never needs counts as incomplete.
        cached = huggingface_hub.snapshot_download(
            name, revision=revision, local_files_only=True, allow_patterns=[*_TEXT_FILES]
        )
        return [path.name for path in Path(cached).iterdir()]


def _kind_of_weights(files: list[str]) -> str:
    """Return the weight format to download: safetensors, then CTranslate2's, then PyTorch's."""
    if any(file.startswith("model") and file.endswith(".safetensors") for file in files):
        return "safetensors"
    return "ctranslate2" if "model.bin" in files else "bin"


def provenance_of(source: str, revision: str | None, folder: Path, adapter: Adapter | None) -> Provenance:
    """Return the provenance of a checkpoint in `folder`, whose name or directory is `source`.

    The licences are those that the README.md of the checkpoint and that of the adapter state.
    """
    name = Path(source).resolve().name if Path(source).exists() else source
    described = f"{name} at revision {revision}" if revision else name
    licence = _stated_licence(folder) or "unknown"
    meaning = "weights unchanged in meaning"
    if adapter is not None:
        described += f", with the adapter {adapter.described}"
        of_adapter = _stated_licence(adapter.folder)
        licence += f"; adapter: {of_adapter}" if of_adapter not in (None, licence) else ""
        meaning = "with an adapter merged into the weights"
    return Provenance(
        source=described,
        licence=licence,
        attribution=f"{name}, by its authors; imported by Antiphon, {meaning}",
    )


def _stated_licence(folder: Path) -> str | None:
    """Return `license:` of the front matter of a README.md, or of a GGUF file's metadata; None without one."""
    if is_gguf(folder):
        return read_metadata(folder, "general.license").get("general.license")
    try:
        readme = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    front = re.match(r"---\n(.*?)\n---", readme, re.DOTALL)
    match = re.search(r"^license:[ \t]*([^\s#]+)", front.group(1), re.MULTILINE) if front else None
    return match.group(1).strip("'\"") if match else None
