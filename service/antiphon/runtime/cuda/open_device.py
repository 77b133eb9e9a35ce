"""Opens the GPU of a server, or says what is missing for it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from antiphon.bundle.onnx_runtime import ort
from antiphon.errors import CudaError
from antiphon.ops.cuda import ARCHITECTURES, FOLDER, library_name
from antiphon.ops.cuda.driver import CudaDevice, describe

log = logging.getLogger(__name__)

DeviceChoice = Literal["cpu", "cuda", "auto"]
"""Device that runs the graphs. auto: a GPU if a usable one is there and the bundle has cuda graphs, else the CPU."""


class DeviceError(Exception):
    """There is no usable GPU; the message says what is missing."""


def open_device(choice: DeviceChoice, *, kernels: Path = FOLDER) -> CudaDevice | None:
    """Return the device for a choice, with its kernels loaded; None is the processor.

    kernels: folder of the compiled kernels. Raises DeviceError if the choice is "cuda" and no GPU can be used.
    """
    if choice == "cpu":
        return None
    try:
        return _opened(kernels)
    except DeviceError as error:
        if choice == "cuda":
            raise
        log.info("graphs run on the processor: %s", error)
        return None


def _opened(kernels: Path) -> CudaDevice:
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise DeviceError("this ONNX Runtime has no CUDA provider; install antiphon[gpu] instead of antiphon[server]")
    try:
        description = describe()
        architecture = description.architecture
        if architecture not in ARCHITECTURES:
            supported = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
            raise DeviceError(f"{description.name} is sm_{architecture}; there are kernels for {supported}")
        library = kernels / library_name(architecture)
        if not library.is_file():
            raise DeviceError(f"{library} is missing; `make kernels` compiles it, and the wheel of a release has it")
        device = CudaDevice()
        device.load_kernels(library)
    except CudaError as error:
        raise DeviceError(str(error)) from error
    log.info(
        "graphs run on %s, sm_%d, driver %d, %d of %d bytes free",
        description.name,
        architecture,
        description.driver_version,
        description.free_bytes,
        description.total_bytes,
    )
    return device
