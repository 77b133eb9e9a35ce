"""Positions of a model on request: checks their number, and computes the tables in the thread of explanations."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from antiphon.model.config import Part
from antiphon.service.domain.errors import InvalidArgument, Unsupported
from antiphon.service.rpc.v1.served.served_model import ServedModel
from antiphon.service.runtime.positions import (
    PositionEncoding,
    PositionKind,
    has_learned_positions,
    longest_described,
    position_encodings,
)
from antiphon.v1 import inference_pb2 as pb

DEFAULT_POSITIONS = 64
MAX_POSITIONS = 512

_PARTS: dict[Part, pb.Architecture.ValueType] = {
    "encoder": pb.ARCHITECTURE_ENCODER,
    "decoder": pb.ARCHITECTURE_DECODER,
}
_KINDS: dict[PositionKind, pb.PositionKind.ValueType] = {
    "none": pb.POSITION_KIND_NONE,
    "sinusoidal": pb.POSITION_KIND_SINUSOIDAL,
    "learned": pb.POSITION_KIND_LEARNED,
    "relative": pb.POSITION_KIND_RELATIVE,
    "rotary": pb.POSITION_KIND_ROTARY,
    "alibi": pb.POSITION_KIND_ALIBI,
    "disentangled": pb.POSITION_KIND_DISENTANGLED,
}


class Positions:
    """Describes the positions of one model. For the event loop."""

    def __init__(self, model: ServedModel, thread: Executor) -> None:
        self._model = model
        self._thread = thread

    async def get(self, message: pb.GetPositionsRequest) -> pb.GetPositionsResponse:
        """Return the table of each part's positions, and the effect of distance. Raises AntiphonError."""
        most = min(MAX_POSITIONS, longest_described(self._model.config))
        if message.num_positions > most:
            raise InvalidArgument("num_positions", message.num_positions, f"0 to {most}")
        num_positions = message.num_positions or min(DEFAULT_POSITIONS, most)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._response, num_positions)

    def _response(self, num_positions: int) -> pb.GetPositionsResponse:
        model, tables = self._model, {}
        if has_learned_positions(model.config):
            if model.explainer is None:
                raise Unsupported(
                    "the bundle of this model has no explain graph, which holds its learned positions; export it "
                    "again, or import it with --explain, to add one"
                )
            tables = dict(model.explainer.position_tables())
        encodings = position_encodings(model.config, num_positions, tables)
        return pb.GetPositionsResponse(encodings=map(_message, encodings))


def _message(encoding: PositionEncoding) -> pb.PositionEncoding:
    rows, columns = encoding.table.shape
    return pb.PositionEncoding(
        part=_PARTS[encoding.part],
        kind=_KINDS[encoding.kind],
        rows=rows,
        columns=columns,
        values=encoding.table.ravel().tolist(),
        decay=encoding.decay.tolist(),
    )
