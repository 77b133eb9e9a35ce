"""Choice of the runner that serves a bundle, by the architecture of its model and by the device."""

from __future__ import annotations

from antiphon.bundle.manifest import Bundle, Precision
from antiphon.ops.cuda.driver import CudaDevice
from antiphon.runtime.cuda.encoder_runner import CudaEncoderRunner
from antiphon.runtime.cuda.runner import CudaRunner
from antiphon.runtime.encoder_runner import EncoderRunner
from antiphon.runtime.native_runner import NativeRunner

AnyRunner = NativeRunner | EncoderRunner | CudaRunner | CudaEncoderRunner


def open_runner(
    bundle: Bundle,
    *,
    max_rows: int,
    threads: int,
    precision: Precision | None = None,
    num_blocks: int | None = None,
    workspace_limit_bytes: int | None = None,
    first: AnyRunner | None = None,
) -> AnyRunner:
    """Load the native graphs of a precision; None takes the precision that `Bundle.graph_set` prefers.

    max_rows: sequences that run together. threads: cores that one run may use. num_blocks: cache blocks; None is enough
    for max_rows of the longest sequences; encoder-only models have none. workspace_limit_bytes: maximum memory of ONNX
    Runtime besides weights. first: runner of the first lane of the same bundle, whose cache blocks this one shares.
    Raises GraphError, BundleError (no native graphs of this precision) or WorkspaceError.
    """
    if bundle.manifest.model.architecture == "encoder":
        return EncoderRunner(
            bundle,
            max_rows=max_rows,
            threads=threads,
            precision=precision,
            workspace_limit_bytes=workspace_limit_bytes,
        )
    return NativeRunner(
        bundle,
        max_rows=max_rows,
        threads=threads,
        precision=precision,
        num_blocks=num_blocks,
        workspace_limit_bytes=workspace_limit_bytes,
        cache=first.cache if isinstance(first, NativeRunner) else None,
    )


def open_cuda_runner(
    bundle: Bundle,
    device: CudaDevice,
    *,
    max_rows: int,
    precision: Precision | None = None,
    num_blocks: int | None = None,
    memory_limit_bytes: int | None = None,
) -> AnyRunner:
    """Load the cuda graphs of a precision on a device; None takes the precision that `Bundle.graph_set` prefers.

    num_blocks: None is enough for max_rows of the longest sequences, as far as the device has memory.
    memory_limit_bytes: maximum memory of ONNX Runtime for each graph, weights and workspace together. Other arguments
    as for `open_runner`.
    Raises GraphError, BundleError (no cuda graphs of this precision) or CudaError.
    """
    if bundle.manifest.model.architecture == "encoder":
        return CudaEncoderRunner(
            bundle, device, max_rows=max_rows, precision=precision, memory_limit_bytes=memory_limit_bytes
        )
    return CudaRunner(
        bundle,
        device,
        max_rows=max_rows,
        precision=precision,
        num_blocks=num_blocks,
        memory_limit_bytes=memory_limit_bytes,
    )
