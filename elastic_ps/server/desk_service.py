"""The calls of the job's evaluator, for `Desk`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elastic_ps.evaluation.queue import Desk
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming
from elastic_ps.transport.calls import answers


class DeskService:
    """Answers for a `Service`.

    Args:
        last: the version on disk if training is over, else None.
    """

    def __init__(self, desk: Desk, last: Callable[[], int | None]) -> None:
        self._desk, self._last = desk, last

    @answers(calls.EVALUATE)
    def _evaluate(self, request: pb.EvaluateRequest, _: Incoming) -> pb.EvaluateReply:
        if request.HasField("version"):
            self._desk.finish(request.version, dict(request.metrics), request.problem)
        version, over = self._desk.begin(request.process, self._last())
        return pb.EvaluateReply(version=version, over=over)

    @answers(calls.READ_FILE)
    def _read_file(self, request: pb.ReadFileRequest, _: Incoming) -> Iterator[Frame]:
        header = pb.Done().SerializeToString()
        for piece in self._desk.read(request.version, request.file):
            yield Frame(header, piece)
        yield Frame(header)
