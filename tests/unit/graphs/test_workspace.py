from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import gc
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import antiphon.ops
from antiphon.errors import WorkspaceError
from antiphon.ops.workspace import Workspace, _NativeStats

NATIVE = Path(antiphon.ops.__file__).parent / "native"
WIDTH, INNER = 32, 128


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    gc.collect()  # sessions of other tests are freed now or stay
    workspace = Workspace()
    yield workspace
    workspace.limit_growth(None)


def two_products() -> bytes:
    """Return the graph [b, WIDTH] -> [b, INNER] -> [b, WIDTH]; the inner array is its whole workspace."""
    generator = np.random.default_rng(0)
    weights = {"up": (WIDTH, INNER), "down": (INNER, WIDTH)}
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "up"], ["inner"]), helper.make_node("MatMul", ["inner", "down"], ["y"])],
        "two_products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", WIDTH])],
        [numpy_helper.from_array(generator.random(s, np.float32), name) for name, s in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return bytes(model.SerializeToString())


def session(workspace: Workspace | None) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if workspace:
        workspace.attach(options)
    return ort.InferenceSession(two_products(), options, providers=["CPUExecutionProvider"])


def ones(rows: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((rows, WIDTH), np.float32)}


def measured_peak(workspace: Workspace, run: Any, rows: int) -> int:
    """Return the peak of one run, whose output is discarded."""
    before = workspace.reset_peak()
    run.run(None, ones(rows))
    return workspace.peak() - before


@pytest.mark.parametrize("rows", [1, 7, 512])
def test_workspace_peak_equals_the_bytes_of_the_graphs_arrays(workspace: Workspace, rows: int) -> None:
    run = session(workspace)
    for _ in range(3):
        assert measured_peak(workspace, run, rows) == rows * (INNER + WIDTH) * 4


def test_workspace_counts_weights_in_use_but_not_in_the_peak_of_a_run(workspace: Workspace) -> None:
    before = workspace.stats().in_use_bytes
    first = session(workspace)
    weights = workspace.stats().in_use_bytes - before
    assert weights >= 2 * WIDTH * INNER * 4
    assert measured_peak(workspace, first, 2) == 2 * (INNER + WIDTH) * 4
    del first
    gc.collect()
    assert workspace.stats().in_use_bytes == before


def test_workspace_counts_only_attached_sessions(workspace: Workspace) -> None:
    before = workspace.stats().allocations
    session(None).run(None, ones(4))
    assert workspace.stats().allocations == before


def test_workspace_output_belongs_to_its_holder(workspace: Workspace) -> None:
    run = session(workspace)
    before = workspace.stats().in_use_bytes
    output = run.run(None, ones(4))
    assert workspace.stats().in_use_bytes - before == 4 * WIDTH * 4
    del output
    assert workspace.stats().in_use_bytes == before


def test_workspace_frees_memory_beyond_its_cache(workspace: Workspace) -> None:
    run = session(workspace)
    run.run(None, ones(1 << 18))  # 160 MiB
    stats = workspace.stats()
    assert stats.cached_bytes <= 64 << 20
    assert stats.reserved_bytes - stats.cached_bytes < 2 * stats.in_use_bytes + (1 << 20)
    workspace.trim()
    assert workspace.stats().cached_bytes == 0


def test_workspace_limit_fails_the_run_and_leaves_the_session_usable(workspace: Workspace) -> None:
    run = session(workspace)
    workspace.limit_growth(1 << 20)
    before = workspace.stats()
    with pytest.raises(Exception, match=r"MatMul.*workspace limit reached: 33554432 bytes asked"):
        run.run(None, ones(1 << 16))
    after = workspace.stats()
    assert after.in_use_bytes == before.in_use_bytes
    assert after.refusals == before.refusals + 1
    assert after.reserved_bytes <= before.limit_bytes
    assert run.run(None, ones(4))[0].shape == (4, WIDTH)
    workspace.limit_growth(None)
    assert run.run(None, ones(1 << 16))[0].shape == (1 << 16, WIDTH)


@contextlib.contextmanager
def using(workspace: Workspace) -> Iterator[None]:
    """Let the sessions of this thread allocate in a workspace."""
    previous = workspace.enter()
    try:
        yield
    finally:
        workspace.leave(previous)


def test_separate_workspaces_have_separate_counts_and_limits(workspace: Workspace) -> None:
    one, two = Workspace(is_own=True), Workspace(is_own=True)
    before = workspace.stats()
    with using(one):
        run = session(one)
    assert (workspace.stats(), two.stats().in_use_bytes) == (before, 0)
    assert one.stats().in_use_bytes >= 2 * WIDTH * INNER * 4
    one.limit_growth(1 << 20)
    with using(one), pytest.raises(Exception, match="workspace limit reached"):
        run.run(None, ones(1 << 16))
    with using(two):  # the workspace of the running thread counts
        assert run.run(None, ones(1 << 16))[0].shape == (1 << 16, WIDTH)
        assert two.stats().in_use_bytes == 0
    assert two.stats().peak_bytes == (1 << 16) * (INNER + WIDTH) * 4
    assert workspace.stats() == before


def test_separate_workspace_is_measured_while_others_run(workspace: Workspace) -> None:
    """Regression: a peak included all sessions of the process, so two concurrent models could not be measured."""
    rows: dict[int, list[int]] = {1: [], 300: []}

    def measure(num_rows: int) -> None:
        own = Workspace(is_own=True)
        with using(own):
            run = session(own)
            rows[num_rows] += [measured_peak(own, run, num_rows) for _ in range(200)]

    threads = [threading.Thread(target=measure, args=(num_rows,)) for num_rows in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {num_rows: set(peaks) for num_rows, peaks in rows.items()} == {
        num_rows: {num_rows * (INNER + WIDTH) * 4} for num_rows in rows
    }


def test_separate_workspace_frees_all_memory_when_it_is_deleted() -> None:
    own = Workspace(is_own=True)
    with using(own):
        session(own).run(None, ones(1 << 12))
    stats, handle = own._stats, own._handle
    native = _NativeStats()
    stats(handle, ctypes.byref(native))
    assert native.cached_bytes > 0
    gc.collect()
    del own
    stats(handle, ctypes.byref(native))
    assert (native.reserved_bytes, native.in_use_bytes) == (0, 0)


def test_threads_that_cannot_be_started_are_an_error() -> None:
    with pytest.raises(WorkspaceError, match=rf"{2**48} threads of a model could not be started"):
        Workspace(is_own=True, threads=2**48)


def test_workspace_names_a_library_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match=r"absent\.so cannot be used: .*install antiphon again"):
        Workspace(tmp_path / "absent.so")


def test_workspace_names_a_library_that_is_not_ours() -> None:
    other = ctypes.util.find_library("m")
    assert other
    with pytest.raises(WorkspaceError, match=r"cannot be used: its version is none"):
        Workspace(Path(other))


class OrtApiBase(ctypes.Structure):
    _fields_ = [
        ("get_api", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)),
        ("get_version_string", ctypes.CFUNCTYPE(ctypes.c_void_p)),
    ]


def test_workspace_library_refuses_an_onnx_runtime_without_its_interface(workspace: Workspace) -> None:
    messages = []

    def refuse(code: int, message: bytes) -> int:
        messages.append((code, message.decode()))
        return 0xBAD

    create_status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(refuse)
    # Every other slot is null, so a call of one would end the process.
    table = (ctypes.c_void_p * 400)(ctypes.cast(create_status, ctypes.c_void_p))
    version = ctypes.create_string_buffer(b"1.17.3")
    base = OrtApiBase()
    base.get_api = type(base.get_api)(lambda wanted: ctypes.addressof(table) if wanted <= 17 else None)
    base.get_version_string = type(base.get_version_string)(lambda: ctypes.addressof(version))
    register = ctypes.CDLL(str(workspace.library)).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, ctypes.byref(base)) == 0xBAD
    assert messages == [(1, "this build of Antiphon's native library needs ONNX Runtime 1.18 or newer, not 1.17.3")]


@pytest.mark.combinations
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
@pytest.mark.parametrize(
    ("source", "stress"),
    [("counting_allocator.cc", "allocator_stress.cc"), ("thread_pool.cc", "thread_pool_stress.cc")],
)
def test_allocator_and_threads_are_clean_under_sanitizers(
    tmp_path: Path, source: str, stress: str, sanitizers: str
) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "stress"
    sources = [NATIVE / source, Path(__file__).with_name(stress)]
    flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    built = subprocess.run([compiler, *flags, f"-I{NATIVE}", "-o", program, *sources], capture_output=True, text=True)
    if built.returncode and "cannot find" in built.stderr:
        pytest.skip(f"no sanitizer runtime: {built.stderr.strip()}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
