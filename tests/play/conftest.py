"""A server with a model of each architecture, the page over it, and a browser."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Provenance
from antiphon.checkpoints.checkpoint import load_checkpoint, save_checkpoint, weights_of
from antiphon.client import Client
from antiphon.export.export import export_bundle
from antiphon.text.tokenizer import MASK_TOKEN, Tokenizer, encoder_format
from antiphon.transformer.random_model import random_transformer
from tests.integration.process import PATIENCE_S, ServerProcess
from tests.kept_models import kept_model
from tests.play.browser import Watched, open_browser
from tests.play.play_process import PlayProcess

# Much longer than any answer takes: turns a hang into a failure.
expect.set_options(timeout=PATIENCE_S * 1000)


@pytest.fixture(scope="session")
def bundles() -> dict[str, Path]:
    """Bundles by the name under which they are served."""
    return served_bundles()


@pytest.fixture(scope="session")
def server(bundles: dict[str, Path]) -> Iterator[ServerProcess]:
    names = [argument for name, path in bundles.items() for argument in ("--model", f"{name}={path}")]
    with ServerProcess(None, [*names, "--admin-port", "0"]) as process:
        yield process


@pytest.fixture(scope="session")
def play(server: ServerProcess) -> Iterator[PlayProcess]:
    with PlayProcess(server) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.target) as opened:
        yield opened


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """A function that opens pages; at the end, none of them may have reported an error. script: runs before theirs."""
    opened: list[Watched] = []

    def open_one(url: str, script: str = "", **settings: Any) -> Watched:
        watched = Watched(browser.new_page(**{"reduced_motion": "reduce", **settings}))
        opened.append(watched)
        watched.page.add_init_script(script)
        watched.page.goto(url)
        return watched

    yield open_one
    for watched in opened:
        watched.page.close()
    for watched in opened:
        watched.check()


SHIPPED = Path(__file__).parents[2] / "model" / "antiphon" / "bundles" / "en-de"
VOCAB_SIZE = 280
_TEXTS = [f"the small cat number {number} sat on the red mat in Rome" for number in range(40)]
_SIZES = dict(
    d_model=32, num_heads=4, d_ff=64, dropout=0.0, max_source_len=64, max_target_len=64, vocab_size=VOCAB_SIZE
)
_LABELS = ("O", "B-animal", "I-animal", "B-place")
ENCODER = ModelConfig.model_validate(
    dict(
        _SIZES, architecture="encoder", encoder_layers=2, decoder_layers=0, positions="learned", token_types=2,
        heads=[
            dict(task="fill_mask", transform_width=32, activation="gelu", norm=True, tied=True),
            dict(task="classify", labels=("low", "middle", "high")),
            dict(task="tag", labels=_LABELS),
            dict(task="next_sentence", labels=("is_next", "not_next")),
        ],
    )
)  # fmt: skip
DECODER = ModelConfig.model_validate(
    dict(_SIZES, architecture="decoder", encoder_layers=0, decoder_layers=2, positions="rope")
)
# Its greedy answers have thousands of tokens, so that a request is still running when a test looks at it.
LONG = ModelConfig.model_validate(
    dict(_SIZES, encoder_layers=1, decoder_layers=1) | dict(d_model=16, d_ff=16, max_target_len=8192)
)


def write_bundle(name: str, config: ModelConfig) -> Path:
    """Export a model with random weights and return its bundle. Equal names have equal configurations."""
    return kept_model(f"play-{name}", lambda folder: _export(folder, config)) / "bundle"


def _export(folder: Path, config: ModelConfig) -> None:
    tokenizer = Tokenizer.train(_TEXTS, config.vocab_size, extra_special=[MASK_TOKEN] if config.heads else [])
    save_checkpoint(
        folder / "checkpoint",
        config=config,
        weights=weights_of(random_transformer(config)),
        tokenizer=tokenizer,
        text=encoder_format(tokenizer) if config.heads else None,
        provenance=Provenance(source="random", licence="CC0-1.0", attribution="nobody"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        export_bundle(load_checkpoint(folder / "checkpoint"), folder / "bundle", precisions=("float32",))


def served_bundles() -> dict[str, Path]:
    """Return a bundle of each architecture by its name for requests; the shipped one is the first."""
    models = {"bert": ENCODER, "gpt": DECODER}
    written = {name: write_bundle(name, config) for name, config in models.items()}
    return {"en-de": SHIPPED, **written}
