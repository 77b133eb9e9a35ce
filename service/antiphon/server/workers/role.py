"""Settings and place of a new worker, as its supervisor passes them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from antiphon.server.settings import ServerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """Place of one worker.

    index: from 0. num_workers: of the server. cores: to run on; empty for any. opens_early: its port opens before its
    models are loaded, so that early clients are told to try again; that of a worker which takes the place of another
    opens when it can serve, because other workers can.
    """

    index: int
    num_workers: int
    cores: tuple[int, ...]
    opens_early: bool

    @property
    def place(self) -> str:
        """Index and number of workers, as clients receive them."""
        return f"{self.index}/{self.num_workers}"

    def to_json(self, config: ServerConfig) -> bytes:
        """Return the role and the settings as JSON."""
        return json.dumps({"role": asdict(self), "config": config.model_dump(mode="json")}).encode()

    @classmethod
    def of_json(cls, text: bytes) -> tuple[Self, ServerConfig]:
        """Return the role and the settings from JSON."""
        given = json.loads(text)
        role = given["role"] | {"cores": tuple(given["role"]["cores"])}
        return cls(**role), ServerConfig(**given["config"])
