"""A directory, or the name of a checkpoint on a model hub, becomes a directory.

Downloads through huggingface_hub with its cache, token, mirror and progress bar, and only what import reads.
"""

from __future__ import annotations

import re
from pathlib import Path

from antiphon.model.source_weights import SourceError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TEXT_FILES = ("*.json", "*.txt", "*.spm", "*.model", "*.bpe", "README.md")
_WEIGHTS = {
    "safetensors": ("model.safetensors", "model-*.safetensors"),
    "bin": ("pytorch_model*.bin",),
    "ctranslate2": ("model.bin",),
}


def find_checkpoint(source: str, revision: str | None) -> Path:
    """The directory of a checkpoint; one that exists wins over a hub's name. Raises SourceError."""
    if Path(source).is_dir():
        return Path(source)
    if Path(source).exists():
        raise SourceError(f"{source} is a file; name the directory that holds it, or a checkpoint of the hub")
    if not _NAME.fullmatch(source):
        raise SourceError(f"{source} is neither a directory nor a name of the hub, such as org/name")
    return _download(source, revision)


def _download(name: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    revised = f" at revision {revision}" if revision else ""
    try:
        patterns = [*_TEXT_FILES, *_WEIGHTS[_kind_of_weights(name, revision)]]
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError:
        raise SourceError(
            f"{name} is gated: accept its terms on the hub, then `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise SourceError(f"{name} has no revision {revision}") from None
    except errors.RepositoryNotFoundError:
        raise SourceError(
            f"{name} is no directory here, and the hub has no public checkpoint of that name; "
            "for a private one `hf auth login` or set HF_TOKEN"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        raise SourceError(
            f"{name}{revised} is no directory here, is not in the cache, and the hub cannot be reached: "
            f"{str(error).splitlines()[0]}"
        ) from None


def _kind_of_weights(name: str, revision: str | None) -> str:
    """Safetensors where the hub, or offline the cache, has them; else CTranslate2's file, or PyTorch's."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        files = huggingface_hub.list_repo_files(name, revision=revision)
    except errors.RepositoryNotFoundError:
        raise
    except (errors.OfflineModeIsEnabled, OSError):
        cached = huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True)
        files = [path.name for path in Path(cached).iterdir()]
    if any(file.startswith("model") and file.endswith(".safetensors") for file in files):
        return "safetensors"
    return "ctranslate2" if "model.bin" in files else "bin"
