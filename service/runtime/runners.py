"""Choice of the runner of a bundle, by the lowering of its graphs."""

from __future__ import annotations

from antiphon.model.bundle.manifest import Bundle, Lowering, Precision
from antiphon.service.runtime.encoder_runner import EncoderRunner
from antiphon.service.runtime.model_runner import ModelRunner
from antiphon.service.runtime.native_runner import NativeRunner

AnyRunner = ModelRunner | NativeRunner | EncoderRunner


def open_runner(
    bundle: Bundle,
    *,
    max_rows: int,
    threads: int,
    precision: Precision | None = None,
    lowering: Lowering | None = None,
    num_blocks: int | None = None,
    workspace_limit_bytes: int | None = None,
) -> AnyRunner:
    """Load the graphs that precision and lowering name; None takes what `Bundle.graph_set` prefers.

    max_rows: sequences that run together. threads: cores one run may use. num_blocks: cache blocks; None is enough
    for max_rows of the longest sequences; an encoder alone has none. workspace_limit_bytes: what ONNX Runtime may hold
    beside weights.
    Raises GraphError, BundleError (no such graphs) or WorkspaceError.
    """
    graphs = bundle.graph_set(precision, lowering)
    if bundle.manifest.model.architecture == "encoder":
        return EncoderRunner(
            bundle,
            max_rows=max_rows,
            threads=threads,
            precision=graphs.precision,
            workspace_limit_bytes=workspace_limit_bytes,
        )
    if graphs.lowering == "native":
        return NativeRunner(
            bundle,
            max_rows=max_rows,
            threads=threads,
            precision=graphs.precision,
            num_blocks=num_blocks,
            workspace_limit_bytes=workspace_limit_bytes,
        )
    return ModelRunner(
        bundle,
        max_rows=max_rows,
        threads=threads,
        precision=graphs.precision,
        lowering=graphs.lowering,
        num_blocks=num_blocks,
        workspace_limit_bytes=workspace_limit_bytes,
    )
