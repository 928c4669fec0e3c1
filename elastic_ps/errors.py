"""Every exception that elastic-ps raises, in one tree.

::

    ElasticPSError
    ├── UserError                 the user has to change something; the message says what. Never retried
    │   ├── InvalidJob            a TrainingJob (file or resource) that cannot be run
    │   ├── InvalidModel          a model, optimizer or data set that cannot be trained
    │   ├── ModelMismatch         a worker's model differs from the one on the parameter server, or a replica
    │   │                         from those of the other processes of a communicator
    │   ├── UsageError            a script calls the library in a way that cannot work
    │   └── CannotListen          the address to listen on is taken or is not this machine's
    ├── TransportError
    │   ├── ConnectionLost        the other side went away or cannot be reached. May be retried
    │   ├── DeadlineExceeded      no answer within the deadline. May be retried
    │   └── Malformed             bytes that do not follow the protocol
    ├── CollectiveFailed          an operation of a communicator failed, because of another process
    ├── TensorLost                a tensor of `session.server` is gone; the message says why
    ├── Refused                   the parameter server refuses the request; `code` says why
    ├── CheckpointError
    │   ├── NoCheckpoint          the directory has no complete checkpoint
    │   ├── Fenced                another parameter server has taken over
    │   ├── StorageUnavailable    the directory cannot be read or written at the moment. May be retried
    │   └── CheckpointCorrupt     a file's digest or content does not match its manifest
    │       └── CheckpointUnreadable  it is complete, but of a format that this version cannot read
    └── AskedToEnd                the process was asked to end while it waited for something

For a `UserError` the command line prints the message without a traceback and exits with 2. A worker process
exits with `exits.INVALID`, so that it is not restarted.
"""

from __future__ import annotations

import enum


class ElasticPSError(Exception):
    """The base class of all exceptions of elastic-ps."""


class UserError(ElasticPSError):
    """The user has to change something. The message says what was given, what was expected and what to do."""


class InvalidJob(UserError):
    """A TrainingJob that cannot be run as it stands."""


class InvalidModel(UserError):
    """A model, optimizer or data set that cannot be trained."""


class ModelMismatch(UserError):
    """A worker's model differs from the parameter server's, or replicas that should be equal differ.

    The message names the difference.
    """


class UsageError(UserError):
    """A script calls the library in a way that cannot work, for example in the wrong order."""


class CannotListen(UserError):
    """The address to listen on is taken or is not this machine's."""


class TransportError(ElasticPSError):
    """Data was not transferred, or arrived damaged."""


class ConnectionLost(TransportError):
    """The other side went away or cannot be reached; the call may or may not have taken effect."""


class DeadlineExceeded(TransportError):
    """No answer came within the deadline; the call may or may not have taken effect."""


class Malformed(TransportError):
    """The bytes received do not follow the protocol."""


class CollectiveFailed(ElasticPSError):
    """An operation of a communicator has failed: another process ended, was late or called something else.

    The communicator cannot be used any more, since its processes are at different operations.
    """


class TensorLost(ElasticPSError):
    """A tensor of `session.server` is gone. The message names it.

    It was freed, or a parameter server that held a part of it has restarted. `session.server.init` recreates
    it with the values of the script.
    """


class RefusalCode(enum.IntEnum):
    """Why a parameter server refused. The numbers are part of the protocol and never change."""

    UNSPECIFIED = 0
    STALE_TERM = 1
    """The message belongs to another term of the parameter server."""
    STALE_INCARNATION = 2
    """The worker was declared gone or replaced. From a shard also: it takes no part in the open round."""
    STALE_ATTEMPT = 3
    """The round has started again since this gradient was queued; push it again."""
    WRONG_VERSION = 4
    """The gradient was computed on another version than the open round's."""
    MALFORMED = 5
    """Wrong bucket, length, dtype or codec."""
    NOT_FINITE = 6
    """The gradient holds NaN or Inf."""
    MODEL_MISMATCH = 7
    """Names, shapes, dtypes or optimizer differ from the model that is being trained."""
    INVALID = 8
    """The request cannot be carried out; the user has to change something."""
    NOT_READY = 9
    """The parameter server cannot answer yet; ask again."""
    UNKNOWN_METHOD = 10
    """No such request."""
    WRONG_JOB = 11
    """The message names another job."""
    SUPERSEDED = 12
    """Another process has replaced this worker; this one must end."""
    HUNG = 13
    """The worker kept the others waiting for too long and was declared hung; its process must end."""
    LATE = 14
    """The round has enough steps of other workers, so this one is dropped."""
    STALE_CALL = 15
    """The process has made a later call; the network delivered this one too late."""
    FORBIDDEN = 16
    """The caller's certificate does not permit it to make this call, or to speak for this worker."""
    GONE = 17
    """The script's tensor is gone."""
    NOT_YOUR_TURN = 18
    """Another worker's gradient comes first; push this one again, however long that takes."""
    MODEL_LOST = 19
    """The model that the worker has trained is lost, with all checkpoints; only a new process may join."""


class Refused(ElasticPSError):
    """The parameter server refuses the request. `code` and the message say why."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class CheckpointError(ElasticPSError):
    """A checkpoint cannot be written or read."""


class NoCheckpoint(CheckpointError):
    """The directory has no complete checkpoint."""


class Fenced(CheckpointError):
    """Another parameter server has taken over; this one must not apply or write anything."""


class StorageUnavailable(CheckpointError):
    """The directory cannot be read or written now: a full disk, a failing network, no permission."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint's content does not match its manifest."""


class CheckpointUnreadable(CheckpointCorrupt):
    """A checkpoint is complete, but has a format that this version of elastic-ps cannot read."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}. The checkpoint is complete, so another version of elastic-ps, or a person, has written "
            "it. It stays where it is. Continue with the version that has written it, or rename its "
            "directory from version-NUMBER to corrupt-NUMBER-1 to continue from the previous checkpoint"
        )


class AskedToEnd(ElasticPSError):
    """The process was asked to end while it waited for something."""
