"""The sections of `antiphon bench` by name, in the order they run. Each returns its findings and starts from nothing.

Runs of the two sides alternate and outputs are compared, so that neither a busy machine nor a wrong answer can pass
for speed.
"""

from __future__ import annotations

from collections.abc import Callable

from antiphon.service.tools.bench.beams import beams
from antiphon.service.tools.bench.decode import decode
from antiphon.service.tools.bench.encode import encode
from antiphon.service.tools.bench.memory import memory
from antiphon.service.tools.bench.poisson import poisson
from antiphon.service.tools.bench.report import Finding
from antiphon.service.tools.bench.sampling import sampling
from antiphon.service.tools.bench.served import engine, grpc_overhead, startup
from antiphon.service.tools.bench.setup import Setup

SECTIONS: dict[str, Callable[[Setup], list[Finding]]] = {
    "decode": decode,
    "beams": beams,
    "sampling": sampling,
    "encode": encode,
    "poisson": poisson,
    "memory": memory,
    "grpc_overhead": grpc_overhead,
    "engine": engine,
    "startup": startup,
}
