"""Sessions of ONNX Runtime: the only place that opens them, and every setting of each kind.

serving_session: what the server runs, and what `antiphon profile` measures, so that its figures are the server's.
    Within `profiling` such sessions also write down the time of every node.
explain_session: attention weights of single calls; keeps nothing between runs.
plain_session, native_session: verification and tests; speed and memory do not matter.

Torch-free. Raises what ONNX Runtime raises: callers name the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from antiphon.model.bundle.exact_products import keep_products_exact
from antiphon.model.bundle.onnx_runtime import ort
from antiphon.model.ops.workspace import LIBRARY, Workspace

# Time for which a worker of the intra-op pool looks for work before it sleeps. Long enough for the nodes of one run to
# find it awake, too short for an idle server to notice: the pool's own default burns a core between two steps.
_SPIN_US = 50

# Not an argument of the runners, which open the sessions: only a benchmark asks for profiles.
_profile_prefix: ContextVar[Path | None] = ContextVar("profile_prefix", default=None)


@contextmanager
def profiling(prefix: Path) -> Iterator[None]:
    """Let each serving session opened inside write its nodes' times, when it closes, to a file named prefix*.json."""
    token = _profile_prefix.set(prefix)
    try:
        yield
    finally:
        _profile_prefix.reset(token)


def serving_session(path: Path, threads: int, workspace: Workspace) -> Any:
    """Open a graph whose runs and weights use a workspace; the calling thread must have entered it."""
    options = _options(threads)
    options.inter_op_num_threads = 1
    # A pattern is kept for every batch shape ever seen, and there are thousands; our allocator is as fast without.
    options.enable_mem_pattern = False
    # Each session has its own pool: a pool that sessions share cannot be made to stop spinning.
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
    keep_products_exact(options)
    if (prefix := _profile_prefix.get()) is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(prefix)
    workspace.attach(options)
    return _open(str(path), options)


def explain_session(path: Path, threads: int) -> Any:
    """Open an explain graph, which runs seldom and on sources of any length."""
    options = _options(threads)
    options.inter_op_num_threads = 1
    # Folding constants would unpack every weight when the session opens, and hold a second copy for good: for the
    # shipped model 730 ms and 12 MB instead of 86 ms (its first run included) and 3 MB. A run takes 45 ms more.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    # An arena would keep the score matrices of the longest call ever made.
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return _open(str(path), options)


def plain_session(path: Path, threads: int = 1) -> Any:
    """Open a contrib or eager graph."""
    options = _options(threads)
    keep_products_exact(options)
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
