"""The stand-in for CUDA, one for all tests of a process: the provider is bound to the first that is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from antiphon.model.ops.cuda.driver import CudaDevice
from tests.cuda.interpreter import in_order
from tests.cuda.standin.device import ARCHITECTURE, StandIn


@pytest.fixture(scope="session")
def loaded_standin(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="session")
def loaded_device(loaded_standin: StandIn) -> CudaDevice:
    del loaded_standin  # its libraries are the driver that the device opens
    return CudaDevice()


@pytest.fixture
def standin(loaded_standin: StandIn) -> Iterator[StandIn]:
    """Return the stand-in; afterwards it must not have met a kernel or a function that it does not know."""
    loaded_standin.launched.clear()
    foreign, missing = loaded_standin.num_foreign_launches, loaded_standin.num_missing_calls
    yield loaded_standin
    loaded_standin.fail_after(0)
    loaded_standin.set_architecture(ARCHITECTURE)
    loaded_standin.order = in_order
    assert loaded_standin.num_foreign_launches == foreign, "ONNX Runtime launched kernels of its own"
    assert loaded_standin.num_missing_calls == missing, "a function of CUDA was called that the stand-in lacks"


@pytest.fixture
def device(standin: StandIn, loaded_device: CudaDevice) -> CudaDevice:
    """Return the device with all kernels loaded, current in this thread."""
    loaded_device.use()
    loaded_device.load_kernels(standin.kernels)
    return loaded_device
