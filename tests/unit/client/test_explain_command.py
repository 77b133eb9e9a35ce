"""`antiphon explain` with a real server over known attention weights: its tables, its picture, its refusals."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from antiphon.architecture.heads import HeadConfig
from antiphon.cli import main as cli
from antiphon.cli.explain import END, plot_alignment
from tests.serving import serving, tiny_tokenizer

TEXT, TARGET_TEXT = "the cat costs $5 and $6", "eine Brücke"
LAYERS, DECODER_LAYERS, HEADS = 3, 2, 4
ENCODER_ONLY = (HeadConfig(task="fill_mask"),)
Weights = NDArray[np.float32]


def rows_of(random: np.random.Generator, layers: int, queries: int, keys: int) -> Weights:
    scores = np.exp(3 * random.standard_normal((layers, HEADS, queries, keys), np.float32))
    weights: Weights = scores / scores.sum(axis=-1, keepdims=True)
    return weights


class RandomExplainer:
    """Returns the same weights for the same lengths, of the parts that read something."""

    def explain(
        self, source_ids: Sequence[int] = (), target_ids: Sequence[int] = (), type_ids: Sequence[int] = ()
    ) -> dict[str, Weights]:
        random = np.random.default_rng(len(source_ids))
        source, target = len(source_ids), len(target_ids)
        maps = {"encoder_self": rows_of(random, LAYERS, source, source)}
        if target_ids:
            maps["decoder_self"] = rows_of(random, DECODER_LAYERS, target, target)
            maps["cross"] = rows_of(random, DECODER_LAYERS, target, source)
        return maps

    def longest_target(self, source_len: int) -> int:
        return 1000


def expected_weights() -> tuple[dict[str, Weights], list[str], list[str]]:
    """Return the weights, and the source and target tokens as the command prints them."""
    tokenizer = tiny_tokenizer()
    source = [*tokenizer.encode(TEXT), tokenizer.eos_id]
    target = tokenizer.encode(TARGET_TEXT)
    shown = [[tokenizer.piece(index).replace(" ", "▁") for index in ids] for ids in (source, target)]
    return RandomExplainer().explain(source, [tokenizer.bos_id, *target]), shown[0], [*shown[1], END]


async def explain(*arguments: object, is_explained: bool = True, heads: Sequence[HeadConfig] = ()) -> int:
    """Run the command with a separate server and return its exit code. heads: of an encoder-only model."""
    async with serving(explainer=RandomExplainer() if is_explained else None, heads=heads) as served:
        words = [str(word) for word in ("explain", "--target", served.target, *arguments)]
        return await asyncio.to_thread(cli.main, words)


async def test_explain_prints_the_entropy_of_every_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert await explain(TEXT, "--target-text", TARGET_TEXT) == 0
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()
    weights, _, _ = expected_weights()
    expected = [
        [name, f"{layer}", *(f"{value:.2f}" for value in per_head)]
        for name, maps in (
            ("encoder self", weights["encoder_self"]), ("decoder self", weights["decoder_self"]),
            ("cross", weights["cross"]),
        )
        for layer, per_head in enumerate(torch.special.entr(torch.from_numpy(maps).double()).sum(-1).mean(-1).tolist())
    ]  # fmt: skip
    assert table[0].split() == ["entropy,", "nats", *(word for head in range(HEADS) for word in ("head", f"{head}"))]
    assert [line.replace(", layer", "").split() for line in table[1:]] == [
        [*row[0].split(), *row[1:]] for row in expected
    ]


@pytest.mark.parametrize(
    ("flags", "layer", "heads", "title"),
    [
        ([], 1, slice(None), "cross-attention of decoder layer 1, mean over heads:"),
        (["--layer", 0], 0, slice(None), "cross-attention of decoder layer 0, mean over heads:"),
        (["--head", 2], 1, slice(2, 3), "cross-attention of decoder layer 1, head 2:"),
        (["--layer", 0, "--head", 0], 0, slice(0, 1), "cross-attention of decoder layer 0, head 0:"),
    ],
)
async def test_explain_prints_the_largest_weight_of_each_token(
    capsys: pytest.CaptureFixture[str], flags: list[object], layer: int, heads: slice, title: str
) -> None:
    assert await explain(TEXT, "--target-text", TARGET_TEXT, *flags) == 0
    shown, header, *lines = capsys.readouterr().out.split("\n\n")[1].splitlines()
    weights, source, target = expected_weights()
    mean = weights["cross"][layer, heads].mean(axis=0)
    assert shown == title
    assert header.split() == ["target", "source", "weight"]
    assert [line.split() for line in lines] == [
        [piece, source[row.argmax()], f"{row.max():.2f}"] for piece, row in zip(target, mean, strict=True)
    ]


async def test_explain_draws_the_alignment(tmp_path: Path) -> None:
    """A pair of dollar signs in the tokens must not be parsed as a formula."""
    assert await explain(TEXT, "--target-text", TARGET_TEXT, "--png", tmp_path / "map.png") == 0
    _, source, target = expected_weights()
    width, height = png_size(tmp_path / "map.png")
    assert (width, height) == (int(120 * (0.32 * len(source) + 2)), int(120 * (0.32 * len(target) + 2)))


def test_plot_alignment_gives_heavier_weights_darker_cells(tmp_path: Path) -> None:
    for name, given in (("eye", np.eye(6)), ("ones", np.ones((6, 6)))):
        plot_alignment(tmp_path / f"{name}.png", given.tolist(), list("abcdef"), list("uvwxyz"), title="a map")
    assert mean_brightness(tmp_path / "ones.png") < mean_brightness(tmp_path / "eye.png")


def test_plot_alignment_draws_characters_that_its_font_lacks(tmp_path: Path) -> None:
    """Warnings are errors in tests, so a missing glyph must cause no warning."""
    plot_alignment(tmp_path / "map.png", [[0.5, 0.5]], ["\U00012000", "$x"], ["$"], title="$ \\frac")
    assert png_size(tmp_path / "map.png")[0] > 0


def png_size(path: Path) -> tuple[int, int]:
    raw = path.read_bytes()
    assert raw.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(raw[16:20], "big"), int.from_bytes(raw[20:24], "big")


def mean_brightness(path: Path) -> float:
    from matplotlib.image import imread

    return float(imread(path)[..., :3].mean())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layer", 2], "--layer is 2; the model has 0 to 1"),
        (["--head", 4], "--head is 4; the model has 0 to 3"),
        (["--layer", -1], "--layer is -1; it must be at least 0"),
        (["--png", "no/such/place/map.png"], "--png is no/such/place/map.png, but there is no directory no/such/place"),
        (["--model", "other"], "NOT_FOUND: model 'other' is not served here"),
    ],
)
async def test_explain_refuses_with_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[object], message: str
) -> None:
    assert await explain(TEXT, "--target-text", TARGET_TEXT, *flags) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("antiphon explain: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


async def test_explain_of_an_encoder_only_model_has_no_alignment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await explain("the cat", "--pair", "the mat", heads=ENCODER_ONLY) == 0
    tokenizer = tiny_tokenizer()
    num_tokens = 3 + sum(len(tokenizer.encode(text)) for text in ("the cat", "the mat"))  # <s> and two </s>
    maps = RandomExplainer().explain([5] * num_tokens)["encoder_self"]
    entropies = torch.special.entr(torch.from_numpy(maps).double()).sum(-1).mean(-1).tolist()
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[4:] for line in lines] == [[f"{value:.2f}" for value in layer] for layer in entropies]
    assert {" ".join(line.split()[:2]) for line in lines} == {"encoder self,"}


@pytest.mark.parametrize("flags", [["--layer", 0], ["--head", 1], ["--png", "map.png"]])
async def test_explain_refuses_flags_of_the_alignment_when_there_is_no_cross_attention(
    capsys: pytest.CaptureFixture[str], flags: list[object]
) -> None:
    assert await explain("the cat", *flags, heads=ENCODER_ONLY) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"antiphon explain: {flags[0]} is {flags[1]}; it must be absent: this model has no cross-attention to align\n"
    )


async def test_explain_reports_that_the_bundle_has_no_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert await explain(TEXT, is_explained=False) == 2
    assert "UNIMPLEMENTED: the bundle of this model has no explain graph" in capsys.readouterr().err


async def test_explain_names_the_target_when_no_server_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(cli.main, ["explain", "--target", "127.0.0.1:1", TEXT]) == 2
    assert "127.0.0.1:1 is unavailable" in capsys.readouterr().err


async def test_explain_names_a_picture_it_cannot_write(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert await explain(TEXT, "--target-text", TARGET_TEXT, "--png", tmp_path) == 2
    assert f"--png: {tmp_path} cannot be written: Is a directory" in capsys.readouterr().err


async def test_explain_names_the_extra_when_matplotlib_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error comes before a request: no server listens at the target."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["explain", "--target", "127.0.0.1:1", TEXT, "--png", str(tmp_path / "map.png")]
    assert await asyncio.to_thread(cli.main, words) == 2
    assert capsys.readouterr().err == (
        "antiphon explain: matplotlib is not installed; run: pip install 'antiphon[train]'\n"
    )


def test_explain_without_a_picture_imports_grpc_and_protobuf_only() -> None:
    script = (
        "import sys, antiphon.cli.explain; print({'numpy', 'matplotlib', 'onnxruntime', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
