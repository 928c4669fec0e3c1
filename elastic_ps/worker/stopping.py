"""How a script's wish to end the training comes to the processes of its worker, and to the job."""

from __future__ import annotations

from elastic_ps.errors import Refused
from elastic_ps.worker.client import Client, expelled
from elastic_ps.worker.local_world import LocalWorld

_STOP = "stop"
"""What a process wishes that ends the training; see `LocalWorld`."""


class Stopping:
    """Whether the training is ended before all records are in the model. Belongs to the training thread.

    Attributes:
        reason: why, as far as this worker knows; "" if it is not.
    """

    def __init__(self, client: Client, world: LocalWorld) -> None:
        self.reason = ""
        self._client, self._world = client, world

    def learn(self, reason: str) -> None:
        """The parameter server says that it is, unless `reason` is ""."""
        self.reason = self.reason or reason

    def ask(self, reason: str) -> None:
        """End it on all workers. Blocks for the answer. Raises Refused."""
        if not self._world.alone:
            self._world.wish(_STOP, reason)  # the other processes may not know of it yet
            return
        self.learn(reason)
        self._client.stop(self.reason)

    def heed(self) -> None:
        """A process of this worker may have asked for it; all know now."""
        reason = self._world.agreed(_STOP)
        if not reason or self.reason:
            return
        self.reason = reason
        if self._world.leads:
            try:
                self._client.stop(reason)
            except Refused as refusal:
                if not expelled(refusal):
                    raise  # else the next call is refused, too, and it is said after joining again

    def repeat(self) -> None:
        """The parameter server may have been lost before it has kept it. Blocks. Raises Refused."""
        if self.reason:
            self._world.decide("session.stop(...)", lambda: self._client.stop(self.reason))
