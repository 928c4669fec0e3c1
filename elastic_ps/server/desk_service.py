"""The calls of the job's evaluator: protobuf headers in, `Desk` out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elastic_ps.evaluation.queue import Desk
from elastic_ps.server.service import parse, require_job
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming


class DeskService:
    """Answers for a `Service`, which has checked that the caller may call.

    Args:
        job: the job's name.
        last: the version on disk if training is over, else None.

    Attributes:
        methods: what answers calls, by their names.
    """

    def __init__(self, job: str, desk: Desk, last: Callable[[], int | None]) -> None:
        self._job, self._desk, self._last = job, desk, last
        self.methods: dict[str, Callable[[Incoming], Iterator[Frame]]] = {
            "Evaluate": self._evaluate,
            "ReadFile": self._read_file,
        }

    def _evaluate(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.EvaluateRequest, incoming.header)
        require_job(request.job, self._job)
        if request.HasField("version"):
            self._desk.finish(request.version, dict(request.metrics), request.problem)
        version, over = self._desk.begin(request.process, self._last())
        yield Frame(pb.EvaluateReply(version=version, over=over).SerializeToString())

    def _read_file(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.ReadFileRequest, incoming.header)
        require_job(request.job, self._job)
        header = pb.Done().SerializeToString()
        for piece in self._desk.read(request.version, request.file):
            yield Frame(header, piece)
        yield Frame(header)
