"""A bundle with random weights that is exported once, and servers of it."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.architecture.config import preset
from antiphon.bundle.manifest import Provenance
from antiphon.text.tokenizer import Tokenizer, byte_bpe_format
from tests.integration.process import ServerProcess
from tests.kept_models import kept_model

SENTENCES = [
    f"{who} {does} {what} {where}."
    for who in ("Der Müller", "Eine Katze", "The old man", "My sister")
    for does in ("liest", "sieht", "reads", "paints")
    for what in ("ein Buch", "den Fluß", "a letter", "the bridge")
    for where in ("im Garten", "am Abend", "in the rain", "über den Dächern")
]


@pytest.fixture(scope="session")
def bundle() -> Path:
    """Export a tiny model with long limits; its greedy answers have any requested length."""
    return kept_model("tiny", _export) / "tiny"


def _export(folder: Path) -> None:
    import torch

    from antiphon.checkpoints.checkpoint import Checkpoint
    from antiphon.export.export import export_bundle
    from antiphon.transformer.transformer import Transformer

    tokenizer = Tokenizer.train(SENTENCES, vocab_size=400)
    tokenizer.save(folder / "tokenizer.json")
    config = preset("tiny", vocab_size=tokenizer.vocab_size, max_source_len=256, max_target_len=2048)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer(config).eval()
    checkpoint = Checkpoint(
        config=config,
        model=model,
        tokenizer=tokenizer,
        text=byte_bpe_format(tokenizer),
        text_folder=folder,
        provenance=Provenance(source="random", licence="CC0-1.0", attribution="nobody"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        export_bundle(checkpoint, folder / "tiny")


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[ServerProcess]:
    """Run one server for the tests of a module that do not stop it."""
    with ServerProcess(bundle) as process:
        yield process
