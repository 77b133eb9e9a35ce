"""Where accounts of calls go, by the settings: the log, and a collector of spans where there is one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from antiphon.service.access_log import access_logs
from antiphon.service.config import ConfigError, ServerConfig
from antiphon.service.metric_families import MetricFamilies
from antiphon.service.telemetry import Telemetry
from antiphon.service.trace_context import Sampler

# For spans that a collector takes slowly while the server leaves.
_FLUSH_S = 3.0


def check_tracing(config: ServerConfig) -> None:
    """Raise ConfigError where spans are asked for and what sends them is not installed."""
    if config.otlp_endpoint is None:
        return
    try:
        import antiphon.service.spans  # noqa: F401 - is there, and what it imports
    except ImportError as error:
        missing = f"otlp_endpoint is {config.otlp_endpoint!r}, and {error.name} is not installed"
        raise ConfigError(f"{missing}: pip install 'antiphon[trace]'") from None


@contextlib.asynccontextmanager
async def observing(config: ServerConfig, families: MetricFamilies) -> AsyncIterator[Telemetry]:
    """The accounts of a server; on leaving, spans not sent yet are sent, within seconds."""
    logs = access_logs(config.access_log)
    if config.otlp_endpoint is None:
        yield Telemetry(families, *logs)
        return
    from antiphon.service.spans import open_spans  # without the setting, opentelemetry is never imported

    spans = open_spans(config.otlp_endpoint, families)
    try:
        yield Telemetry(families, *logs, spans, sampler=Sampler(config.trace_sample_ratio))
    finally:
        await asyncio.to_thread(spans.close, _FLUSH_S)
