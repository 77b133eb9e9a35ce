"""Settings shared by all tests."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import os
import signal
import sys
import sysconfig
from pathlib import Path
from typing import Any

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
    """Keep what a test process would otherwise do again for each test."""
    gc.freeze()  # the garbage collector need not look at all modules and tests each time
    if "torch" in sys.modules and importlib.util.find_spec("onnxscript"):
        _read_translations_once()  # most unit tests export nothing, and need not wait for these imports


def _read_translations_once() -> None:
    """Let every export of this process use the tables that the first one makes: two thirds of a small model's export.

    PyTorch reads the signatures of its 500 translations to ONNX from their source, and collects its operators that are
    made of others.
    """
    import torch._export.utils as operators
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    read, collect = functools.cache(ONNXRegistry.from_torchlib), operators._collect_all_valid_cia_ops_for_namespace

    def copied(*arguments: Any, **options: Any) -> ONNXRegistry:
        registry = copy.copy(read(*arguments, **options))
        registry.functions = {name: list(translations) for name, translations in registry.functions.items()}
        return registry

    setattr(ONNXRegistry, "from_torchlib", staticmethod(copied))  # noqa: B010 mypy refuses a method in an assignment
    operators._collect_all_valid_cia_ops_for_namespace = functools.cache(collect)
