"""Being a member of the job: joining, being heard of, being asked to leave, saying goodbye."""

from __future__ import annotations

import logging
from collections.abc import Callable

from elastic_ps import env
from elastic_ps.core.settings import Settings
from elastic_ps.errors import ElasticPSError
from elastic_ps.telemetry import History
from elastic_ps.worker.client import Client
from elastic_ps.worker.dialogue import Membership
from elastic_ps.worker.heart import Heart
from elastic_ps.worker.model import Described

logger = logging.getLogger(__name__)


class Drained(SystemExit):
    """This worker was asked to leave and has done so; the process ends with `env.EXIT_LEFT`."""

    def __init__(self) -> None:
        super().__init__(env.EXIT_LEFT)


class Member:
    """This worker's membership, over all its stays. Belongs to the training thread, except `drain`.

    Args:
        on_hung: called, on another thread, with the reason, if this worker is declared hung.

    Attributes:
        draining: this worker was asked to leave.
    """

    def __init__(
        self, client: Client, *, history: History, on_hung: Callable[[str], None] | None = None
    ) -> None:
        self.draining = False
        self._client = client
        self._history = history
        self._on_hung = on_hung
        self._heart: Heart | None = None
        self._described: Described

    @property
    def joined(self) -> bool:
        """Whether this worker has become a member."""
        return self._heart is not None

    def join(self, described: Described, settings: Settings) -> Membership:
        """Become a member with this model. Blocks while another worker initialises it.

        Raises:
            ModelMismatch, InvalidModel: the parameter server cannot train this model in this job.
        """
        self._described = described
        membership = self._client.join(described.specs, described.optimizer, settings)
        self._heart = Heart(self._client, membership.lease / 3, self._on_hung)
        return membership

    def join_again(self, settings: Settings, *, trained: bool) -> Membership:
        """Begin another stay. `trained`: the model is not as it was at first any more."""
        described = self._described
        return self._client.join(described.specs, described.optimizer, settings, again=trained)

    def note_join(self, version: int, *, again: bool = False) -> None:
        """Write down that a stay has begun, with the values of this version."""
        term = {"term": self._client.term} if again else {}
        self._history.record("join", incarnation=self._client.incarnation, version=version, **term)

    def drain(self) -> None:
        """Leave at the next opportunity. May be called from a signal handler."""
        self.draining = True

    def leave(self, *, in_step: bool) -> None:
        """Say goodbye and close the connections; what this worker holds goes to others.

        Args:
            in_step: a step has begun, which is void by that.
        """
        if self._heart is not None:
            self._heart.close()
            try:
                if in_step:
                    self._client.gone()
                else:
                    self._client.leave()
            except ElasticPSError as error:
                logger.info("the parameter server could not be told that this worker leaves: %s", error)
        self._client.close()
