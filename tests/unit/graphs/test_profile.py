from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from antiphon.bundle.graph import Graph
from antiphon.bundle.manifest import Bundle, load_bundle
from antiphon.bundle.memory_fit import Measurement, fit_memory
from antiphon.export import profile
from antiphon.ops.workspace import Workspace
from antiphon.runtime.native import NativeRunner
from tests.unit.graphs.conftest import LONGEST


def run_profile(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    profile.add_arguments(parser)
    return profile.run(parser.parse_args([*flags, "--threads", "1"]))


def polynomial(a: float, b: float, c: float) -> list[Measurement]:
    return [
        Measurement(rows=rows, length=length, peak_bytes=round(a + rows * (b * length + c * length**2)))
        for rows in (1, 4)
        for length in (16, 64, 256, 1024)
    ]


@pytest.mark.parametrize(
    ("coefficients", "exponent"),
    [((5000, 200, 0), 1.0), ((5000, 0, 8), 2.0), ((0, 300, 0), 1.0), ((9000, 70, 16), 2.0)],
)
def test_fit_recovers_the_coefficients_that_made_the_measurements(
    coefficients: tuple[float, float, float], exponent: float
) -> None:
    fit = fit_memory(polynomial(*coefficients))
    assert (fit.a, fit.b, fit.c) == pytest.approx(coefficients, rel=1e-3, abs=1e-3)
    assert fit.residual < 1e-6
    assert fit.exponent == pytest.approx(exponent, abs=0.01)
    assert (fit.max_len, fit.max_rows) == (1024, 4)


def test_fit_residual_equals_the_largest_relative_error() -> None:
    measurements = polynomial(1000, 200, 0)
    bent = [*measurements[:-1], Measurement(rows=4, length=1024, peak_bytes=2 * measurements[-1].peak_bytes)]
    fit = fit_memory(bent)
    errors = [abs(fit.predict(m.rows, m.length) / m.peak_bytes - 1) for m in bent]
    assert fit.residual == pytest.approx(max(errors))
    assert fit.residual > 0.05


def test_fit_never_predicts_a_negative_workspace() -> None:
    falling = [Measurement(rows=1, length=length, peak_bytes=4096 - length) for length in (16, 64, 256)]
    fit = fit_memory(falling)
    assert min(fit.a, fit.b, fit.c) >= 0


def test_fit_refuses_too_few_lengths() -> None:
    with pytest.raises(ValueError, match=r"needs at least 3 different lengths; measured: \[16, 64\]"):
        fit_memory([Measurement(rows=1, length=length, peak_bytes=1) for length in (16, 64)])


def test_profile_measures_linear_growth_beside_an_eager_encoder_whose_memory_grows_with_the_square(
    own_bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_profile(str(own_bundle.path)) == 0
    memory = load_bundle(own_bundle.path).manifest.memory
    assert memory is not None
    assert set(memory.fits) == {"native-float32"}
    assert memory.fits["native-float32"].exponent == pytest.approx(1, abs=0.05)
    assert "1 threads, onnxruntime" in memory.machine
    output = capsys.readouterr()
    assert output.err == ""
    rows = [line.split() for line in output.out.splitlines()[2:-1]]
    assert [name for name, *_ in rows] == ["eager-float32"] * 3 + ["native-float32"] * 3
    *_, exponent, _, quadratic, _ = rows[0]
    assert float(exponent) > 1.8
    # One matrix [B, H, T, T] of float32, which softmax overwrites.
    assert float(quadratic) == pytest.approx(4 * own_bundle.manifest.model.num_heads, rel=0.01)
    plot = own_bundle.path.with_name("tiny.memory.png")
    assert str(plot) in output.out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_profile_predicts_the_workspace_of_another_run_and_the_one_that_the_server_measures(own_bundle: Bundle) -> None:
    assert run_profile(str(own_bundle.path), "--lengths", "64,128,256,512", "--rows", "1,3") == 0
    graphs, profiled = own_bundle.graph_set(), load_bundle(own_bundle.path)
    fit = profiled.memory_fit(graphs)
    assert fit is not None
    tolerance, workspace = fit.residual + 0.02, Workspace(is_own=True)
    encoder = Graph(own_bundle.file(graphs.encoder_file), "encoder", workspace)
    inputs = profile.encoder_inputs(profiled.manifest.model, graphs.cache, rows=2, length=200)
    assert profile.measure_peak(encoder, workspace, inputs) == pytest.approx(fit.predict(2, 200), rel=tolerance)
    report = NativeRunner(profiled, max_rows=4, threads=1).encode([[5] * 200] * 2, [range(13), range(13, 26)])
    assert report.predicted_fused_bytes is not None
    assert report.peak_workspace_bytes == pytest.approx(report.predicted_fused_bytes, rel=tolerance)


def test_fit_of_packed_graphs_has_no_quadratic_term() -> None:
    fit = fit_memory(polynomial(5000, 200, 3), packed=True)
    assert fit.c == 0
    assert fit.b > 200


@pytest.mark.combinations
def test_profile_of_a_random_model_measures_both_encoders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The native encoder's workspace follows its tokens, the eager one's their square."""
    plot = tmp_path / "plot.png"
    lengths = "128,256,512,1024"
    assert run_profile("--random", "tiny", "--lengths", lengths, "--plot", str(plot)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "-float32" in line]
    exponents = {name: float(exponent) for name, *_, exponent, _, _, _ in lines}
    assert set(exponents) == {"native-float32", "eager-float32"}
    assert exponents["native-float32"] == pytest.approx(1, abs=0.05)
    assert exponents["eager-float32"] > 1.8
    assert plot.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--random", "huge"], "--random: preset='huge' is unknown"),
        (["--random", "tiny", "--lengths", "1,x"], "--lengths is '1,x'"),
    ],
)
def test_profile_refuses_a_wrong_random_model_in_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert run_profile(*flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.combinations
def test_profile_omits_runs_that_exceed_memory(own_bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    grid = profile.Grid(lengths=(16, 32, 64, LONGEST), rows=(1,), threads=1, budget_bytes=1 << 20)
    measurements = profile.measure_bundle(own_bundle, grid)
    assert [m.length for m in measurements["native-float32"]] == [16, 32, 64, LONGEST]
    assert [m.length for m in measurements["eager-float32"]] == [16, 32, 64]
    assert "eager-float32: 1 x 512 tokens needs over 1 MiB; left out" in capsys.readouterr().err
    assert Workspace().stats().limit_bytes == 0


@pytest.mark.combinations
def test_profile_refuses_a_budget_that_is_too_small(bundle: Bundle) -> None:
    grid = profile.Grid(lengths=(16, 400, LONGEST), rows=(1,), threads=1, budget_bytes=1 << 20)
    with pytest.raises(profile.ProfileError, match="fewer than 3 fit in memory for eager-float32"):
        profile.measure_bundle(bundle, grid)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "16,x,64"], "--lengths is '16,x,64'; it must be whole numbers joined by commas"),
        (["--lengths", "16,32"], "--lengths has 2 different lengths; a fit needs 3"),
        (["--lengths", "16,32,513"], "--lengths has 513; the model supports sources of up to 512 tokens"),
        (["--rows", "0"], "--rows has 0; each must be at least 1"),
        (["--plot", "absent/plot.png"], "--plot is absent/plot.png, but there is no directory absent"),
    ],
)
def test_profile_refuses_wrong_options_in_one_line(
    own_bundle: Bundle, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert run_profile(str(own_bundle.path), *flags) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("antiphon profile: ")
    assert message in lines[0]


def test_profile_refuses_a_folder_that_is_not_a_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_profile(str(tmp_path)) == 2
    assert "is not a bundle: manifest.json is missing" in capsys.readouterr().err
