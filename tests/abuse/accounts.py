"""Calls that the server's metrics counted between two scrapes, compared with the sent calls."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

_HANDLED = re.compile(r"antiphon_grpc_server_handled_total\{code=(?P<code>\w+),method=(?P<method>[^}]+)\}")
_IN_FLIGHT = "antiphon_grpc_server_in_flight"
# A client can retry a call that ended with one of these statuses, and counts it once.
_RETRIED = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Calls of one method. least, most: bounds of the number that the server counted, without retries."""

    least: int
    most: int


def handled(metrics: Mapping[str, float]) -> dict[str, Counter[str]]:
    """Return the number of ended calls by method and code."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, value in metrics.items():
        if match := _HANDLED.fullmatch(name):
            found[match["method"]][match["code"]] = int(value)
    return found


def in_flight(metrics: Mapping[str, float]) -> int:
    return int(metrics[_IN_FLIGHT])


def growth(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Counter[str]]:
    """Return the number of calls that ended between two scrapes, by method and code, for every method with a name.

    Names in parentheses collect several methods and are omitted.
    """
    then, now = handled(before), handled(after)
    return {method: codes - then.get(method, Counter()) for method, codes in now.items() if not method.startswith("(")}


def complaints(grown: Mapping[str, Counter[str]], expected: Mapping[str, Expected]) -> list[str]:
    """Return a message for every method of which the metrics counted too few or too many calls."""
    found = []
    for method, codes in grown.items():
        bounds = expected[method]
        retried = sum(codes[code] for code in _RETRIED)
        if not bounds.least <= codes.total() <= bounds.most + retried:
            found.append(
                f"{method}: {codes.total()} calls counted ({dict(codes)}), {bounds.least} to {bounds.most} were sent"
            )
    return found
