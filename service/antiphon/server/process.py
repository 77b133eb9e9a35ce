"""Server process of `antiphon serve`: opens the ports, loads bundles and serves. With workers, starts them."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

import grpc.aio
import uvloop
from prometheus_client import CollectorRegistry

from antiphon.domain.errors import OverBudget
from antiphon.engine.engine import interpreter_for_steps
from antiphon.observability.logging import configure_logging, is_log_behind
from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.background import is_anything_left
from antiphon.rpc.ports import PortError
from antiphon.rpc.reloading import FileMetrics, FileProblem
from antiphon.server.access import Access
from antiphon.server.admin import AdminServicer, admin_port
from antiphon.server.app import App, check_tracing, observing, shared_resources, within_files
from antiphon.server.lifecycle import EXIT_USER_ERROR, Stop, end_now
from antiphon.server.models.loading import SharedResources, StartupError
from antiphon.server.ports import BoundPorts, check_ports, listening_to_the_end, metrics_port, probe_port, ready_line
from antiphon.server.settings import ConfigError, ServerConfig
from antiphon.server.settings_sources import add_config_arguments, load_config, to_toml
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
        resources = shared_resources(config, registry)
        handler.report_drops(resources.families.log_lines_dropped.inc)
        access = Access(config, FileMetrics(resources.families))
        access.warn()
        with metrics_port(config, access, registry) as port, interpreter_for_steps():
            uvloop.run(_serve(config, access, resources, port))
    except (ConfigError, StartupError, OverBudget, PortError, FileProblem) as error:
        print(f"antiphon serve: {error}", file=sys.stderr)
    # These cannot be interrupted: a model being loaded, an engine that hangs, a log line that is not read.
    if is_anything_left() or is_log_behind():
        end_now(EXIT_USER_ERROR)
    return EXIT_USER_ERROR


async def _serve(config: ServerConfig, access: Access, resources: SharedResources, metrics: int) -> NoReturn:
    """Serve, then end the process. metrics: port of the metrics."""
    async with observing(config, resources.families) as telemetry:
        # Keeps a reference, because a server without one stops. It refuses calls until the process ends.
        code, _server = await _serve_calls(config, access, resources, telemetry, metrics)
    end_now(code)


async def _serve_calls(
    config: ServerConfig, access: Access, resources: SharedResources, telemetry: Telemetry, metrics: int
) -> tuple[int, grpc.aio.Server]:
    """Serve. Return the exit code and the server, whose port is still open."""
    stop = Stop()
    stop.on_signals()
    app = await App.build(config, access, resources, telemetry)
    # The port opens first: early clients receive a status that tells them to retry, which a closed port could not send.
    async with (
        probe_port(config, app.health) as probe,
        listening_to_the_end(app.server, config.host, config.port, access.port_certificates()) as port,
    ):
        models = await app.load(stop)
        if models is None:
            return 0, app.server
        await app.probes.ready()
        servicer = AdminServicer(app.control, resources.budget, config)
        async with admin_port(config, access, servicer, telemetry, app.waits) as admin, app.watching():
            # The last step of a start: a client that reads this line finds all metrics at once.
            print(
                ready_line(config, models, BoundPorts(port=port, metrics=metrics, admin=admin, probe=probe)), flush=True
            )
            return await app.until_stopped(stop), app.server
