"""The checkpoints of a running job, from its parameter server."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

from elastic_ps.checkpoint.manifest import MANIFEST
from elastic_ps.checkpoint.store import Store
from elastic_ps.errors import (
    CheckpointCorrupt,
    ConnectionLost,
    DeadlineExceeded,
    RefusalCode,
    Refused,
)
from elastic_ps.evaluation.source import Checkpoint
from elastic_ps.process.retrying import retry
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Connection, Frame

logger = logging.getLogger(__name__)

LOOK = timedelta(milliseconds=300)
"""The interval between two questions for a checkpoint."""

RETRY = timedelta(seconds=1)
"""The interval between two attempts to reach the parameter server."""

PATIENCE = timedelta(minutes=10)
"""How long the parameter server may be away."""

UNREADABLE = timedelta(minutes=1)
"""How long it may not be able to read a checkpoint, which is skipped then."""

CALL_TIMEOUT = timedelta(seconds=60)
"""The deadline of a question."""

FETCH_TIMEOUT = timedelta(minutes=30)
"""The deadline of a file."""

T = TypeVar("T")


class JobSource:
    """A `Source`: fetches each checkpoint into a temporary directory and verifies it there.

    Args:
        connection: the connection to shard 0; `close` closes it.
        run: a name of the run of the job. Files that a killed evaluator of this run has left are deleted.
    """

    def __init__(self, job: str, connection: Connection, *, run: str = "") -> None:
        self._job, self._connection = job, connection
        self._process = uuid.uuid4().hex
        directory = Path(tempfile.gettempdir()) / f"elastic-ps-evaluator-{run or self._process}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        self._store = Store(directory)

    def begin(self) -> Checkpoint | None:
        """See `Source`. Raises ConnectionLost."""
        reply = self._ask()
        while True:
            if reply.over:
                return None
            if not reply.HasField("version"):
                time.sleep(LOOK.total_seconds())
                reply = self._ask()
                continue
            problem = self._fetch(reply.version)
            if not problem:
                return Checkpoint(reply.version, self._store.path(reply.version))
            logger.warning("the checkpoint of version %d is skipped: %s", reply.version, problem)
            reply = self._ask(reply.version, problem=problem)

    def finish(self, checkpoint: Checkpoint) -> None:
        """See `Source`. Raises ConnectionLost."""
        self._ask(checkpoint.version, metrics=checkpoint.metrics)
        self._forget()

    def close(self) -> None:
        """See `Source`."""
        self._connection.close()
        shutil.rmtree(self._store.directory, ignore_errors=True)

    def _ask(
        self, version: int | None = None, *, metrics: Mapping[str, float] | None = None, problem: str = ""
    ) -> pb.EvaluateReply:
        """Ask for a version, and report the result of the previous one."""
        request = pb.EvaluateRequest(
            job=self._job, process=self._process, version=version, metrics=metrics, problem=problem
        )
        return self._patiently(
            lambda: calls.ask(self._connection, calls.EVALUATE, request, timeout=CALL_TIMEOUT)
        )

    def _fetch(self, version: int) -> str:
        """Fetch a checkpoint to the temporary directory; returns why it cannot be evaluated, else ""."""
        self._forget()
        directory = self._store.path(version)
        directory.mkdir()

        def fetch(name: str) -> None:
            self._patiently(lambda: self._fetch_file(version, name, directory / name), unready=UNREADABLE)

        try:
            fetch(MANIFEST)
            for file in self._store.describe(version).files:
                fetch(file.file)
            self._store.manifest(version)  # which verifies all files
        except Refused as refusal:
            if refusal.code not in (RefusalCode.INVALID, RefusalCode.NOT_READY):
                raise
            return str(refusal)
        except CheckpointCorrupt as error:
            return str(error)
        return ""

    def _fetch_file(self, version: int, name: str, path: Path) -> None:
        header = pb.ReadFileRequest(job=self._job, version=version, file=name).SerializeToString()
        with path.open("wb") as file:
            for answer in self._connection.call(calls.READ_FILE.name, Frame(header), timeout=FETCH_TIMEOUT):
                piece = bytearray(answer.size)
                answer.read_into(memoryview(piece))
                file.write(piece)

    def _forget(self) -> None:
        """Delete the previous checkpoint, so that only one takes room."""
        for path in self._store.directory.glob("version-*"):
            shutil.rmtree(path)

    def _patiently(self, call: Callable[[], T], *, unready: timedelta = PATIENCE) -> T:
        """Call until the parameter server answers. It may be away for a while, and start again.

        Args:
            unready: for how long it may answer "not yet".
        """
        answered = partial(retry, call, Refused, patience=unready, pause=RETRY)
        try:
            return retry(answered, (ConnectionLost, DeadlineExceeded), patience=PATIENCE, pause=RETRY)
        except (ConnectionLost, DeadlineExceeded) as error:
            text = f"the parameter server has not answered for {PATIENCE.total_seconds():g} s: {error}"
            raise ConnectionLost(text) from error
