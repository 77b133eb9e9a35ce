"""The device of the section simulated_device, and the section itself; never their speed."""

import time
from dataclasses import asdict
from pathlib import Path

import pytest

from antiphon.bundle.manifest import load_bundle
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.tools.bench.corpus import everyday
from antiphon.tools.bench.setup import Setup
from antiphon.tools.bench.simulated_device import WAYS, divided_cores, fronts_of, simulated_device
from antiphon.tools.bench.waiting_device import ENCODE_US, LAUNCH_US, STEP_MS, StepTimes, WaitingDevice, difference


def test_work_ends_in_the_order_of_its_launches() -> None:
    device = WaitingDevice()
    first, second = device.event(), device.event()
    started_s = time.perf_counter()
    device.launch(0.02)
    first.record()
    device.launch(0.03)
    second.record()
    first.wait()
    assert time.perf_counter() - started_s >= 0.02
    second.wait()
    device.wait()
    assert time.perf_counter() - started_s >= 0.05
    assert device.times.busy_s == pytest.approx(0.05)
    assert device.times.launch_s >= 2 * LAUNCH_US / 1e6
    assert 0 <= device.times.waiting_s <= 0.05
    assert device.times.late_s >= 0
    device.sleep_until(started_s)  # has passed
    before = StepTimes(**asdict(device.times))
    device.stepped()
    assert difference(device.times, before).steps == 1


def test_memory_of_the_device_keeps_what_is_copied() -> None:
    device = WaitingDevice()
    there, back, memory = device.allocate_pinned(16), device.allocate_pinned(16), device.allocate(16)
    there.array[:] = range(16)
    device.copy_in(memory.address, there.address, 16)
    there.array[:] = 0
    device.copy_out(back.address, memory.address, 16)
    assert back.array.tolist() == [*range(16)]


def test_server_and_client_share_no_core_where_there_are_two() -> None:
    ours, theirs = divided_cores()
    assert ours
    assert theirs
    assert len(ours | theirs) < 2 or not ours & theirs


@pytest.mark.combinations
def test_tokens_and_parts_of_a_step_are_measured_for_every_way(tmp_path: Path) -> None:
    setup = Setup(bundle=load_bundle(SHIPPED_BUNDLE), corpus=everyday(), work=tmp_path, rows=(2,), threads=1, repeat=1)
    findings = simulated_device(setup)
    cases = [finding.case for finding in findings if finding.unit == "tokens/s"]
    alone = ["runner, one batch after another", "engine", *(f"2 rows, {way}" for way in WAYS.values())]
    with_fronts = [
        f"2 rows, {way}, {count} front{'s' if count > 1 else ''}"
        for count in fronts_of(divided_cores()[1])
        for way in WAYS.values()
    ]
    assert cases == [*alone, *with_fronts]
    for case in with_fronts:
        cpu = [finding.antiphon for finding in findings if finding.case.startswith(f"{case}, CPU of")]
        assert len(cpu) == 3
        assert min(cpu) > 0
    for case in alone:
        parts = {
            finding.case.removeprefix(f"{case}, "): finding.antiphon
            for finding in findings
            if finding.unit == "us a step" and finding.case.startswith(f"{case}, ")
        }
        # Two sources of 350 tokens for 128 steps of two rows.
        assert parts["device at work"] >= 1e3 * STEP_MS[1]
        assert parts["device at work"] <= 1e3 * STEP_MS[32] + 350 * ENCODE_US
        assert parts["all"] >= parts["engine: launches"] + parts["engine: waits for the device"] > 0
        # All work is waited for, but for a step ahead of the last one.
        assert parts["device at work"] <= 1.05 * parts["all"]
        assert parts["engine: its own CPU"] > 0
        if case.startswith("2 rows"):
            assert min(parts["CPU of event loop"], parts["CPU of client"]) > 0
