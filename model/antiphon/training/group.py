"""Process group that trains one model: the processes of torchrun, or a single process."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rank, size and device of this process in its group; without torchrun a group of one."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls) -> Group:
        """Join the group of torchrun's environment variables, or a group of one without them."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        cuda = torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if size > 1:
            torch.distributed.init_process_group("nccl" if cuda else "gloo")
        return cls(rank=int(os.environ.get("RANK", "0")), size=size, device=device)

    @property
    def computes_bf16(self) -> bool:
        """True if the device multiplies bfloat16 matrices in hardware. Without it they take longer than in float32."""
        if self.device.type == "cuda":
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
        found = torch.cpu.get_capabilities()
        return found["architecture"] != "x86_64" or bool(found["avx512_bf16"] or found["amx_bf16"])

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor over the group, in place, and return it."""
        if self.size > 1:
            torch.distributed.all_reduce(value)
        return value

    def wait(self) -> None:
        """Wait until all processes of the group have called this method."""
        if self.size > 1:
            torch.distributed.barrier()
