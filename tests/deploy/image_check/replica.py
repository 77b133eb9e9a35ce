"""Checks of one and two containers: contents, privileges, start, service and shutdown."""

import asyncio
import contextlib
import signal
import time
from pathlib import Path

from tests.deploy.image_check import starts, traffic
from tests.deploy.image_check.contents import compressed_bytes, contents_of, forbid, megabytes
from tests.deploy.image_check.given import Given, expect, share
from tests.deploy.image_check.podman import Container
from tests.integration.process import ServerProcess

# The delay is short, so that both phases of the shutdown occur: requests are served, then refused.
DRAINING = {"ANTIPHON_DRAIN_DELAY_S": "1", "ANTIPHON_DRAIN_GRACE_S": "30"}
_MORE_BYTES = 1 << 28


def check_contents(given: Given) -> None:
    contents = contents_of(given.podman, given.image)
    forbid(contents)
    facts = given.podman.inspect(given.image)
    config, compressed = facts["Config"], compressed_bytes(given.podman, given.image)
    print(f"{given.image}: {megabytes(facts['Size'])}, compressed {megabytes(compressed)}")
    print(f"user {config['User']}, {config['Entrypoint']} {config['Cmd']}, {config['StopSignal']}")
    for name, value in sorted(config["Labels"].items()):
        print(f"  {name}={value}")
    print(
        f"{len(contents.files)} files; no compiler, linker, pip, setuptools, torch, stub or cache; all bytecode there"
    )
    print(f"writable by others, setuid or setgid: {', '.join(contents.writable) or 'none'}")
    for part, size in contents.largest():
        print(f"  {megabytes(size):>10}  {part}")


def check_hardening(given: Given) -> None:
    with Container.start(given.podman, given.image, memory=given.memory, settings=given.settings) as container:
        container.ready_after_s()
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{container.pid}/status").read_text().splitlines()
            if ":\t" in line
        )
        for name, wanted in {
            "Uid": "10001",
            "Gid": "10001",
            "CapEff": "0" * 16,
            "NoNewPrivs": "1",
            "Seccomp": "2",
        }.items():
            expect(status[name].split()[0] == wanted, f"{name} is {status[name]!r}")
        refused = container.execute("sh", "-c", "touch /x /tmp/x /opt/antiphon/x /var/x; true").stderr
        expect(refused.count("Read-only file system") == 4, f"something can be written: {refused}")
        expect(container.health() == 0, "the image's health check fails")
        expect("telemetry" not in container.log, f"ONNX Runtime tries to report: {container.log}")
        changed = given.podman.run("diff", container.name)
        print("uid and gid 10001, no capability, no new privileges, seccomp filter, read-only root without any tmpfs")
        print(
            f"served and asked for its health; changed in its file system: {changed or 'nothing'} (podman's own hosts)"
        )


def check_starting(given: Given) -> None:
    compiled = starts.ready_after_s(given.podman, given.image, given.memory, {})
    plain = starts.ready_after_s(given.podman, given.image, given.memory, starts.NO_BYTECODE)
    print(f"ready after {compiled:.2f} s, without bytecode after {plain:.2f} s (best of 3)")
    print("SIGTERM to process 1, so many seconds after it began: seconds until it had ended")
    for title, options in (("image", ()), ("without its init", ("--entrypoint=antiphon",))):
        cells = []
        for moment_s in starts.MOMENTS_S:
            ended = starts.ends_after_s(given.podman, given.image, moment_s, options)
            cells.append(f"{moment_s:g}: {'ignored' if ended is None else f'{ended:.2f}'}")
            expect(ended is not None or options != (), f"SIGTERM after {moment_s} s is ignored")
        print(f"  {title:<17} {', '.join(cells)}")


def check_limit(given: Given) -> None:
    code, codes = f"bytearray({int(given.memory.removesuffix('b')) + _MORE_BYTES})", []
    for memory in (None, given.memory):
        options = ("--entrypoint=/opt/antiphon/bin/python",)
        with Container.start(given.podman, given.image, ("-c", code), memory=memory, options=options) as container:
            codes.append(container.exit_code())
    expect(codes == [0, 137], f"{code} without a limit, and in {given.memory}: exit codes {codes}")
    print(f"a process takes 256 MiB more: without a limit exit code 0, in a container of {given.memory} killed (137)")


def check_streams(given: Given) -> None:
    with Container.start(given.podman, given.image, memory=given.memory, settings=given.settings) as container:
        container.ready_after_s()
        target = f"{container.address}:50051"
        ready = container.memory()
        alone = asyncio.run(traffic.answers_alone(target))
        with ServerProcess(None) as server:
            expect(alone == asyncio.run(traffic.answers_alone(server.target)), "an answer is not that of the checkout")
        expect(asyncio.run(traffic.is_same_in_a_crowd(target, given.streams, alone)), "an answer in the crowd differs")
        memory = container.memory()
        print(f"{len(alone)} answers are those of the server of this checkout")
        print(f"{given.streams} streams at once, 5 times: every answer whole, and as it was alone")
        print(f"memory of the control group: peak {megabytes(ready.peak_bytes)} when ready, {share(memory)} after")
        expect((code := container.stop()) == 0, f"exit code {code}; {container.log}")


def check_leaving(given: Given) -> None:
    """Check that no call is lost after SIGTERM under load."""
    with contextlib.ExitStack() as stack:
        settings = {**given.settings, **DRAINING}
        leaver, other = (
            stack.enter_context(Container.start(given.podman, given.image, memory=given.memory, settings=settings))
            for _ in range(2)
        )
        for container in (leaver, other):
            container.ready_after_s()
        targets = [f"{container.address}:50051" for container in (leaver, other)]
        alone = asyncio.run(traffic.answers_alone(targets[0]))
        began_s = time.monotonic()

        async def leave() -> int:
            leaver.kill(signal.SIGTERM)
            return await asyncio.to_thread(leaver.exit_code)

        tally = asyncio.run(traffic.while_one_leaves(targets, given.streams, alone, leave))
        code, took_s = leaver.exit_code(), time.monotonic() - began_s
        peak = other.memory()
        print(f"two replicas, {given.streams} streams at once; one was stopped, and ended with exit code {code}")
        names = dict(zip(targets, ("the one that left", "the other"), strict=True))
        for target, name in names.items():
            refusals = ", ".join(f"{number} {key.split()[1]}" for key, number in tally.refused.items() if target in key)
            print(f"  {name}: {tally.answered[target]} answered whole and right, refused {refusals or 'none'}")
        print(f"  lost: {len(tally.lost)}; all in {took_s:.1f} s; peak of the other {megabytes(peak.peak_bytes)}")
        expect(not tally.lost, "; ".join(tally.lost[:5]))
        expect(code == 0, f"exit code {code}; {leaver.log}")
        expect((code := other.stop()) == 0, f"exit code {code}; {other.log}")
