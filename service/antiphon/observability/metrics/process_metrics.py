"""Metrics of the process: the standard families of the Prometheus client, and the versions of this build."""

from __future__ import annotations

import platform
from importlib import metadata

from prometheus_client import CollectorRegistry, GCCollector, Info, PlatformCollector, ProcessCollector

from antiphon.observability.metrics.model_families import PREFIX

_PACKAGES = {"version": "antiphon", "onnxruntime": "onnxruntime", "grpcio": "grpcio", "protobuf": "protobuf"}


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Register resident memory, CPU time, open files, Python's garbage collector, and the versions of this build."""
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    build = Info(f"{PREFIX}build", "Versions of this server and its main packages; always 1.", registry=registry)
    build.info({name: _version(package) for name, package in _PACKAGES.items()} | {"python": platform.python_version()})


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a checkout that is not installed, or ONNX Runtime for GPUs
        return "unknown"
