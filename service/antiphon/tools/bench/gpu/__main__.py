"""Measures an NVIDIA GPU within a given time: `make card`. Writes one JSON file a part, the most valuable part first.

    python -m antiphon.tools.bench.gpu [--folder runs/card] [--budget-s 540] [--part NAME ...] [--again]

Each part runs in a process of its own, so that a crash or a hang costs that part only. A part starts only while as much
time is left as it is likely to take, and is ended when it takes much longer. The same command continues: parts that are
done are skipped, failed ones are tried again. Needs a card, compiled kernels and onnxruntime-gpu, and torch to make the
random models; what else a part lacks, it writes as {"missing": reason}.

Exit status: 0 all parts are done, 1 a part failed, 2 there is no usable GPU or an argument is wrong, 3 no time was left
for some parts.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from antiphon.ops.cuda.driver import describe
from antiphon.runtime.cuda.open_device import DeviceError, open_device
from antiphon.server.machine import usable_cores
from antiphon.tools.bench.gpu.decoding import SHAPES, shape_of
from antiphon.tools.bench.gpu.parts import PARTS, Part, Parts, Plan
from antiphon.tools.bench.gpu.reports import Report, read_report

EXIT_FAILED, EXIT_NO_DEVICE, EXIT_NO_TIME = 1, 2, 3
_NAMES = [part.name for part in PARTS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    args = _parser().parse_args(words)
    if args.child:
        return _measure_here(args, words)
    try:
        open_device("cuda")
        args.folder.mkdir(parents=True, exist_ok=True)
    except (DeviceError, OSError) as error:
        print(f"card: {error}", file=sys.stderr)
        return EXIT_NO_DEVICE
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the parts that run
    return Run(args, words).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/card"), help="where to write the figures")
    parser.add_argument("--work", type=Path, help="folder that keeps the random models (default: FOLDER/work)")
    parser.add_argument("--part", nargs="+", choices=_NAMES, default=_NAMES, help="default: all, in this order")
    parser.add_argument("--again", action="store_true", help="measure parts again that are done")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds for all parts (default: %(default)s)")
    parser.add_argument(
        "--patience", type=float, default=2.0,
        help="a part is ended after this many times its estimated seconds (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--shape", choices=SHAPES, default="bart-large", help="of the random model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--served-rows", type=int, nargs="+", default=[128, 256])
    parser.add_argument(
        "--sources",
        type=int,
        nargs="+",
        default=[350, 64, 512, 1024],
        help="lengths in tokens, as far as the shape has them",
    )
    parser.add_argument("--steps", type=int, default=128, help="tokens that each row decodes")
    parser.add_argument("--copy-bytes", type=int, default=1 << 30, help="of a copy that measures the bandwidth")
    parser.add_argument("--recipe", default="tatoeba-en-de", help="recipe of the part `training`")
    parser.add_argument("--data", type=Path, help="folder of its data (default: $ANTIPHON_DATA)")
    parser.add_argument("--training-steps", type=int, default=300)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # measures a part in this process
    return parser


class Run:
    """Processes of the parts, within the time of the whole run. words: the arguments of the command."""

    def __init__(self, args: argparse.Namespace, words: Sequence[str]) -> None:
        self._args = args
        self._words = words
        budget_s: float = args.budget_s
        self._end_s = time.monotonic() + budget_s
        self._failed: list[str] = []

    def run(self) -> int:
        """Run the parts that are not done; return the exit status."""
        beside: PartProcess | None = None
        too_late = []
        for part in self._pending():
            if part.needs_model and beside is not None:
                self._finish(beside)
                beside = None
            if self._left_s() < part.estimate_s:
                too_late.append(part.name)
                continue
            process = PartProcess(part, self._args, self._words, self._limit_s(part))
            if part.runs_beside:
                beside = process
                continue
            try:
                self._finish(process)
            except BaseException:
                if beside is not None:
                    beside.kill()
                raise
        if beside is not None:
            self._finish(beside)
        if too_late:
            print(f"card: no time left for {', '.join(too_late)}; the same command continues", file=sys.stderr)
        if self._failed:
            return EXIT_FAILED
        return EXIT_NO_TIME if too_late else 0

    def _pending(self) -> list[Part]:
        return [
            part
            for part in PARTS
            if part.name in self._args.part and (self._args.again or not _is_done(self._args.folder, part))
        ]

    def _left_s(self) -> float:
        return self._end_s - time.monotonic()

    def _limit_s(self, part: Part) -> float:
        patience: float = self._args.patience
        return min(self._left_s(), patience * part.estimate_s)

    def _finish(self, process: PartProcess) -> None:
        if not process.finish():
            self._failed.append(process.part.name)


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _is_done(folder: Path, part: Part) -> bool:
    report = read_report(_path(folder, part.name))
    return report is not None and report.status == "done"


class PartProcess:
    """Running process of a part, which leads a group of processes: servers and clients belong to it."""

    def __init__(self, part: Part, args: argparse.Namespace, words: Sequence[str], limit_s: float) -> None:
        self.part = part
        self._path = _path(args.folder, part.name)
        with suppress(OSError):  # the process fails to write it too
            self._path.unlink()
        self._limit_s = limit_s
        self._end_s = time.monotonic() + limit_s
        # The last --part counts.
        module = ("-m", "antiphon.tools.bench.gpu")
        self._command = (sys.executable, *module, *words, "--part", part.name, "--child")
        print(f"card: {part.name}, at most {limit_s:.0f} s", file=sys.stderr)
        self._process = subprocess.Popen(self._command, start_new_session=True, env=_environment())

    def finish(self) -> bool:
        """Wait for the end, or end the part when its time is over; return True if its figures are complete."""
        reason = None
        try:
            self._process.wait(max(0.0, self._end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            reason = f"ended after {self._limit_s:.0f} s, its time"
        finally:
            self.kill()
        if reason is None and self._process.returncode == 0:
            print(self._path)
            return True
        self._mark_failed(reason or f"the process ended with status {self._process.returncode}")
        return False

    def kill(self) -> None:
        """End all processes of the group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _mark_failed(self, reason: str) -> None:
        """Write why the part failed into its report, unless the report has an error of its own."""
        report = read_report(self._path)
        if report is None:  # the process did not come so far as to write it
            report = _report(self.part.name, shlex.join(self._command))
        if report.status != "failed":
            report.status, report.error = "failed", reason
            try:
                report.write(self._path)
            except OSError as error:
                print(f"card: {error}", file=sys.stderr)
        print(f"card: {self.part.name} failed: {report.error}", file=sys.stderr)


def _environment() -> dict[str, str]:
    """Return this process's environment, with CUDA's libraries of Python packages where ONNX Runtime finds them."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    folders = [str(folder) for root in roots for folder in sorted(Path(root).glob("*/lib"))]
    paths = [*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return os.environ | ({"LD_LIBRARY_PATH": os.pathsep.join(paths)} if paths else {})


def _measure_here(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure one part in this process, and write its figures as they come."""
    data = args.data or (Path(os.environ["ANTIPHON_DATA"]) if "ANTIPHON_DATA" in os.environ else None)
    longest = shape_of(args.shape).max_source_len
    source_lens = list(dict.fromkeys(min(length, longest) for length in args.sources))
    plan = Plan(
        shape=args.shape, rows=args.rows, served_rows=args.served_rows, source_lens=source_lens, num_steps=args.steps,
        copy_bytes=args.copy_bytes, work=args.work or args.folder / "work", recipe=args.recipe, data=data,
        training_steps=args.training_steps,
    )  # fmt: skip
    (name,) = args.part
    device = open_device("cuda")
    assert device is not None
    report = _report(name, shlex.join((sys.executable, "-m", "antiphon.tools.bench.gpu", *words)))
    report.measure(_path(args.folder, name), Parts(device, plan).part(name))
    return 0


def _report(name: str, command: str) -> Report:
    description = describe()
    return Report(
        part=name, device=description.name, driver=description.driver_version, cores=usable_cores(), command=command
    )


if __name__ == "__main__":
    sys.exit(main())
