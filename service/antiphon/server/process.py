"""Server process of `antiphon serve`: opens the ports, loads bundles and serves. With workers, starts them.

Owns start-up. `parts.py` owns what answers calls, `side_ports.py` the other ports, and `lifecycle.py` the shutdown.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

import grpc.aio
import uvloop
from prometheus_client import CollectorRegistry

from antiphon.domain.errors import OverBudget
from antiphon.engine.interpreter import interpreter_for_steps
from antiphon.observability.logs.formats import configure_logging
from antiphon.observability.logs.log_handler import is_log_behind
from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.background import is_anything_left
from antiphon.rpc.ports import PortError
from antiphon.rpc.reloading import FileMetrics, FileProblem
from antiphon.server.access import Access
from antiphon.server.admin import AdminServicer
from antiphon.server.lifecycle import EXIT_USER_ERROR, Stop, end_now
from antiphon.server.listener import listening_to_the_end
from antiphon.server.models.loading import Shared, StartupError
from antiphon.server.observation import check_tracing, observing
from antiphon.server.parts import Parts, shared_parts, within_files
from antiphon.server.ready_line import Ports, ready_line
from antiphon.server.settings import ConfigError, ServerConfig, add_config_arguments, load_config, to_toml
from antiphon.server.side_ports import admin_port, check_ports, metrics_port, probe_port
from antiphon.server.workers.division import divide
from antiphon.server.workers.process import run_workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon serve`."""
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until asked to stop, then end the process: with 0 once drained, 1 for an engine that is lost or hangs.

    Returns 2 for a wrong setting, bundle or port.
    """
    try:
        config = load_config(arguments)
        if arguments.print_config:
            sys.stdout.write(to_toml(config))
            return 0
        handler = configure_logging(config.log_level, config.log_format)
        check_tracing(config)
        check_ports(config)
        if len(divisions := divide(config)) > 1:
            return run_workers(config, divisions, handler)
        config = within_files(config)
        registry = CollectorRegistry()
        shared = shared_parts(config, registry)
        handler.report_drops(shared.families.log_lines_dropped.inc)
        access = Access(config, FileMetrics(shared.families))
        access.warn()
        with metrics_port(config, access, registry) as port, interpreter_for_steps():
            uvloop.run(_serve(config, access, shared, port))
    except (ConfigError, StartupError, OverBudget, PortError, FileProblem) as error:
        print(f"antiphon serve: {error}", file=sys.stderr)
    # These cannot be interrupted: a model being loaded, an engine that hangs, a log line that is not read.
    if is_anything_left() or is_log_behind():
        end_now(EXIT_USER_ERROR)
    return EXIT_USER_ERROR


async def _serve(config: ServerConfig, access: Access, shared: Shared, metrics: int) -> NoReturn:
    """Serve, then end the process. metrics: port of the metrics."""
    async with observing(config, shared.families) as telemetry:
        # Keeps a reference, because a server without one stops. It refuses calls until the process ends.
        code, _server = await _serve_calls(config, access, shared, telemetry, metrics)
    end_now(code)


async def _serve_calls(
    config: ServerConfig, access: Access, shared: Shared, telemetry: Telemetry, metrics: int
) -> tuple[int, grpc.aio.Server]:
    """Serve. Return the exit code and the server, whose port is still open."""
    stop = Stop()
    stop.on_signals()
    parts = await Parts.assemble(config, access, shared, telemetry)
    # The port opens first: early clients receive a status that tells them to retry, which a closed port could not send.
    async with (
        probe_port(config, parts.health) as probe,
        listening_to_the_end(parts.server, config.host, config.port, access.port_certificates()) as port,
    ):
        served = await parts.load(stop)
        if served is None:
            return 0, parts.server
        await parts.probes.ready()
        servicer = AdminServicer(parts.control, shared.budget, config)
        async with admin_port(config, access, servicer, telemetry, parts.waits) as admin, parts.monitored():
            # The last step of a start: a client that reads this line finds all metrics at once.
            print(ready_line(config, served, Ports(port=port, metrics=metrics, admin=admin, probe=probe)), flush=True)
            return await parts.until_stopped(stop), parts.server
