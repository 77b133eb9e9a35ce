"""Two network namespaces and a link between them with adjustable packet loss. Needs Linux and root.

The link consists of two TUN devices, one in each namespace. A thread of this process forwards packets between them and
drops some. This needs neither netem nor iptables, and one seed always gives the same losses.
"""

import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_MTU = 1500


def why_not() -> str | None:
    """Return the reason why this machine cannot have such a link, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    tried = subprocess.run(["ip", "netns", "add", _name("try")], capture_output=True, check=False)
    if tried.returncode != 0:
        return f"no network namespaces: {tried.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "delete", _name("try")], check=True)
    return None


class LossyLink:
    """Namespaces `near` and `far` with separate addresses; `loss` is the share of lost packets, 0 to 1."""

    def __init__(self, seed: int = 0) -> None:
        self.loss = 0.0
        self.num_carried = self.num_lost = 0
        self.near, self.far = _name("near"), _name("far")
        self.near_address, self.far_address = "10.213.0.1", "10.213.0.2"
        self._rng = random.Random(seed)
        self._ends: list[int] = []
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="lossy-link")

    def inside(self, namespace: str) -> tuple[str, ...]:
        """Return the command prefix that runs a command in one of the namespaces."""
        return ("ip", "netns", "exec", namespace)

    def __enter__(self) -> Self:
        pair = (self.near_address, self.far_address)
        for namespace, (own, other) in ((self.near, pair), (self.far, pair[::-1])):
            _ip("netns", "add", namespace)
            device = namespace.replace("-", "")[-15:]
            self._ends.append(_tun(device))
            _ip("link", "set", device, "netns", namespace)
            _ip("-n", namespace, "address", "add", own, "peer", other, "dev", device)
            for name in ("lo", device):
                _ip("-n", namespace, "link", "set", name, "up")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._stop)
        self._thread.join()
        for descriptor in (*self._ends, self._wake):
            os.close(descriptor)
        for namespace in (self.near, self.far):
            _ip("netns", "delete", namespace)

    def _carry(self) -> None:
        near, far = self._ends
        other = {near: far, far: near}
        while True:
            ready, _, _ = select.select([near, far, self._wake], [], [])
            if self._wake in ready:
                return
            for end in ready:
                packet = os.read(end, _MTU + 100)
                if self._rng.random() < self.loss:
                    self.num_lost += 1
                else:
                    self.num_carried += 1
                    os.write(other[end], packet)


def _name(what: str) -> str:
    return f"an{os.getpid()}-{what}"


def _tun(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI))
    return descriptor


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
