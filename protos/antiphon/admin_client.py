"""`AdminClient` by the name that earlier versions had for its module."""

from __future__ import annotations

from antiphon.client.admin_client import AdminClient

__all__ = ["AdminClient"]
