"""`make play`: runs a server and the page of `antiphon play` over it, on loopback.

    .venv/bin/python -m deploy.laptop.play [--page-port N] [SERVE OPTIONS]

Unknown options are passed to `antiphon serve`. Ctrl-C ends both, first the page, then the server, which drains.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from deploy.laptop.watch import STOPPED_BY, CannotRun, heard_ready, start, stopped_in_reverse, wait_for_end


def main() -> int:
    """Run until Ctrl-C or until one of the programs ends; return exit code 0 or 1."""
    parser = argparse.ArgumentParser(prog="make play", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page-port", default="8050", metavar="N", help="port of the page (default: %(default)s)")
    options, serve = parser.parse_known_args()
    stop = threading.Event()
    for number in STOPPED_BY:
        signal.signal(number, lambda *_: stop.set())
    try:
        return _play(options.page_port, serve, stop)
    except CannotRun as error:
        print(f"play: {error}", file=sys.stderr)
        return 1


def _play(page_port: str, serve: Sequence[str], stop: threading.Event) -> int:
    antiphon = [sys.executable, "-m", "antiphon.cli"]
    children: dict[str, subprocess.Popen[str]] = {}
    with stopped_in_reverse(children):
        # The admin service says which request holds which cache block. The page asks often, so only errors are logged.
        # A later option of the same name replaces these.
        defaults = ["--admin-port", "0", "--access-log", "errors"]
        children["server"] = start([*antiphon, "serve", *defaults, *serve], is_heard=True)
        ready = heard_ready(children["server"])
        addresses = ["--target", ready["target"], "--metrics-url", f"http://{ready['metrics']}/metrics"]
        if ready["admin"] is not None:
            addresses += ["--admin-target", ready["admin"]]
        children["page"] = start([*antiphon, "play", "--port", page_port, *addresses])
        return wait_for_end(children, stop)


if __name__ == "__main__":
    sys.exit(main())
