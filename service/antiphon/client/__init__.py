"""Typed client of antiphon.v1, asynchronous and synchronous. Imports grpcio and protobuf only.

    with Client() as client:
        for delta in client.generate("How are you?"):
            print(delta.text, end="")

Sends texts and options, receives deltas, and raises ServerError for refusals. Users import
from here; docs/CLIENT.md has examples.
"""

from __future__ import annotations

from antiphon.client._async import AsyncClient
from antiphon.client._sync import Client
from antiphon.client.admin_client import AdminClient
from antiphon.client.analysis import (
    Classification,
    Detokenization,
    Embedding,
    FilledMasks,
    NextToken,
    Pooling,
    Stage,
    Tagging,
    Tokenization,
)
from antiphon.client.connection import DEFAULT_TARGET, Connection, LoadBalancing, RetryPolicy
from antiphon.client.messages import (
    Beam,
    BeamStep,
    Delta,
    FinishReason,
    Generation,
    Judgement,
    ServerError,
    Source,
    Timing,
    TokenLogprob,
    Usage,
)
from antiphon.client.options import EarlyStopping, Options, Priority

__all__ = [
    "DEFAULT_TARGET",
    "AdminClient",
    "AsyncClient",
    "Beam",
    "BeamStep",
    "Classification",
    "Client",
    "Connection",
    "Delta",
    "Detokenization",
    "EarlyStopping",
    "Embedding",
    "FilledMasks",
    "FinishReason",
    "Generation",
    "Judgement",
    "LoadBalancing",
    "NextToken",
    "Options",
    "Pooling",
    "Priority",
    "RetryPolicy",
    "ServerError",
    "Source",
    "Stage",
    "Tagging",
    "Timing",
    "TokenLogprob",
    "Tokenization",
    "Usage",
]
