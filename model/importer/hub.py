"""A directory, or the name of a checkpoint on a model hub, becomes a directory.

Downloads through huggingface_hub with its cache, token, mirror and progress bar, and only what import reads.
"""

from __future__ import annotations

import re
from pathlib import Path

from antiphon.model.checkpoints.source_weights import SourceError

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
        patterns = [*_TEXT_FILES, *_WEIGHTS[_kind_of_weights(_files_of(name, revision))]]
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
    except Exception as error:  # those of the HTTP client below the library, which share no other base
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise SourceError(
            f"{name}{revised} is no directory here, is not whole in the cache, and the hub gives no answer: {reason}"
        ) from None


def _files_of(name: str, revision: str | None) -> list[str]:
    """Names of a checkpoint's files on the hub, or in the cache where the hub cannot be reached."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        found = huggingface_hub.HfApi().model_info(name, revision=revision).siblings or []
        return [file.rfilename for file in found]
    except (errors.GatedRepoError, errors.RevisionNotFoundError, errors.RepositoryNotFoundError):
        raise
    except Exception:  # offline, as set or as found
        # With patterns, for without them a snapshot that lacks what import never reads counts as incomplete.
        cached = huggingface_hub.snapshot_download(
            name, revision=revision, local_files_only=True, allow_patterns=[*_TEXT_FILES]
        )
        return [path.name for path in Path(cached).iterdir()]


def _kind_of_weights(files: list[str]) -> str:
    """Safetensors where there are any; else CTranslate2's file, or PyTorch's."""
    if any(file.startswith("model") and file.endswith(".safetensors") for file in files):
        return "safetensors"
    return "ctranslate2" if "model.bin" in files else "bin"
