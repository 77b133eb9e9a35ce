"""Sections of `antiphon bench` by name, in the order in which they run. Each section is independent of the others.

Runs of the two sides alternate, so that a busy machine slows both. Outputs are compared, so that a wrong answer does
not count as a fast one.
"""

from __future__ import annotations

from collections.abc import Callable

from antiphon.tools.bench.report import Finding
from antiphon.tools.bench.sections.beams import beams
from antiphon.tools.bench.sections.decode import decode
from antiphon.tools.bench.sections.encode import encode
from antiphon.tools.bench.sections.growth import growth
from antiphon.tools.bench.sections.host import host
from antiphon.tools.bench.sections.kernels import kernels
from antiphon.tools.bench.sections.memory import memory
from antiphon.tools.bench.sections.poisson import poisson
from antiphon.tools.bench.sections.sampling import sampling
from antiphon.tools.bench.sections.served import clients, engine, grpc_overhead, startup
from antiphon.tools.bench.sections.stages import stages
from antiphon.tools.bench.setup import Setup

SECTIONS: dict[str, Callable[[Setup], list[Finding]]] = {
    "decode": decode,
    "beams": beams,
    "sampling": sampling,
    "encode": encode,
    "poisson": poisson,
    "memory": memory,
    "grpc_overhead": grpc_overhead,
    "clients": clients,
    "stages": stages,
    "engine": engine,
    "growth": growth,
    "host": host,
    "startup": startup,
    "kernels": kernels,
}
