"""Another shard, as shard 0 drives it over the transport."""

from __future__ import annotations

import time
from datetime import timedelta

from elastic_ps.checkpoint.store import ShardFile
from elastic_ps.errors import ConnectionLost, DeadlineExceeded
from elastic_ps.server.node import Advance, Configuration, Written
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Connection, unary
from elastic_ps.transport.convert import layout_to_message

START_TIMEOUT = timedelta(seconds=120)
"""How long shard 0 waits for another shard to come up."""

CALL_TIMEOUT = timedelta(seconds=60)


class RemoteShard:
    """A `ShardControl` for a shard in another process. Thread-safe."""

    def __init__(self, job: str, connection: Connection) -> None:
        self._job = job
        self._connection = connection

    def configure(self, configuration: Configuration) -> None:
        """See ShardControl. Waits until the shard is up; raises ConnectionLost after `START_TIMEOUT`."""
        request = pb.ConfigureRequest(
            job=self._job,
            layout=layout_to_message(configuration.layout),
            optimizer=pb.Optimizer(name=configuration.optimizer, groups=configuration.settings.to_json()),
            epoch=configuration.epoch,
            load_version=configuration.load_version,
        )
        deadline = time.monotonic() + START_TIMEOUT.total_seconds()
        while True:
            try:
                unary(self._connection, "Configure", request.SerializeToString(), timeout=CALL_TIMEOUT)
                return
            except (ConnectionLost, DeadlineExceeded):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def advance(self, advance: Advance) -> list[Written]:
        """See ShardControl."""
        request = pb.AdvanceRequest(
            job=self._job,
            version=advance.version,
            attempt=advance.attempt,
            expected=[
                pb.Participant(worker=worker, incarnation=incarnation)
                for worker, incarnation in sorted(advance.expected.items())
            ],
            checkpoint=advance.checkpoint,
        )
        if advance.apply is not None:
            apply = advance.apply
            request.apply.CopyFrom(
                pb.Apply(
                    attempt=apply.attempt,
                    contributors=[
                        pb.Contributor(worker=worker, incarnation=incarnation, step=step)
                        for worker, incarnation, step in apply.contributors
                    ],
                    samples=apply.samples,
                    settings=apply.settings.to_json(),
                )
            )
        answer = unary(self._connection, "Advance", request.SerializeToString(), timeout=CALL_TIMEOUT)
        return [_written(part) for part in pb.AdvanceReply.FromString(answer).written]

    def close(self) -> None:
        self._connection.close()


def _written(part: pb.Written) -> Written:
    file = None if part.error else ShardFile(part.file, part.sha256, part.size)
    return Written(part.version, file, part.error, timedelta(microseconds=part.pause_us))
