import argparse
import asyncio
import json
import math
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.architecture.config import LinearScaling, preset
from antiphon.bundle.manifest import load_bundle, write_manifest
from antiphon.load.workload import EVERYDAY
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.text.tokenizer import Tokenizer, byte_bpe_format
from antiphon.tools.bench import command
from antiphon.tools.bench import kernels as section
from antiphon.tools.bench.child_servers import HANDLERS, StageTimes
from antiphon.tools.bench.command import SECTIONS
from antiphon.tools.bench.corpus import everyday, held_out, read_corpus, repeat, tokenize
from antiphon.tools.bench.ctranslate2 import (
    CTranslate2Settings,
    decode_candidates,
    encode_candidates,
    layouts,
    obstacle,
)
from antiphon.tools.bench.host import HostTime, NullRunner, measure, split
from antiphon.tools.bench.kernel_runs import KERNELS, PORTABLE, active_kernels
from antiphon.tools.bench.node_profile import summary
from antiphon.tools.bench.poisson import Batcher, BatcherConfig, offer
from antiphon.tools.bench.report import (
    BenchError,
    BenchFailure,
    Case,
    Finding,
    Speed,
    alternate,
    compare,
    plot_growth,
    share_equal,
    table,
    to_json,
)
from antiphon.tools.bench.setup import Setup
from antiphon.tools.bench.static import translate_static
from antiphon.tools.bench.throughput import divisions
from antiphon.tools.offline import Offline
from tests.fakes import EOS_ID, FakeRunner, source_of
from tests.serving import tiny_tokenizer


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(flags))


def speed(tokens_per_s: int, cpu_share: float | None = None) -> Speed:
    return Speed(num_tokens=tokens_per_s * 2, seconds=2.0, cpu_s=None if cpu_share is None else 2.0 * cpu_share)


BESIDE_CTRANSLATE2 = Case(
    name="decode", case="sentences", rows=32, against="CTranslate2", is_ctranslate2=True, equal_outputs=0.5
)
OURS = Case(name="engine", case="sentences", rows=32, against="static batches")


def test_compare_takes_medians_of_rates_and_of_the_ratios_of_pairs() -> None:
    pairs = [(speed(100), speed(50)), (speed(90), speed(100)), (speed(400), speed(100))]
    (finding,) = compare(BESIDE_CTRANSLATE2, pairs)
    assert (finding.antiphon, finding.ctranslate2, finding.ratio, finding.unit) == (100.0, 100.0, 2.0, "tokens/s")
    assert finding.baseline is None


def test_compare_calls_the_baseline_ctranslate2_only_when_it_is() -> None:
    (finding,) = compare(OURS, [(speed(100), speed(50))])
    assert (finding.ctranslate2, finding.baseline, finding.equal_outputs) == (None, 50.0, None)


def test_compare_adds_cpu_seconds_when_both_sides_measured_them() -> None:
    assert [(f.unit, f.ratio) for f in compare(OURS, [(speed(100, 0.5), speed(100, 1.0))])] == [
        ("tokens/s", 1.0),
        ("tokens/CPU s", 2.0),
    ]
    assert len(compare(OURS, [(speed(100), speed(100, 1.0))])) == 1


def test_ratio_is_absent_when_the_baseline_measured_nothing() -> None:
    assert BESIDE_CTRANSLATE2.finding([(5.0, 0.0), (6.0, 0.0)], "requests/s").ratio is None


def test_share_equal_counts_whole_targets() -> None:
    assert share_equal([[1, 2], [3], [], [4]], [[1, 2], [3, 4], [], [5]]) == 0.5


def test_table_aligns_columns_and_omits_absent_values() -> None:
    findings = [
        Finding(name="engine", case="sentences", rows=32, antiphon=12345.6, baseline=50.0, ratio=1.5, unit="tokens/s"),
        Finding(name="startup", case="until ready", rows=64, antiphon=0.75, unit="s"),
        BESIDE_CTRANSLATE2.finding([(200.0, 100.0)], "tokens/s"),
    ]
    lines = table(findings).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["engine", "sentences", "32", "12,346", "50.00", "1.50", "tokens/s"],
        ["startup", "until", "ready", "64", "0.75", "s"],
        ["decode", "sentences", "32", "200", "100", "2.00", "tokens/s", "50%", "CTranslate2"],
    ]
    assert lines[0].index("unit") == lines[1].index("tokens/s") == lines[2].rindex("s")


def test_json_contains_machine_commit_command_and_every_finding() -> None:
    findings = [
        Finding(name="startup", case="until ready", rows=64, antiphon=0.75, unit="s"),
        BESIDE_CTRANSLATE2.finding([(200.0, 100.0)], "tokens/s"),
    ]
    described = json.loads(to_json(findings, 3, "antiphon bench --section startup"))
    assert described.keys() == {"date", "machine", "commit", "command", "sections"}
    assert "3 threads" in described["machine"]
    assert described["command"] == "antiphon bench --section startup"
    alone, compared = described["sections"]
    wanted = {"name", "rows", "antiphon", "ctranslate2", "ratio", "unit"}
    assert wanted <= alone.keys() == compared.keys()
    assert (alone["name"], alone["antiphon"], alone["ctranslate2"], alone["ratio"]) == ("startup", 0.75, None, None)
    assert (compared["ctranslate2"], compared["ratio"], compared["equal_outputs"]) == (100.0, 2.0, 0.5)


def test_texts_are_repeated_up_to_the_requested_number() -> None:
    corpus = everyday()
    assert sorted(repeat(corpus.texts, 2 * len(EVERYDAY))) == sorted(EVERYDAY * 2)
    assert repeat(corpus.texts, 3) == list(corpus.texts[:3])
    assert sorted(repeat(corpus.texts, None)) == sorted(EVERYDAY)


def test_corpus_keeps_references_beside_sources_and_skips_blank_lines(tmp_path: Path) -> None:
    source, reference = tmp_path / "lines.en", tmp_path / "lines.de"
    source.write_text("One.\n\n  \nTwo.\nThree.\n", encoding="utf-8")
    reference.write_text("Eins.\nx\ny\nZwei.\nDrei.\n", encoding="utf-8")
    corpus = read_corpus(source, reference)
    assert corpus.references is not None
    pairs = dict(zip(corpus.texts, corpus.references, strict=True))
    assert pairs == {"One.": "Eins.", "Two.": "Zwei.", "Three.": "Drei."}
    assert read_corpus(source, None).references is None


def test_corpus_refuses_references_when_their_number_differs(tmp_path: Path) -> None:
    source, reference = tmp_path / "lines.en", tmp_path / "lines.de"
    source.write_text("One.\nTwo.\n", encoding="utf-8")
    reference.write_text("Eins.\n", encoding="utf-8")
    with pytest.raises(BenchError, match=r"--reference .*has 1 lines"):
        read_corpus(source, reference)


def test_held_out_names_the_missing_part_of_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"--recipe nothing: .*tatoeba-en-de"):
        held_out("nothing", tmp_path)
    with pytest.raises(BenchError, match=r"--recipe tatoeba-en-de: .*pairs\.en-de\.tsv\.gz is missing"):
        held_out("tatoeba-en-de", tmp_path)


def test_tokenize_names_the_text_that_is_too_long() -> None:
    tokenizer = tiny_tokenizer()
    text = byte_bpe_format(tokenizer)
    assert tokenize(["the cat"], tokenizer, text, 64) == [[*tokenizer.encode("the cat"), tokenizer.eos_id]]
    with pytest.raises(BenchError, match=r"--source: 'the mat on the mat'.*at most 4"):
        tokenize(["the cat", "the mat on the mat"], tokenizer, text, 4)


def test_alternate_changes_which_side_runs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.tools.bench.report.SETTLE_S", 0.0)
    order: list[str] = []

    def run(side: str) -> str:
        order.append(side)
        return side

    assert alternate(lambda: run("ours"), lambda: run("theirs"), 3) == [("ours", "theirs")] * 3
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]


async def test_offer_measures_waits_from_the_scheduled_time_and_gives_up_at_its_limit() -> None:
    asked: list[int] = []

    async def ask(index: int) -> float:
        asked.append(index)
        if index == 1:
            await asyncio.Event().wait()
        return time.perf_counter()

    waits = await offer(ask, [0.0, 0.001, 0.002], patience_s=0.05)
    assert sorted(asked) == [0, 1, 2]
    assert 0 <= waits.first_s[0] <= waits.last_s[0]
    assert waits.first_s[1] == waits.last_s[1] >= 0.05


class Machine:
    """Doubles numbers after it was opened; stores its batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.reached = asyncio.Event()
        self.opened = threading.Event()
        self._loop = asyncio.get_running_loop()

    def run(self, batch: Sequence[int]) -> list[int]:
        self.batches.append(list(batch))
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self.opened.wait(60)
        return [2 * item for item in batch]


async def test_batcher_collects_requests_that_arrive_within_its_window() -> None:
    machine = Machine()
    machine.opened.set()
    async with Batcher(machine.run, BatcherConfig(workers=1, max_batch=8, window_s=0.05)) as batcher:
        assert await asyncio.gather(*map(batcher.ask, range(5))) == [0, 2, 4, 6, 8]
    assert machine.batches == [[0, 1, 2, 3, 4]]


async def test_batcher_sends_a_full_batch_without_waiting() -> None:
    machine = Machine()
    machine.opened.set()
    async with Batcher(machine.run, BatcherConfig(workers=1, max_batch=2, window_s=3600)) as batcher:
        assert await asyncio.gather(*map(batcher.ask, range(4))) == [0, 2, 4, 6]
    assert machine.batches == [[0, 1], [2, 3]]


async def test_batcher_lets_batches_grow_while_every_worker_is_busy() -> None:
    machine = Machine()
    async with Batcher(machine.run, BatcherConfig(workers=1, max_batch=8, window_s=0.0)) as batcher:
        first = asyncio.create_task(batcher.ask(0))
        await machine.reached.wait()
        later = [asyncio.create_task(batcher.ask(item)) for item in (1, 2, 3)]
        later[1].cancel()
        await asyncio.sleep(0)
        machine.opened.set()
        assert [await first, await later[0], await later[2]] == [0, 2, 6]
    assert machine.batches == [[0], [1, 3]]


async def test_batcher_reports_a_fault_to_every_request_of_its_batch() -> None:
    def fail(batch: Sequence[int]) -> list[int]:
        raise BenchFailure("broken")

    async with Batcher(fail, BatcherConfig(workers=2, max_batch=8, window_s=0.0)) as batcher:
        for _ in range(3):  # more faults than workers, so each worker must be free again
            with pytest.raises(BenchFailure, match="broken"):
                await batcher.ask(1)


def test_ctranslate2_candidates_have_every_layout_of_the_same_threads() -> None:
    assert layouts(4) == [(4, 1), (2, 2), (1, 4)]
    tried = decode_candidates(8, 2, mean_len=6.0)
    assert {(held.workers, held.threads, held.max_batch_size) for held in tried if held.batch_type == "examples"} == {
        (2, 1, 4),
        (2, 1, 8),
        (1, 2, 8),
    }
    assert {held.max_batch_size for held in tried if held.batch_type == "tokens"} == {24, 48}
    assert not any(held.batch_type == "tokens" for held in decode_candidates(8, 2, mean_len=None))


def test_ctranslate2_candidates_have_batches_of_one_source_when_rows_is_one() -> None:
    assert decode_candidates(1, 2, mean_len=6.0) == [
        CTranslate2Settings(workers=2, threads=1, max_batch_size=1, is_lone=True),
        CTranslate2Settings(workers=1, threads=2, max_batch_size=1, is_lone=True),
    ]


def test_ctranslate2_candidates_include_small_batches_when_encoding() -> None:
    tried = encode_candidates(4, 1, [5, 20, 7, 9])
    assert [held.max_batch_size for held in tried if held.batch_type == "examples"] == [4, 2, 1]
    assert [held.max_batch_size for held in tried if held.batch_type == "tokens"] == [40, 20]


def test_profile_sums_node_runs_by_operator() -> None:
    nodes = [("A", 30), ("B", 60), ("A", 10)]
    events = [
        {"cat": "Node", "name": f"node{index}_kernel_time", "dur": spent, "args": {"op_name": op_type}}
        for index, (op_type, spent) in enumerate(nodes)
    ]
    others = [{"cat": "Session", "name": "model_run", "dur": 120}, {"cat": "Node", "name": "fence", "dur": 5}]
    lines = [line.split() for line in summary([*events, *others]).splitlines()[1:]]
    assert lines[:2] == [["B", "1", "60", "60.0%"], ["A", "2", "40", "40.0%"]]
    assert lines[2][-4:] == ["1", "100", "of", "120"]


@given(
    shapes=st.lists(st.tuples(st.integers(0, 20), st.integers(2, 6)), min_size=1, max_size=30),
    rows=st.integers(1, 8),
    max_new_tokens=st.integers(1, 16),
)
def test_static_batches_and_the_engine_give_the_outputs_of_each_source_alone(
    shapes: list[tuple[int, int]], rows: int, max_new_tokens: int
) -> None:
    runner = FakeRunner()
    sources = [
        list(source_of(target_len=target, length=length, variant=i)) for i, (target, length) in enumerate(shapes)
    ]
    expected = []
    for source in sources:
        tokens, _ = runner.answer(source, max_new_tokens)
        expected.append(tokens if len(tokens) == max_new_tokens else [*tokens, EOS_ID])
    for is_sorted in (False, True):
        batches = translate_static(runner, sources, rows=rows, max_new_tokens=max_new_tokens, is_sorted=is_sorted)
        assert batches == expected
    with Offline(FakeRunner(), rows=rows) as offline:
        for concurrency in (1, 2 * rows):
            answers = offline.translate(sources, concurrency=concurrency, max_new_tokens=max_new_tokens)
            assert answers == expected
        endless = offline.translate(sources, concurrency=2, max_new_tokens=max_new_tokens, ignore_eos=True)
        assert [len(target) for target in endless] == [max_new_tokens] * len(sources)
        assert EOS_ID not in {token for target in endless for token in target}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--source", "missing.txt"], "--source missing.txt"),
        (["--reference", "x.de"], "--source"),
        (["--recipe", "nothing"], "--recipe nothing"),
        (["--recipe", "tatoeba-en-de", "--source", "x.en"], "give one of them"),
        (["--json", "missing/x.json"], "--json missing/x.json"),
        (["--profile", "missing/x.txt"], "--profile missing/x.txt"),
        (["--plot", "x.png", "--section", "startup"], "--plot"),
        (["--section", "decode", "--model", "bundle", "--checkpoint", "missing"], "--checkpoint missing"),
        (["missing-bundle"], "missing-bundle"),
    ],
)
def test_command_names_the_argument_that_it_cannot_use(
    flags: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*flags) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("antiphon bench: ")
    assert named in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_command_names_the_field_of_a_bundle_that_ctranslate2_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, with_checkpoint: bool
) -> None:
    folder = tmp_path / "linear-biases"
    shutil.copytree(SHIPPED_BUNDLE, folder)
    shipped = load_bundle(folder).manifest
    biased = shipped.model.model_copy(update={"positions": "alibi"})
    write_manifest(folder, shipped.model_copy(update={"model": biased}))
    (folder / "model.safetensors").touch()
    flags = ("--checkpoint", str(folder)) if with_checkpoint else ()
    assert run(str(folder), "--section", "encode", "decode", "--model", "bundle", "--threads", "1", *flags) == 0
    written = capsys.readouterr()
    message = (
        "antiphon bench: en-de is not compared with CTranslate2: positions='alibi' cannot be converted to CTranslate2; "
        "'sinusoidal' and 'learned' and 't5_relative' and 'rope' can"
    )
    assert written.err.splitlines() == ["antiphon bench: encode", message, "antiphon bench: decode"]
    assert written.out == ""


def test_every_architecture_but_encoder_decoders_is_an_obstacle_to_ctranslate2() -> None:
    assert obstacle(preset("tiny")) is None
    decoder = preset("tiny", architecture="decoder", encoder_layers=0)
    assert obstacle(decoder) == "architecture='decoder' cannot be converted to CTranslate2; 'encoder-decoder' can"


def test_scaled_rotary_positions_are_an_obstacle_to_ctranslate2() -> None:
    rotary = preset("tiny", positions="rope")
    assert obstacle(rotary) is None
    scaled = rotary.model_copy(update={"rope_scaling": LinearScaling(factor=2.0)})
    assert obstacle(scaled) == "rope_scaling cannot be converted to CTranslate2"


@pytest.mark.parametrize(("field", "value"), [("post_norms", True), ("attention_cap", 50.0), ("output_cap", 30.0)])
def test_parts_of_gemma_are_an_obstacle_to_ctranslate2(field: str, value: object) -> None:
    config = preset("tiny", norm_placement="pre", **{field: value})
    assert obstacle(config) == f"{field}={value} cannot be converted to CTranslate2"


def test_command_refuses_an_empty_file_of_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("\n", encoding="utf-8")
    assert run("--source", str(path)) == 2
    assert "holds no sentence" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--rows", "0"],
        ["--repeat", "x"],
        ["--section", "nothing"],
        ["--seconds", "0"],
        ["--preset", "huge"],
        ["--model", "other"],
    ],
)
def test_command_refuses_flags_out_of_range(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*flags)
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("beam_width", [1, 3])
def test_runner_that_computes_nothing_gives_targets_of_one_length(beam_width: int) -> None:
    runner = NullRunner(max_rows=6, target_len=5)
    with Offline(runner, rows=6) as offline:
        targets = offline.translate([[4, 2]] * 9, concurrency=9, max_new_tokens=20, beam_width=beam_width)
    assert {len(target) for target in targets} == {5}


@pytest.mark.parametrize("beam_width", [1, 4])
def test_host_time_counts_requests_and_at_least_the_steps_that_full_rows_need(beam_width: int) -> None:
    measured = measure(rows=8, beam_width=beam_width, target_len=6)
    assert measured.num_requests * beam_width == 8 * 32
    assert measured.num_steps >= measured.num_requests * beam_width * 6 / 8
    assert measured.engine_s > 0
    assert measured.loop_s > 0


def test_host_time_is_split_into_requests_and_steps() -> None:
    short = HostTime(num_requests=10, num_steps=20, engine_s=10 * 5e-6 + 20 * 3e-6, loop_s=0.0)
    long = HostTime(num_requests=10, num_steps=70, engine_s=10 * 5e-6 + 70 * 3e-6, loop_s=0.0)
    assert split(short, long) == pytest.approx((5.0, 3.0))


@pytest.mark.parametrize(
    ("threads", "expected"),
    [
        (1, [(1, 1)]),
        (2, [(1, 1), (1, 2), (2, 2)]),
        (6, [(1, 1), (1, 2), (2, 2), (1, 4), (2, 4), (4, 4), (1, 6), (2, 6), (6, 6)]),
    ],
)
def test_growth_measures_every_division_of_powers_of_two(threads: int, expected: list[tuple[int, int]]) -> None:
    assert divisions(threads) == expected


def test_plot_of_growth_has_a_line_for_each_case(tmp_path: Path) -> None:
    findings = [
        Finding(name="growth", case=case, rows=rows, antiphon=100.0 * rows, unit="tokens/s")
        for case in ("1 x 1 threads", "2 x 1 threads")
        for rows in (1, 8)
    ]
    plot_growth(tmp_path / "growth.png", findings, "a machine")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(section, "LEAST_S", 1e-6)
    monkeypatch.setattr(section, "TIMES", 1)
    return Setup(bundle=load_bundle(SHIPPED_BUNDLE), corpus=everyday(), work=tmp_path, rows=(1, 3), threads=1, repeat=1)


@pytest.mark.parametrize("kernels", [KERNELS, (PORTABLE,)], ids=["fastest", PORTABLE])
def test_section_reports_a_rate_for_every_kernel(
    setup: Setup, kernels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == (PORTABLE,):
        monkeypatch.setattr(section, "active_kernels", lambda: PORTABLE)
    findings = SECTIONS["kernels"](setup)
    rates = [finding for finding in findings if finding.unit == "G multiply-adds/s"]
    assert [(rate.case, rate.rows) for rate in rates] == [(one.case, one.rows) for one in section.kernels_of((1, 3))]
    assert len({(rate.case, rate.rows) for rate in rates}) == len(rates) == 2 * 2 * (2 * 4 + 1 + 5)
    has_bare = kernels != (PORTABLE,) and active_kernels() != PORTABLE
    for finding in findings:
        assert finding.name == "kernels"
        assert math.isfinite(finding.antiphon)
        assert finding.antiphon > 0
    for rate in rates:
        assert (rate.baseline is not None) == (rate.ratio is not None) == has_bare
        assert not has_bare or (rate.baseline or 0) > 0
        assert not has_bare or (rate.ratio or 0) > 0


def test_one_row_of_a_product_is_compared_with_reading_its_weight(setup: Setup) -> None:
    findings = [finding for finding in SECTIONS["kernels"](setup) if finding.unit == "GB/s of weights"]
    assert [finding.case for finding in findings] == [
        kernel.case for kernel in section.kernels_of((1,)) if kernel.weight_bytes is not None
    ]
    assert {finding.rows for finding in findings} == {1}
    assert all((finding.baseline or 0) > 0 and (finding.ratio or 0) > 0 for finding in findings)


SPENT_S = 0.02


def spend() -> None:
    end_s = time.thread_time() + SPENT_S
    while time.thread_time() < end_s:
        pass


def test_time_of_an_inner_stage_is_not_counted_for_the_outer_one() -> None:
    times = StageTimes()
    with times.within(HANDLERS):
        spend()
        with times.within("tokenising"):
            spend()
            spend()
    assert SPENT_S <= times.seconds[HANDLERS] < 2 * SPENT_S <= times.seconds["tokenising"]
    assert times.thread_s() >= 3 * SPENT_S


def test_methods_are_measured_in_this_thread_until_the_context_is_left() -> None:
    encode, times, tokenizer = Tokenizer.encode, StageTimes(), tiny_tokenizer()
    with times.measuring():
        thread = threading.Thread(target=tokenizer.encode, args=("the cat",))
        thread.start()
        thread.join()
        assert times.seconds["tokenising"] == 0
        for _ in range(1000):  # more than a tick of any clock
            assert tokenizer.encode("the cat") == encode(tokenizer, "the cat")
        assert times.seconds["tokenising"] > 0
    assert Tokenizer.encode is encode


async def test_handlers_of_a_server_are_measured_without_the_stages_in_them() -> None:
    times, tokenizer = StageTimes(), tiny_tokenizer()

    async def answer(request: bytes, context: Any) -> bytes:
        spend()
        return str(tokenizer.encode(request.decode())).encode()

    methods: dict[str, Any] = {"Encode": grpc.unary_unary_rpc_method_handler(answer)}
    with times.measuring():
        server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary("/test.Service/Encode")
        with times.measuring():
            answers = [await call(b"the cat") for _ in range(2)]
    await server.stop(None)
    assert answers == [str(tokenizer.encode("the cat")).encode()] * 2
    assert times.seconds[HANDLERS] >= 2 * SPENT_S
    assert times.seconds["tokenising"] < SPENT_S
