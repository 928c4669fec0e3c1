"""The tables of a model in a job: their rows are on the parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from elastic_ps.codec import as_bytes
from elastic_ps.embedding.ahead import Ahead, Found, Held
from elastic_ps.embedding.init import Ids
from elastic_ps.embedding.module import Embedding, Given, Gradient, LocalSource, Pending, warn_of_copy
from elastic_ps.embedding.placing import shard_of
from elastic_ps.embedding.stored import spec_to_text
from elastic_ps.embedding.table import TableSpec
from elastic_ps.embedding.tables import Tables
from elastic_ps.embedding.wire import gradient_to_bytes, ids_from_bytes
from elastic_ps.errors import Malformed, Refused, UsageError
from elastic_ps.tensors.client import Client
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Incoming

OnRefusal: TypeAlias = Callable[[Refused], bool]
"""Is told why rows were refused, which it may raise. Returns whether they do not matter; else ask again."""


class RemoteSource:
    """A table whose rows are on the parameter servers, and the gradients of this worker's next step.

    Attributes:
        ahead: what was fetched for the batch in hand; None: nothing.
        used, used_ahead: see `api.tables.TableStatus`; since the last step.
    """

    def __init__(self, spec: TableSpec, client: Client, refused: OnRefusal) -> None:
        self.pending = Pending(spec)
        self.spec, self.text = spec, spec_to_text(spec)
        self.ahead: Ahead | None = None
        self.used = self.used_ahead = 0
        self._client, self._refused = client, refused

    def lookup(self, ids: Ids) -> torch.Tensor:
        """See `Source`. Blocks for an answer of each shard that has rows of these ids.

        Zeros if others are handed the batch in hand, because the job has gone back to an older version.
        """
        while True:
            try:
                return self._present(ids)
            except Refused as refusal:
                if self._refused(refusal):
                    return self._empty(ids).zero_()
                self.ahead = None

    def _present(self, ids: Ids) -> torch.Tensor:
        values, ahead = self._empty(ids), self.ahead
        found: Found = {} if ahead is None else ahead.rows()
        for shard, places in self._by_shard(ids):
            held = found.get((self.spec.name, shard))
            if held is None or ahead is None:
                part = self._empty(places)
                self._ask(shard, ids[places], part)
            else:
                part = self._completed(shard, ids[places], held, ahead.staleness())
            values[torch.from_numpy(places)] = part
        self.used += len(ids)
        return values

    def fetch(self, ids: Ids) -> Iterator[tuple[tuple[str, int], Held]]:
        """Yield the present rows of each shard that has some of these ids. Blocks."""
        for shard, places in self._by_shard(ids):
            values = self._empty(places)
            reply, _ = self._ask(shard, ids[places], values)
            yield (self.spec.name, shard), Held(ids[places], values, reply.life, reply.version)

    def _empty(self, ids: Ids) -> torch.Tensor:
        return torch.empty(len(ids), self.spec.dim, dtype=self.spec.torch_dtype, device="cpu")

    def _by_shard(self, ids: Ids) -> Iterator[tuple[int, Ids]]:
        """Each shard that has some of these ids, and their places."""
        shards = shard_of(ids, self._client.shards)
        for shard in range(self._client.shards):
            places = np.flatnonzero(shards == shard)
            if len(places):
                yield shard, places

    def _completed(self, shard: int, ids: Ids, held: Held, staleness: int) -> torch.Tensor:
        """The rows of some ids of a shard. Only those travel that are not held, or have changed."""
        places, there = held.find(ids)
        order, known = np.argsort(~there, kind="stable"), int(there.sum())
        part, changed = self._empty(ids), 0
        part[:known] = held.values[torch.from_numpy(places[there])]
        if not staleness:
            _, changed = self._ask(shard, ids[order], part, held, known)
        elif known < len(ids):
            self._ask(shard, ids[order[known:]], part[known:])
        self.used_ahead += known - changed
        values = self._empty(ids)
        values[torch.from_numpy(order)] = part
        return values

    def _ask(
        self, shard: int, ids: Ids, values: torch.Tensor, held: Held | None = None, known: int = 0
    ) -> tuple[pb.LookupReply, int]:
        """Have a shard fill in the values of some ids. Blocks.

        Args:
            held, known: an answer that has given the first so many of the values.

        Returns its reply, and how many of the first ones it has replaced.
        """
        request = pb.LookupRequest(table=self.text)
        if held is not None:
            request.held, request.life, request.version = known, held.life, held.version

        def read(reply: pb.LookupReply, incoming: Incoming) -> tuple[pb.LookupReply, int]:
            some = known > 0 and reply.HasField("places")
            size = reply.places * (8 + values[:1].nbytes) if some else values.nbytes
            if incoming.size != size:
                raise Malformed(f"{incoming.size} bytes of rows; expected {size}")
            if not some:
                incoming.read_into(as_bytes(values))
                return reply, known
            body = memoryview(bytearray(size))
            if size:
                incoming.read_into(body)
            places = ids_from_bytes(body[: 8 * reply.places])
            if bool(((places < 0) | (places >= len(ids))).any()):
                raise Malformed(f"the place of a row is not one of {len(ids)}")
            rows = np.frombuffer(body[8 * reply.places :], dtype=self.spec.dtype)
            values[torch.from_numpy(places)] = torch.from_numpy(rows.reshape(-1, self.spec.dim))
            return reply, int((places < known).sum())

        body, answer = memoryview(ids.astype("<i8").tobytes()), values.nbytes
        return self._client.ask_all(calls.LOOKUP, request, read, shard=shard, body=body, answer=answer)[-1]

    def __deepcopy__(self, memo: object) -> RemoteSource:
        """A copy of a model in a job, such as its average, looks up the same rows, and trains none."""
        warn_of_copy(self.spec)
        return RemoteSource(self.spec, self._client, self._refused)

    def __reduce__(self) -> Any:
        raise UsageError(
            f"the model cannot be saved whole, because the rows of its table {self.spec.name!r} are on the "
            "parameter servers. Use the job's checkpoints: elastic_ps.load_checkpoint(directory, model)"
        )


class Sent(NamedTuple):
    """The gradients of a table in a step, and its counts; see `RemoteSource`."""

    gradient: Gradient
    used: int
    used_ahead: int


class RemoteTables(Tables):
    """All tables of a model that a job trains.

    Raises:
        ModelMismatch: two layers describe a table differently.
        UsageError: a table has rows already.
    """

    def __init__(self, layers: Sequence[Embedding], client: Client, refused: OnRefusal) -> None:
        sources: dict[str, RemoteSource] = {}
        for layer in layers:
            name = layer.spec.name
            source = sources.setdefault(name, RemoteSource(layer.spec, client, refused))
            source.spec.require_same(layer.spec)
            if isinstance(layer.source, LocalSource) and len(layer.source.table):
                raise UsageError(
                    f"the table {name!r} has rows of a load_state_dict, but a job's rows are on the "
                    "parameter servers, and begin with their first values. To go on from a checkpoint, start "
                    "the job with `elastic-ps run JOB --resume DIR`"
                )
            layer.source = source
        super().__init__(dict(sources))
        self._client, self._remote = client, sources
        self._next: Ahead | None = None
        self._sent = (0, 0)  # the incarnation and step whose rows were sent last
        self._lost: list[tuple[int, int]] = []  # those that do not count, which the shards may forget

    def prefetch(self, wanted: Mapping[str, Given], staleness: Callable[[], int]) -> dict[str, Ids]:
        """See `Tables`. The rows that were asked for before are for the batch in hand."""
        ids = super().prefetch(wanted, staleness)
        for source in self._remote.values():
            source.ahead = self._next

        def fetch() -> Found:
            parts = [self._remote[name].fetch(np.unique(each)) for name, each in ids.items()]
            return {place: held for part in parts for place, held in part}

        self._next = Ahead(fetch, staleness) if ids else None
        return ids

    def send(self, caller: pb.Caller, step: int, weight: float) -> None:
        """Send the rows of a step to all shards, before it is ended. Blocks. Raises Refused, ConnectionLost.

        Args:
            caller, step: the incarnation, and its number for the step.
            weight: that of the step in the mean.
        """
        self.require_finite()  # before one of several shards has its rows
        self.send_rows(self.taken(), caller, step, weight)
        self.sent()

    def taken(self) -> dict[str, Sent]:
        """The gradients of this process in the step, by the names of all tables."""
        return {
            name: Sent(self._taken[name], source.used, source.used_ahead)
            for name, source in self._remote.items()
        }

    def send_rows(self, tables: Mapping[str, Sent], caller: pb.Caller, step: int, weight: float) -> None:
        """See `send`."""
        shards, self._sent = self._client.shards, (caller.incarnation, step)
        lost = [number for incarnation, number in self._lost if incarnation == caller.incarnation]
        # Each shard hears of each table that has a gradient, because all count its steps.
        there = {name: each for name, each in tables.items() if len(each.gradient.ids)}
        places = {name: shard_of(each.gradient.ids, shards) for name, each in there.items()}
        for shard in range(shards):
            request = pb.PushRowsRequest(caller=caller, step=step, weight=weight, lost=lost)
            body: list[bytes] = []
            for name, ((ids, values, counts), used, used_ahead) in there.items():
                own = np.flatnonzero(places[name] == shard)
                said = {"used": used, "used_ahead": used_ahead} if shard == 0 else {}
                request.tables.add(table=self._remote[name].text, rows=len(own), **said)
                body += gradient_to_bytes(Gradient(ids[own], values[torch.from_numpy(own)], counts[own]))
            self._client.ask(calls.PUSH_ROWS, request, shard=shard, body=memoryview(b"".join(body)))
        self._lost.clear()

    def sent(self) -> None:
        """The rows of the step were sent."""
        for name, source in self._remote.items():
            source.ahead = None  # these rows were for this step alone
            if len(self._taken[name].ids):
                source.used = source.used_ahead = 0

    def ended(self, made: bool, version: int) -> None:
        """See `Tables`."""
        del version
        self._taken = {}
        if not made and any(self._sent):  # else another process sends them
            self._lost.append(self._sent)
