"""Load on a running Antiphon server with Locust: a number of users who each wait for their answers.

    locust -f deploy/load/locustfile.py --host 127.0.0.1:50051 --headless --users 50 --spawn-rate 10 --run-time 60s

The report has two rows: Generate, the whole answer, and TTFT, its first token. Locust is a closed loop: users wait for
a slow server, so the rate falls, and the percentiles miss the requests that would have arrived meanwhile.
`antiphon load` is an open loop; docs/LOAD.md describes both.
"""

from __future__ import annotations

import random
import time

import grpc.experimental.gevent as grpc_gevent
from locust import User, between, task

from antiphon.client import DEFAULT_TARGET, Client, Connection, Options, RetryPolicy, ServerError
from antiphon.load.workload import EVERYDAY

grpc_gevent.init_gevent()

TIMEOUT_S = 30.0
OPTIONS = Options(max_new_tokens=64)


class Reader(User):
    """User who sends a request, reads the answer, and sends the next request."""

    host = DEFAULT_TARGET
    wait_time = between(0.1, 1.0)

    def on_start(self) -> None:
        """Connect, without retries, so that every refusal is counted."""
        assert self.host is not None
        self._client = Client(self.host, connection=Connection(retry=RetryPolicy(attempts=1)))

    def on_stop(self) -> None:
        """Close the connection."""
        self._client.close()

    @task
    def generate(self) -> None:
        """Stream the answer to one everyday sentence."""
        start_s, length, error = time.perf_counter(), 0, None
        try:
            deltas = self._client.generate(random.choice(EVERYDAY), OPTIONS, timeout_s=TIMEOUT_S)
            for index, delta in enumerate(deltas):
                if index == 0:
                    self._report("TTFT", start_s)
                length += len(delta.text)
        except ServerError as caught:
            error = caught
        self._report("Generate", start_s, length, error)

    def _report(self, name: str, start_s: float, length: int = 0, error: ServerError | None = None) -> None:
        """Report a duration to Locust, in milliseconds."""
        self.environment.events.request.fire(
            request_type="gRPC",
            name=name,
            response_time=1e3 * (time.perf_counter() - start_s),
            response_length=length,
            exception=error,
            context={},
        )
