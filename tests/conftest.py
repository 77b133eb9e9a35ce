"""Settings shared by all tests."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The kernels for GPUs are tested in an environment of their own, which has Triton: `make test-cuda`.
collect_ignore = [] if importlib.util.find_spec("triton") else ["cuda"]

# No test fails because of the time that an example takes, since the machine can be busy.
settings.register_profile("antiphon", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("antiphon")

# A shell starts background processes with SIGINT ignored, and their children inherit this. Tests interrupt programs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# PyTorch's threads of several test processes would wait for each other on the same cores, and waiting uses the core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On processors of other makers than Intel, CTranslate2 uses oneDNN. Without AVX-512 VNNI its int8 products saturate at
# 16 bits, which makes it useless as a reference. The products of MKL do not, but take ten times as long there.
if "avx512_vnni" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
    os.environ.setdefault("CT2_USE_MKL", "1")


def pytest_sessionstart() -> None:
    """Stop if a compiled module of the engine is older than its source, which would then not be tested."""
    engine = Path(__file__).parent.parent / "service" / "antiphon" / "engine"
    for compiled in engine.rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"):
        source = compiled.with_name(compiled.name.split(".")[0] + ".py")
        if not source.exists() or source.stat().st_mtime > compiled.stat().st_mtime:
            pytest.exit(f"{compiled.relative_to(engine.parent.parent)} is older than its source: make stubs", 2)


def pytest_collection_finish() -> None:
    """Let a test process read the signatures of PyTorch's 500 translations to ONNX once.

    Every export reads them from their source, a third of the time that a small model takes. They do not change.
    """
    if "torch" not in sys.modules or not importlib.util.find_spec("onnxscript"):
        return  # most unit tests export nothing, and need not wait for these imports
    from onnxscript.values import TracedOnnxFunction

    read_signature = vars(TracedOnnxFunction)["function_ir"].fget
    once = property(functools.cache(read_signature))
    setattr(TracedOnnxFunction, "function_ir", once)  # noqa: B010 mypy refuses a property in an assignment
