"""What of a session and an optimizer no script may reach, and some tests have to look at."""

from __future__ import annotations

from elastic_ps.core.stages import StandbyState
from elastic_ps.server.calls.node import Node
from elastic_ps.worker.model.flat import Flat
from elastic_ps.worker.optimizer import ElasticOptimizer
from elastic_ps.worker.runtime.runtime import Runtime
from elastic_ps.worker.session import Session
from elastic_ps.worker.strategies.push_pull import PushPull


def runtime_of(session: Session) -> Runtime:
    """What the session drives."""
    return session._runtime  # noqa: SLF001  a script that had it could break its worker


def push_pull_of(session: Session) -> PushPull:
    """The pushes and pulls of a worker that has joined."""
    strategy = runtime_of(session).strategy
    assert isinstance(strategy, PushPull)
    return strategy


def flat_of(optimizer: ElasticOptimizer) -> Flat:
    """The model's memory."""
    return optimizer._flat  # noqa: SLF001  likewise


def is_followed(node: Node) -> bool:
    """Whether a parameter server's standby has its model, or is getting it."""
    follower = node._follower  # noqa: SLF001  as a job's status is
    return follower is not None and follower.state is not StandbyState.AWAY


def vanish(session: Session) -> None:
    """Let a worker end without a goodbye."""
    runtime_of(session).client.close()
    session.close()
