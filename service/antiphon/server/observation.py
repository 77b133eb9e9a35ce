"""Sinks of finished calls, from the settings: the access log and a collector of spans."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from antiphon.observability.access_log import AccessLog
from antiphon.observability.metrics import MetricFamilies
from antiphon.observability.telemetry import Telemetry
from antiphon.observability.trace_context import Sampler
from antiphon.server.settings import ConfigError, ServerConfig

if TYPE_CHECKING:
    from antiphon.observability.tracing import Spans

# Time for a slow reader of the log, or a slow collector, at shutdown.
_FLUSH_S = 3.0


def check_tracing(config: ServerConfig) -> None:
    """Raise ConfigError if spans are configured and the packages that send them are not installed."""
    if config.otlp_endpoint is None:
        return
    try:
        import antiphon.observability.tracing  # noqa: F401 - checks that it and its imports are installed
    except ImportError as error:
        missing = f"otlp_endpoint is {config.otlp_endpoint!r}, and {error.name} is not installed"
        raise ConfigError(f"{missing}: pip install 'antiphon[trace]'") from None


@contextlib.asynccontextmanager
async def observing(config: ServerConfig, families: MetricFamilies) -> AsyncIterator[Telemetry]:
    """Yield the telemetry of a server. On exit, write and send what is pending, within seconds."""
    sinks: list[AccessLog | Spans] = []
    sampler = None
    if config.access_log != "none":
        sinks.append(AccessLog(families, is_for_all=config.access_log == "all"))
    if config.otlp_endpoint is not None:
        # Without the setting, opentelemetry is never imported.
        from antiphon.observability.tracing import open_spans

        sinks.append(open_spans(config.otlp_endpoint, families))
        sampler = Sampler(config.trace_sample_ratio)
    try:
        yield Telemetry(families, *sinks, sampler=sampler)
    finally:
        await asyncio.gather(*(asyncio.to_thread(sink.close, _FLUSH_S) for sink in sinks))
