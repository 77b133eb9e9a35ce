"""Memory of the server now: caches, workspace by length, queue, and the requests that hold cache blocks."""

from __future__ import annotations

from antiphon.client import ServerError
from antiphon.play.metrics import NoMetrics, fetch, read
from antiphon.play.model_server import ModelServer
from antiphon.play.problems import problem
from antiphon.play.serve_json import Json


async def memory(server: ModelServer) -> Json:
    """Return metrics and holders of blocks; where one of them cannot be had, the reason stands in its place."""
    answer: Json = {"metrics": None, "metrics_problem": None, "caches": None, "caches_problem": None}
    try:
        answer["metrics"] = read(await fetch(server.addresses.metrics_url, server.metrics_context))
    except NoMetrics as error:
        answer["metrics_problem"] = str(error)
    try:
        caches = await server.caches()
    except ServerError as error:
        answer["caches_problem"] = problem(error)["message"]
        return answer
    if caches is not None:
        answer["caches"] = [
            {
                "model": cache.model,
                "worker": cache.worker,
                "num_blocks": cache.num_blocks,
                "holders": [
                    {
                        "request": holder.request_number,
                        "source_blocks": list(holder.source_blocks),
                        "target_blocks": list(holder.target_blocks),
                    }
                    for holder in cache.holders
                ],
            }
            for cache in caches
        ]
    return answer
