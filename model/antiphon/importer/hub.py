"""Directory of a checkpoint: a local one, or a download from the model hub.

huggingface_hub downloads, with its cache, token, mirror and progress bar; only files that the importer needs.
"""

from __future__ import annotations

import re
from pathlib import Path

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
    """Return the directory of a checkpoint; an existing directory takes precedence over a hub name.

    revision: branch, tag or commit on the hub; None: the default branch. Raises SourceError naming the source.
    """
    if Path(source).is_dir():
        return Path(source)
    if Path(source).exists():
        raise SourceError(f"{source} is a file; give its directory, or the name of a checkpoint on the hub")
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
