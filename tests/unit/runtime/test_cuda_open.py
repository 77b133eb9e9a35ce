"""A server that asks for a GPU on a machine without one."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

import pytest

from antiphon.bundle.onnx_runtime import ort
from antiphon.errors import CudaError
from antiphon.ops.cuda.driver import CudaDevice, describe
from antiphon.runtime.cuda.open_device import DeviceError, open_device

HAS_DRIVER = ctypes.util.find_library("cuda") is not None
HAS_PROVIDER = "CUDAExecutionProvider" in ort.get_available_providers()


def test_the_processor_needs_nothing(tmp_path: Path) -> None:
    assert open_device("cpu", kernels=tmp_path) is None


@pytest.mark.skipif(HAS_PROVIDER, reason="onnxruntime-gpu is installed")
def test_cuda_names_the_missing_provider_and_auto_takes_the_processor(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"no CUDA provider; install antiphon\[gpu\]"):
        open_device("cuda", kernels=tmp_path)
    assert open_device("auto", kernels=tmp_path) is None


@pytest.mark.skipif(HAS_DRIVER, reason="there is an NVIDIA driver")
def test_without_a_driver_every_call_is_an_error_that_names_it() -> None:
    with pytest.raises(CudaError, match=r"no NVIDIA driver: libcuda\.so\.1"):
        describe()
    with pytest.raises(CudaError, match="no NVIDIA driver"):
        CudaDevice()
