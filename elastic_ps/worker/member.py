"""Being a member of the job: joining, being heard of, being asked to leave, saying goodbye."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import zip_longest

from elastic_ps.core.partition import TensorSpec
from elastic_ps.core.settings import Settings
from elastic_ps.errors import ElasticPSError, ModelMismatch
from elastic_ps.process.telemetry import History
from elastic_ps.worker.client import Client
from elastic_ps.worker.dialogue import Membership
from elastic_ps.worker.heart import Heart
from elastic_ps.worker.local_world import DRAIN, LocalWorld
from elastic_ps.worker.model import Described

logger = logging.getLogger(__name__)


class Member:
    """This worker's membership, over all its stays. Belongs to the training thread, except `drain`.

    Args:
        on_hung: called, on another thread, with the reason, if this worker is declared hung.
        on_joined: called when this worker has become a member.
        world: the processes of this worker; process 0 alone is heard of.

    Attributes:
        joined: this worker has become a member.
    """

    def __init__(
        self,
        client: Client,
        *,
        history: History,
        on_hung: Callable[[str], None] | None = None,
        on_joined: Callable[[], None] = lambda: None,
        world: LocalWorld | None = None,
    ) -> None:
        self.joined = False
        self._world = world or LocalWorld()
        self._client = client
        self._history = history
        self._on_hung, self._on_joined = on_hung, on_joined
        self._heart: Heart | None = None
        self._described: Described

    @property
    def draining(self) -> bool:
        """Whether this worker was asked to leave; all of its processes have the same answer."""
        return bool(self._world.agreed(DRAIN))

    @property
    def asked_to_leave(self) -> bool:
        """Whether this process was asked to leave; others of the worker may not know yet."""
        return self._world.wished(DRAIN)

    def join(self, described: Described, settings: Settings) -> Membership:
        """Become a member with this model. Blocks while another worker initialises it.

        Raises:
            ModelMismatch, InvalidModel: the parameter server cannot train this model in this job; or the
                processes of this worker do not have the same one.
        """
        self._described = described

        def join(models: list[tuple[Sequence[TensorSpec], str]]) -> Membership:
            _check_same(models)
            return self._client.join(described.specs, described.optimizer, settings)

        mine: tuple[Sequence[TensorSpec], str] = described.specs, described.optimizer
        membership = self._world.consult("session.optimizer(...)", mine, join)
        self.joined = True
        if self._world.leads:
            self._heart = Heart(self._client, membership.lease / 3, self._on_hung)
            self._on_joined()
        return membership

    def join_again(self, settings: Settings, *, trained: bool) -> Membership:
        """Begin another stay. `trained`: the model is not as it was at first any more."""
        described = self._described
        return self._world.decide(
            "the place where it joins again",
            lambda: self._client.join(described.specs, described.optimizer, settings, again=trained),
        )

    def note_join(self, version: int, *, again: bool = False) -> None:
        """Write down that a stay has begun, with the values of this version."""
        term = {"term": self._client.term} if again else {}
        self._history.record("join", incarnation=self._client.incarnation, version=version, **term)

    def drain(self) -> None:
        """Leave at the next opportunity. May be called from a signal handler."""
        self._client.expect_to_leave()
        self._world.wish(DRAIN, "asked to leave")

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
        self._world.close()


def _check_same(models: Sequence[tuple[Sequence[TensorSpec], str]]) -> None:
    """Raise ModelMismatch if the processes of a worker do not have the same model and optimizer."""
    first, optimizer = models[0]
    for rank, (specs, name) in enumerate(models):
        for ours, other in zip_longest(first, specs):
            if ours != other:
                raise ModelMismatch(
                    f"the model of process {rank} of this worker is not that of process 0: it has "
                    f"{other or 'nothing'} in place of {ours or 'nothing'}. Every process must build the "
                    "same model and optimizer"
                )
        if name != optimizer:
            raise ModelMismatch(f"process {rank} of this worker has {name}, process 0 has {optimizer}")
