"""The tables of a model in a job: their rows are on the parameter servers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.codec import as_bytes
from elastic_ps.embedding.init import Ids
from elastic_ps.embedding.module import Embedding, Gradient, LocalSource, Pending
from elastic_ps.embedding.placing import shard_of
from elastic_ps.embedding.stored import spec_to_text
from elastic_ps.embedding.table import TableSpec
from elastic_ps.embedding.tables import Tables, layers_of, require_trainable
from elastic_ps.embedding.wire import gradient_to_bytes
from elastic_ps.errors import Malformed, UsageError
from elastic_ps.tensors.client import Client
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Incoming


class RemoteSource:
    """A table whose rows are on the parameter servers, and the gradients of this worker's next step."""

    def __init__(self, spec: TableSpec, client: Client) -> None:
        self.pending = Pending(spec)
        self.spec, self.text = spec, spec_to_text(spec)
        self._client = client

    def lookup(self, ids: Ids) -> torch.Tensor:
        """See `Source`. Blocks for an answer of each shard that has rows of these ids."""
        values = torch.empty(len(ids), self.spec.dim, dtype=self.spec.torch_dtype)
        shards = shard_of(ids, self._client.shards)
        for shard in range(self._client.shards):
            places = np.flatnonzero(shards == shard)
            if not len(places):
                continue
            part = torch.empty(len(places), self.spec.dim, dtype=self.spec.torch_dtype)

            def read(_: pb.Done, incoming: Incoming, part: torch.Tensor = part) -> None:
                if incoming.size != part.nbytes:
                    raise Malformed(f"{incoming.size} bytes of rows; expected {part.nbytes}")
                incoming.read_into(as_bytes(part))

            body = memoryview(ids[places].astype("<i8").tobytes())
            self._client.ask_all(
                calls.LOOKUP, pb.LookupRequest(table=self.text), read, shard=shard, body=body
            )
            values[torch.from_numpy(places)] = part
        return values

    def __deepcopy__(self, memo: object) -> RemoteSource:
        """A copy of a model in a job, such as its average, looks up the same rows."""
        return self


class RemoteTables(Tables):
    """All tables of a model that a job trains.

    Raises:
        ModelMismatch: two layers describe a table differently.
        UsageError: a table has rows already.
    """

    def __init__(self, layers: Sequence[Embedding], client: Client) -> None:
        sources: dict[str, RemoteSource] = {}
        for layer in layers:
            name = layer.spec.name
            source = sources.setdefault(name, RemoteSource(layer.spec, client))
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

    def send(self, caller: pb.Caller, step: int, weight: float) -> None:
        """Send the rows of a step to all shards, before it is ended. Blocks. Raises Refused, ConnectionLost.

        Args:
            caller, step: the incarnation, and its number for the step.
            weight: that of the step in the mean.
        """
        shards = self._client.shards
        # Each shard hears of each table that has a gradient, because all count its steps.
        taken = {name: each for name, each in self._taken.items() if len(each.ids)}
        places = {name: shard_of(each.ids, shards) for name, each in taken.items()}
        for shard in range(shards):
            request = pb.PushRowsRequest(caller=caller, step=step, weight=weight)
            body: list[bytes] = []
            for name, (ids, values, counts) in taken.items():
                own = np.flatnonzero(places[name] == shard)
                request.tables.add(table=self._remote[name].text, rows=len(own))
                body += gradient_to_bytes(Gradient(ids[own], values[torch.from_numpy(own)], counts[own]))
            self._client.ask(calls.PUSH_ROWS, request, shard=shard, body=memoryview(b"".join(body)))

    def applied(self) -> None:
        """See `Tables`."""
        self._taken = {}


def tables_in_job(model: torch.nn.Module, spec: TrainingJobSpec, client: Client) -> RemoteTables | None:
    """The tables of a model that a job trains; None if it has none.

    Raises:
        InvalidModel: the job cannot train them.
        ModelMismatch: see `RemoteTables`.
    """
    layers = layers_of(model)
    if not layers:
        return None
    require_trainable(
        spec,
        {
            "parameterServer.durability: standby": spec.parameter_server.durability == "standby",
            "worker.processes above 1": spec.worker.processes > 1,
            "an evaluator": spec.evaluator is not None,
        },
    )
    return RemoteTables(layers, client)
