"""Top row: the state of the service in eight numbers."""

from __future__ import annotations

from deploy.dashboards.queries import of_model, of_process, quantile, rate, total
from deploy.dashboards.shapes import BAD, GOOD, WARNING, About, Panel, number

WIDTH, HEIGHT = 3, 4
# Reasons of refusals that are not a client's mistake, as in the rules of deploy/alerts.
FAULTS = "QUEUE_FULL|TOO_MANY_RPCS|TOO_MANY_TEXTS|ENGINE_FAULT|INTERNAL|LOADING|UNAVAILABLE"


def panels() -> list[Panel]:
    """Return the panels of replicas, their work and their latency."""
    return [*_work(), *_latency(), *_room()]


def _about(title: str, text: str, unit: str, runbook: str | None = None) -> About:
    return About(title=title, text=text, unit=unit, width=WIDTH, height=HEIGHT, runbook=runbook)


UP = _about(
    "Replicas up",
    "Replicas that Prometheus can scrape. Good: the number that you deployed.",
    "none",
    "AntiphonTargetDown",
)
ANSWERED = _about("Answered", "Requests answered in full, per second.", "reqps")
TOKENS = _about("Tokens", "Target tokens decoded per second, for all beams.", "short")
FAILED = _about(
    "Failed",
    "Share of valid requests that were refused or failed by the servers' fault. It uses up the error budget. "
    "Good: below 0.1 %.",
    "percentunit",
    "AntiphonAvailabilityBudgetFast",
)


def _work() -> list[Panel]:
    refused = total(rate(of_model("requests_refused_total", f'reason=~"{FAULTS}"')))
    lost = f"({total(rate(of_model('request_errors_total')))} + {refused})"
    asked = f"({total(rate(of_model('requests_submitted_total')))} + {refused})"
    done = total(rate(of_model("request_success_total")))
    return [
        number(UP, total(of_process("up")), [(0, BAD), (1, GOOD)]),
        number(ANSWERED, done, [(0, GOOD)], decimals=1),
        number(TOKENS, total(rate(of_model("generation_tokens_total"))), [(0, GOOD)]),
        # 0 / 0 is not a number: without requests the share must be 0.
        number(
            FAILED,
            f"{lost} / clamp_min({asked}, 1e-9)",
            _steps(0.001, 0.01),
            decimals=2,
        ),
    ]


FIRST = _about(
    "First token, p99", "From arrival to the first token. Good: below half a second.", "s", "AntiphonFirstTokenSlow"
)
BETWEEN = _about(
    "Between tokens, p99",
    "From one token to the next. Good: below 25 ms, which is faster than people read.",
    "s",
    "AntiphonInterTokenSlow",
)


def _latency() -> list[Panel]:
    return [
        number(FIRST, quantile(0.99, "time_to_first_token_seconds"), _steps(0.5, 2), decimals=1),
        number(
            BETWEEN,
            quantile(0.99, "inter_token_latency_seconds"),
            _steps(0.025, 0.1),
            decimals=1,
        ),
    ]


WAITING = _about(
    "Waiting, worst replica",
    "Requests in a replica's queue. Good: below 5; above 5, autoscaling adds replicas.",
    "none",
    "AntiphonQueueGrowing",
)
CACHE = _about(
    "Cache, fullest replica", "Share of cache blocks in use. Good: below 0.8.", "percentunit", "AntiphonCacheFull"
)


def _room() -> list[Panel]:
    return [
        number(WAITING, f"max({total(of_model('num_requests_waiting'), 'instance')})", _steps(5, 20)),
        number(CACHE, f"max({of_model('kv_cache_usage_ratio')})", _steps(0.8, 0.95)),
    ]


def _steps(warning: float, bad: float) -> list[tuple[float, str]]:
    return [(0, GOOD), (warning, WARNING), (bad, BAD)]
