"""Memory of calls whose answer cannot be sent is freed, whereas a plain grpc.aio server leaks it."""

import asyncio
import ctypes
import gc

import grpc
import grpc.aio
import pytest
from h2.settings import SettingCodes

from antiphon.rpc.grpc_fixes.batches import free_failed_batches
from tests.abuse.raw_connection import Address, RawConnection

pytestmark = pytest.mark.hardship

METHOD = "test.Test/Echo"
NO_WINDOW = {SettingCodes.INITIAL_WINDOW_SIZE: 0}
NUM_CALLS = 1000
# grpcio 1.85.1 alone leaves 430 bytes a call behind.
MAX_BYTES_PER_CALL = 80


class MallInfo2(ctypes.Structure):
    """Structure of glibc. num_used: used bytes of all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "num_used", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def num_used_bytes() -> int:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("no glibc 2.33 or later, which counts what is in use")
    libc.mallinfo2.restype = MallInfo2
    gc.collect()
    return libc.mallinfo2().num_used  # type: ignore[no-any-return]


class Echo:
    """Method that records the calls that wait for their client."""

    def __init__(self) -> None:
        self.calls: set[asyncio.Task[object]] = set()
        self.all_wait = asyncio.Event()

    async def __call__(self, request: bytes, context: object) -> bytes:
        call = asyncio.current_task()
        assert call is not None
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)
        if len(self.calls) == NUM_CALLS:
            self.all_wait.set()
        return b"answer"

    async def leave_unread(self, port: int) -> None:
        """Make calls whose answers have no flow-control window; return when the server has answered all."""
        self.all_wait.clear()
        async with await RawConnection.open(Address(port=port), NO_WINDOW, gives_credit=False) as connection:
            for _ in range(NUM_CALLS):
                connection.call(METHOD, b"")
            await connection.flush()
            await self.all_wait.wait()
        await asyncio.wait(self.calls)


async def test_unread_answers_leave_no_memory_behind() -> None:
    free_failed_batches()
    echo = Echo()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(echo.__call__)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Echo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    for _ in range(2):  # the first calls allocate memory that is kept
        await echo.leave_unread(port)
    before = num_used_bytes()
    for _ in range(2):
        await echo.leave_unread(port)
    grown = num_used_bytes() - before
    await server.stop(None)
    assert grown < 2 * NUM_CALLS * MAX_BYTES_PER_CALL
