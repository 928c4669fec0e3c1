"""Workers and parameter servers as real processes that kill themselves (SIGKILL) at a moment that is given.

They are forked off a process that has imported torch already (multiprocessing's forkserver), so that a life
costs milliseconds. A fate is (moment, number); what the numbers mean is said where they are counted.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes seconds

from elastic_ps.checkpoint.store import Store
from elastic_ps.checkpoint.tensors import Reader
from elastic_ps.contract import env
from elastic_ps.core.partition import Bucket
from elastic_ps.local.gone import tell_parameter_server
from elastic_ps.server.process import ParameterServer
from elastic_ps.transport.grpc import GrpcConnection, GrpcServer
from elastic_ps.worker.session import Session
from tests.testing.addresses import addresses
from tests.testing.harness import Numbers, make_mlp, make_spec
from tests.testing.inside import push_pull_of, runtime_of
from tests.testing.polling import LIMIT

Fate: TypeAlias = tuple[str, int]

WORKERS, RECORDS, EPOCHS, BATCH = 3, 90, 6, 5
STEP = 3
"""A worker's step in which it dies."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def serve(variables: Mapping[str, str], fate: Fate | None) -> None:
    """A parameter server."""
    environment = env.read(variables)
    moment, version = fate or ("", 0)
    write, commit, read = Store.write_shard, Store.commit, Reader.value
    reads = itertools.count()

    def until_dead(items: Iterator[Any]) -> Iterator[Any]:
        yield next(items)
        die()

    def write_shard(
        store: Store, term: int, at: int, shard: int, shards: int, tensors: Iterator[Any], **named: Any
    ) -> Any:
        within = moment == "within a file" and at >= version
        given = until_dead(tensors) if within else tensors
        return write(store, term, at, shard, shards, given, **named)

    def committed(store: Store, manifest: Any, **options: Any) -> None:
        if moment == "before the manifest" and manifest.version >= version:
            die()
        commit(store, manifest, **options)
        if moment == "after the manifest" and manifest.version >= version:
            die()

    def value(reader: Reader, *arguments: int) -> torch.Tensor:
        if moment == "within a load" and next(reads) == 1:
            die()
        return read(reader, *arguments)

    for owner, name, function in (
        (Store, "write_shard", write_shard),
        (Store, "commit", committed),
        (Reader, "value", value),
    ):
        setattr(owner, name, function)
    server = GrpcServer(environment.bind)
    ParameterServer(environment, server, lambda shard: GrpcConnection(environment.addresses[shard]))
    threading.Event().wait()


def work(variables: Mapping[str, str], fate: Fate | None, result: str) -> None:
    """A worker; it leaves its final parameters in the file `result`. Worker 2 is the last in each round."""
    environment = env.read(variables)
    torch.set_num_threads(1)
    connections = [GrpcConnection(address) for address in environment.addresses]
    session = Session(
        environment.job, environment.spec, environment.index, connections, instance=environment.instance
    )
    model = make_mlp((6, 32, 32, 1), seed=0)
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    if fate is not None:
        doom(session, *fate)
    for x, y in session.loader(Numbers(RECORDS), batch_size=BATCH, epochs=EPOCHS):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        if session.worker == 2:
            time.sleep(0.02)
        optimizer.step()
    torch.save(torch.cat([p.detach().flatten() for p in model.parameters()]), f"{result}.tmp")
    Path(f"{result}.tmp").replace(result)
    session.close()


def doom(session: Session, moment: str, number: int) -> None:
    """Let a worker die in its step `STEP`: before its push `number`, or as `moment` says."""
    client, exchange = runtime_of(session).client, push_pull_of(session)
    push, finish, finish_step = client.push, client.finish, exchange.finish
    begun = itertools.count()

    def pushed(bucket: Bucket, step: Any, *arguments: Any) -> None:
        here = step.number == STEP
        if here and moment == "before a push" and next(begun) == number:
            die()
        push(bucket, step, *arguments)
        if here and moment == "after its pushes" and next(begun) == number - 1:
            die()

    def finished(step: Any, *arguments: Any) -> None:
        finish(step, *arguments)
        if step.number == STEP and moment == "after its end":
            die()

    def step_made(ending: Any) -> None:
        step = exchange.under_way
        finish_step(ending)
        if step is not None and step.number == STEP and moment == "after the commit":
            die()

    for owner, name, function in (
        (client, "push", pushed),
        (client, "finish", finished),
        (exchange, "finish", step_made),
    ):
        setattr(owner, name, function)


class Mortals:
    """A deterministic job whose processes die as their fates say, and are replaced each time."""

    def __init__(self, root: Path, *, shards: int = 1) -> None:
        self.deaths: list[tuple[str, Fate]] = []
        self._root, self._shards = root, shards
        self._addresses = tuple(addresses(shards))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._spec = make_spec(
            consistency={"deterministic": True},
            worker={"replicas": WORKERS},
            data={"shardRecords": 8},
            parameterServer={"replicas": shards, "bucketBytes": 1024, "checkpoint": {"interval": "20ms"}},
        )

    def _start(self, role: env.Role, index: int, fate: Fate | None) -> BaseProcess:
        environment = env.ProcessEnvironment(
            job="mortals",
            spec=self._spec,
            role=role,
            index=index,
            addresses=self._addresses,
            bind=self._addresses[index] if role == "ps" else "127.0.0.1:0",
            checkpoints=self._root / "checkpoints",
            instance=(name := f"{role}-{index}-{uuid.uuid4().hex}"),
        )
        variables, target = environment.to_variables(), serve if role == "ps" else work
        arguments: list[Any] = [variables, fate]
        process = self._context.Process(
            target=target,
            args=[*arguments, *([self._result(index)] if role == "worker" else [])],
            name=name,
            daemon=True,
        )
        process.start()
        return process

    def _result(self, worker: int) -> str:
        return str(self._root / f"worker-{worker}.pt")

    def run(self, workers: Sequence[Fate] = (), servers: Sequence[Fate] = ()) -> torch.Tensor:
        """The final parameters, when worker 1 and shard 0 have died all these deaths."""
        fates: dict[tuple[env.Role, int], list[Fate]] = {("worker", 1): [*workers], ("ps", 0): [*servers]}
        living: dict[tuple[env.Role, int], tuple[BaseProcess, Fate | None]] = {}

        def start(role: env.Role, index: int) -> None:
            fate = fates.get((role, index), [])
            mine = fate.pop(0) if fate else None
            living[role, index] = self._start(role, index, mine), mine

        def replace_dead() -> None:
            for (role, index), (process, fate) in [*living.items()]:
                if process.exitcode in (None, 0):
                    continue
                assert process.exitcode == -signal.SIGKILL, f"{role} {index}: {process.exitcode}"
                assert fate is not None, f"{role} {index} was killed by nobody"
                self.deaths.append((role, fate))
                if role == "worker":
                    tell_parameter_server("mortals", self._addresses, index, process.name)
                start(role, index)

        try:
            for shard in range(self._shards):
                start("ps", shard)
            for worker in range(WORKERS):
                start("worker", worker)
            self._until(lambda: self._over(living), replace_dead)
        finally:
            for process, _ in living.values():
                process.kill()
                process.join()
        finals = [torch.load(self._result(worker)) for worker in range(WORKERS)]
        assert all(torch.equal(finals[0], other) for other in finals)
        final: torch.Tensor = finals[0]
        return final

    def _over(self, living: Mapping[tuple[env.Role, int], tuple[BaseProcess, Fate | None]]) -> bool:
        return all(living["worker", worker][0].exitcode == 0 for worker in range(WORKERS))

    def _until(self, over: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
        end = time.monotonic() + LIMIT
        while not over():
            assert time.monotonic() < end, f"the job does not end; it has died {self.deaths}"
            meanwhile()
            time.sleep(0.005)
