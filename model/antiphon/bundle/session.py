"""Sessions of ONNX Runtime and all their settings. Only this module opens sessions.

serving_session: for the server and for `antiphon profile`, whose figures therefore apply to the server. In the context
    `profiling` these sessions also record the time of every node.
cuda_session: for the server on an NVIDIA GPU.
seldom_session: for attention weights and positions of single calls; it keeps no memory between runs.
native_session: for verification and tests, where speed and memory do not matter.

Torch-free. Errors of ONNX Runtime are raised unchanged: callers add the file's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from antiphon.bundle.onnx_runtime import ort
from antiphon.ops.workspace import LIBRARY, Workspace

# Not an argument of the runners, which open the sessions, because only a benchmark needs profiles.
_profile_prefix: ContextVar[Path | None] = ContextVar("profile_prefix", default=None)


@contextmanager
def profiling(prefix: Path) -> Iterator[None]:
    """Make each serving session of this context write the times of its nodes to prefix*.json when it closes."""
    token = _profile_prefix.set(prefix)
    try:
        yield
    finally:
        _profile_prefix.reset(token)


def serving_session(path: Path, workspace: Workspace) -> Any:
    """Open a graph whose runs and weights use a workspace; the calling thread must have entered the workspace."""
    options = _options(workspace.session_threads)
    options.inter_op_num_threads = 1
    # ONNX Runtime would keep a pattern for every batch shape, and there are thousands. Our allocator is as fast
    # without.
    options.enable_mem_pattern = False
    if (prefix := _profile_prefix.get()) is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(prefix)
    workspace.attach(options)
    return _open(str(path), options)


def cuda_session(path: Path, stream: int, *, ordinal: int, captures: bool, memory_limit_bytes: int | None) -> Any:
    """Open a cuda graph whose runs use a stream of a device; a node that no GPU can run is an error.

    captures: runs with a graph id are captured once as a CUDA graph, then replayed. memory_limit_bytes: for weights and
    workspace together. The operators for GPUs must be loaded (ops/cuda/driver.py).
    """
    options = _options(threads=1)
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.register_custom_ops_library(str(LIBRARY))
    device = {
        "device_id": str(ordinal),
        "user_compute_stream": str(stream),
        "enable_cuda_graph": "1" if captures else "0",
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "0",  # ONNX Runtime's default is 1: 10 bits of the mantissa, in a graph that says float32
    }
    if memory_limit_bytes is not None:
        device["gpu_mem_limit"] = str(memory_limit_bytes)
    return ort.InferenceSession(str(path), options, providers=[("CUDAExecutionProvider", device)])


def seldom_session(path: Path, threads: int) -> Any:
    """Open an explain graph, which runs seldom and on sources of any length, or the tables of positions."""
    options = _options(threads)
    options.inter_op_num_threads = 1
    # Constant folding would unpack every weight when the session opens, and keep a second copy: for the shipped model
    # 730 ms and 12 MB instead of 86 ms (with the first run) and 3 MB. Without folding a run takes 45 ms more.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    # An arena would keep the score matrices of the longest call so far.
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return _open(str(path), options)


def native_session(model: Path | bytes, threads: int = 1, library: Path = LIBRARY) -> Any:
    """Open a native graph, a file or serialised, with this project's operators from a library."""
    options = _options(threads)
    Workspace(library).attach(options)
    return _open(model if isinstance(model, bytes) else str(model), options)


def _options(threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # every failure is raised, and the log is ours
    return options


def _open(model: str | bytes, options: Any) -> Any:
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
