"""What a thousand workers cost a parameter server that only has to know of them.

`python -m benchmarks.crowd` starts a parameter server, lets `--workers` simulated ones join it from one
process, keeps their leases for some seconds, and lets all of them wait for the next version. One of them then
makes that version. It prints the processor time of the server for a join, its share of a core while
all leases are kept, its threads and memory while all wait, and how many were served how soon.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import psutil
import torch

from benchmarks.figures import Figure, write
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.codec.base import Payload
from elastic_ps.contract.env import ProcessEnvironment
from elastic_ps.core.partition import Layout, Rule
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.convert import layout_from_message
from elastic_ps.transport.ways import connect
from elastic_ps.worker.model.description import ModelDescription
from elastic_ps.worker.wire.client import Client
from elastic_ps.worker.wire.dialogue import Step

LEASE = 10.0
"""Seconds; a worker is heard of three times in that."""
BATCH = 16


def model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    return layers, torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)


@contextlib.contextmanager
def server() -> Iterator[tuple[str, psutil.Process]]:
    """A parameter server: its address, and the process."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        port, http = one.getsockname()[1], two.getsockname()[1]
    address = f"tcp:127.0.0.1:{port}"
    spec = {
        "entrypoint": "nothing:main",
        "worker": {"leaseDuration": f"{LEASE:g}s", "replicas": 1},
        "parameterServer": {"checkpoint": {"interval": "3600s"}},
    }
    environment = ProcessEnvironment(
        job="crowd",
        spec=TrainingJobSpec.model_validate(spec),
        role="ps",
        index=0,
        addresses=(address,),
        bind=address,
        http=f"127.0.0.1:{http}",
        run="benchmark",
        instance=uuid.uuid4().hex,
    )
    with tempfile.TemporaryDirectory() as name, (Path(name) / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "elastic_ps.server"],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment.to_variables()},
            stdout=log,
            stderr=log,
        )
        try:
            yield address, psutil.Process(process.pid)
        except BaseException:
            print((Path(name) / "log").read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            process.kill()
            process.wait()


def used(process: psutil.Process) -> float:
    """Seconds of processor time."""
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def from_many_hosts() -> Iterator[None]:
    """Connections come from 16 addresses: one address may not have all of a server's sockets."""
    connect_to, numbers = socket.create_connection, itertools.count()

    def create_connection(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        return connect_to(address, timeout, (f"127.0.1.{next(numbers) % 16}", 0))

    with mock.patch.object(socket, "create_connection", create_connection):
        yield


def initialise(client: Client, layout: Layout) -> None:
    for bucket in layout.buckets:
        client.initialise(bucket, memoryview(bytearray(bucket.nbytes)))
    client.initialised()


def make_version(client: Client, layout: Layout, records: int) -> None:
    """One step of one worker."""
    request = pb.TakeRequest(records=records, epochs=1, batch=BATCH, wait=True)
    while (granted := client.take(request)).pending:
        pass
    samples = sum(taken.stop - taken.start for taken in granted.ranges)
    step = Step(member_id=client.member_id, number=1, base=0, version=0, samples=samples)
    for bucket in layout.buckets:
        if bucket.rule is not Rule.CONSTANT:
            client.push(bucket, step, 0, Payload(memoryview(bytes(bucket.nbytes))), None)
    client.finish(step, 0, pb.FinishRequest(ranges=granted.ranges))


def wait_for(client: Client, version: int, layout: Layout) -> float:
    """Blocks until the values are there; returns when that was."""
    wanted = pb.PullRequest(version=version, buckets=[b.index for b in layout.buckets])
    while True:
        arrived = 0
        for reply, body in client.pull(client.member_id, 0, wanted):
            if reply.WhichOneof("kind") == "bucket":
                body.read_into(memoryview(bytearray(body.size)))
                arrived += 1
        if arrived == len(layout.buckets):
            return time.monotonic()


def keep_leases(clients: Sequence[Client], seconds: float) -> None:
    """Each is heard of three times in a lease, spread over the time."""
    until, pause = time.monotonic() + seconds, LEASE / 3 / len(clients)
    due = time.monotonic()
    while True:
        for client in clients:
            due += pause
            time.sleep(max(0.0, due - time.monotonic()))
            client.heartbeat()
            if time.monotonic() > until:
                return


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=15.0, help="for which leases are kept")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parsed = parser.parse_args()
    count = parsed.workers
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    module, optimizer = model()
    described = ModelDescription(module, optimizer)
    settings = described.settings(optimizer)
    with from_many_hosts(), server() as (address, process):
        clients = [Client("crowd", index, [connect(address)]) for index in range(count)]
        try:
            joined = clients[0].join(described.specs, described.optimizer, settings)
            layout = layout_from_message(joined.layout)
            initialise(clients[0], layout)
            began = used(process)
            for client in clients[1:]:
                client.join(described.specs, described.optimizer, settings)
            join = (used(process) - began) / (count - 1)
            print(f"a join                    {join * 1e3:8.2f} ms of processor time")

            began, since = used(process), time.monotonic()
            keep_leases(clients, parsed.seconds)
            share = (used(process) - began) / (time.monotonic() - since)
            print(f"leases of {count} workers    {share * 100:8.1f} % of a core")

            with ThreadPoolExecutor(count) as pool:
                waiting = [pool.submit(wait_for, client, 1, layout) for client in clients[1:]]
                beats = threading.Thread(target=keep_leases, args=(clients, 5.0))
                beats.start()
                beats.join()
                memory = process.memory_info().rss / 2**20
                print(
                    f"while {count - 1} calls wait      {process.num_threads():8} threads, {memory:.0f} MiB"
                )
                began = time.monotonic()
                make_version(clients[0], layout, BATCH)
                late = sorted(call.result() - began for call in waiting)
            print(f"{len(late)} of {count - 1} served, the last after {late[-1]:.2f} s")
        finally:
            for client in clients:
                client.close()
    limits = [
        Figure("a join", join * 1e3, 1.0, "ms", "target"),
        Figure("leases", share * 100, 5.0, "%", "target"),
    ]
    write(parsed.json, limits)


if __name__ == "__main__":
    main()
