"""The processes that train one model together, under torchrun or alone."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The processes of one torchrun; alone, a group of one."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls) -> Group:
        """Join the group that torchrun's environment describes, if any."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        cuda = torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if size > 1:
            torch.distributed.init_process_group("nccl" if cuda else "gloo")
        return cls(rank=int(os.environ.get("RANK", "0")), size=size, device=device)

    def sum(self, value: Tensor) -> Tensor:
        """Sum over the group, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(value)
        return value

    def wait(self) -> None:
        """Return when every process is here."""
        if self.size > 1:
            torch.distributed.barrier()
