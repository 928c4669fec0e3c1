"""The tables of a worker of several processes: its step has the rows of all of them.

Each process looks its rows up by itself, over connections of its own. At the end of a step, process 0 adds up
the gradients of all, and sends the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.core.weights import shares_of
from elastic_ps.embedding.module import Embedding, Gradient, coalesced
from elastic_ps.embedding.remote import OnRefusal, RemoteTables, Sent
from elastic_ps.embedding.table import TableSpec
from elastic_ps.embedding.tables import layers_of, require_trainable
from elastic_ps.embedding.wire import gradient_from_bytes, gradient_to_bytes
from elastic_ps.tensors.client import Client
from elastic_ps.transport import messages_pb2 as pb

T = TypeVar("T")
Parts: TypeAlias = Callable[[], tuple[float | None, Sequence[float]]]

_WHERE = "the rows of optimizer.step()"


class World(Protocol):
    """The processes of a worker; see `worker.wire.local_world.LocalWorld`."""

    @property
    def alone(self) -> bool: ...

    def gather(self, what: str, mine: Any, call: Callable[[list[Any]], T]) -> T: ...


class _Rows(NamedTuple):
    """The gradients of a table, as bytes: a tensor would travel as a file descriptor."""

    rows: int
    body: bytes
    used: int
    used_ahead: int


class _Part(NamedTuple):
    """The gradients of a process in a step, by the descriptions of tables, with the weight from `weigh`."""

    weight: float | None
    tables: Mapping[str, _Rows]


class GroupTables(RemoteTables):
    """All tables of a model that several processes of a worker train together. All make the same calls.

    Args:
        world: the processes.
        parts: gives what the script said that this process's part of the step weighs, or None; and the share
            of the step's records that each process has.

    Raises:
        ModelMismatch, UsageError: see `RemoteTables`.
    """

    def __init__(
        self,
        layers: Sequence[Embedding],
        client: Client,
        refused: OnRefusal,
        world: World,
        parts: Parts,
    ) -> None:
        super().__init__(layers, client, refused)
        self._world, self._parts = world, parts

    def send(self, caller: pb.Caller, step: int, weight: float) -> None:
        """See `RemoteTables`. Blocks until all processes are here, and process 0 has sent the sum.

        Raises:
            Refused, ConnectionLost: a parameter server did not take the rows.
        """
        own, shares = self._parts()
        tables = {}
        for name, (gradient, used, used_ahead) in self.taken().items():
            body = b"".join(gradient_to_bytes(gradient))
            tables[self._remote[name].text] = _Rows(len(gradient.ids), body, used, used_ahead)

        def send(every: list[_Part]) -> None:
            said, counted = shares_of([each.weight for each in every], shares)
            parts = [each.tables for each in every]
            self.send_rows(self._sum(parts, counted), caller, step, weight if said is None else said)

        self._world.gather(_WHERE, _Part(own, tables), send)
        self.sent()

    def _sum(self, parts: Sequence[Mapping[str, _Rows]], shares: Sequence[float]) -> dict[str, Sent]:
        """The gradients of all processes, by their shares, in the order of the processes."""
        found = {}
        for name, source in self._remote.items():
            there = [(part[source.text], share) for part, share in zip(parts, shares, strict=True)]
            # A process without records has computed on those of process 0.
            gradients = [self._scaled(source.spec, rows, share) for rows, share in there if share]
            used, used_ahead = (sum(counts) for counts in zip(*(rows[2:] for rows, _ in there), strict=True))
            found[name] = Sent(coalesced(gradients, source.spec), used, used_ahead)
        return found

    @staticmethod
    def _scaled(spec: TableSpec, rows: _Rows, share: float) -> Gradient:
        gradient = gradient_from_bytes(memoryview(bytearray(rows.body)), spec, rows.rows)
        return gradient._replace(values=gradient.values.mul_(share))


def tables_in_job(
    model: torch.nn.Module,
    spec: TrainingJobSpec,
    client: Client,
    refused: OnRefusal,
    world: World,
    parts: Parts,
) -> RemoteTables | None:
    """The tables of a model that a job trains; None if it has none. `world`, `parts`: see `GroupTables`.

    Raises:
        InvalidModel: the job cannot train them.
        ModelMismatch, UsageError: see `RemoteTables`.
    """
    layers = layers_of(model)
    if not layers:
        return None
    require_trainable(spec, layers)
    if world.alone:
        return RemoteTables(layers, client, refused)
    return GroupTables(layers, client, refused, world, parts)
