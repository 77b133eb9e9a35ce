"""Metrics of certificates and token files that are reloaded while the server runs."""

from __future__ import annotations

from typing import get_args

from prometheus_client import Gauge

from antiphon.observability.metrics import MetricFamilies
from antiphon.rpc.security.reload import Result


class FileMetrics:
    """Metrics of reloaded files. Thread-safe, because files are read from several threads."""

    def __init__(self, families: MetricFamilies) -> None:
        self._families = families
        self._expiry: Gauge | None = None
        for family in (families.tls_reloads, families.token_reloads):
            for result in get_args(Result):
                family.labels(result)

    def count_tls(self, result: Result) -> None:
        """Count a reload of certificates."""
        self._families.tls_reloads.labels(result).inc()

    def count_tokens(self, result: Result) -> None:
        """Count a reload of a token file."""
        self._families.token_reloads.labels(result).inc()

    def set_certificate_expiry(self, expires_s: float) -> None:
        """Report the expiry of the certificate in use, in Unix time."""
        if self._expiry is None:
            self._expiry = self._families.certificate_expiry()
        self._expiry.set(expires_s)
