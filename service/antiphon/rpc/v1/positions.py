"""Positions of a model on request: checks their number, and computes the tables in a thread."""

from __future__ import annotations

from functools import partial

from antiphon.architecture.config import Part
from antiphon.domain.errors import InvalidArgument
from antiphon.rpc.v1.analysis_thread import AnalysisThread
from antiphon.rpc.v1.served.served_model import ServedModel
from antiphon.runtime.positions import (
    PositionEncoding,
    PositionKind,
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

    def __init__(self, model: ServedModel, thread: AnalysisThread) -> None:
        self._model = model
        self._thread = thread

    async def get(self, message: pb.GetPositionsRequest) -> pb.GetPositionsResponse:
        """Return the table of each part's positions, and the effect of distance. Raises AntiphonError."""
        most = min(MAX_POSITIONS, longest_described(self._model.config))
        if message.num_positions > most:
            raise InvalidArgument("num_positions", message.num_positions, f"0 to {most}")
        num_positions = message.num_positions or min(DEFAULT_POSITIONS, most)
        return await self._thread.run(partial(self._response, num_positions))

    def _response(self, num_positions: int) -> pb.GetPositionsResponse:
        read = self._model.read_position_tables
        encodings = position_encodings(self._model.config, num_positions, {} if read is None else read())
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
