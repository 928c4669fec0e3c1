"""Memory and threads stay as they are: over time, and on the parameter server with more workers."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

from elastic_ps.contract.env import ProcessEnvironment, inherited
from elastic_ps.local import Launcher, LocalStatus, Options
from elastic_ps.transport.grpc import GrpcConnection
from elastic_ps.worker.session import Session
from tests.testing.addresses import addresses
from tests.testing.harness import Numbers, make_mlp, make_spec, running_job
from tests.testing.launching import forks, make_job, wait_for_end
from tests.testing.oracle import mse, ranges_of
from tests.testing.polling import LIMIT, eventually
from tests.testing.trained import training

MB = 1e6


@pytest.mark.nightly
def test_two_thousand_steps(tmp_path: Path) -> None:
    """Between step 400 and the end, no process gains a thread, or more than a few megabytes."""
    job = make_job(
        workers=1,
        spec={"entrypoint": "tests.testing.scripts.steady:main"},
        records=2400,
        batch_size=1,
        widths=[6, 8, 1],
    )
    samples: dict[int, list[tuple[float, int]]] = {}
    latest: dict[int, tuple[float, int]] = {}

    def look(status: LocalStatus) -> None:
        """A look counts when the next one says that the job is not near its end, where code is loaded."""
        version = status.server.progress.version if status.server else 0
        if version < 2300:
            for pid, sample in latest.items():
                samples.setdefault(pid, []).append(sample)
        latest.clear()
        for process in status.processes:
            if process.exit is None and version > 400:
                with contextlib.suppress(psutil.NoSuchProcess):
                    seen = psutil.Process(process.pid)
                    latest[process.pid] = (seen.memory_info().rss, seen.num_threads())

    with Launcher(job, Options(forks=forks(), root=tmp_path)) as launcher:
        launcher.start()
        wait_for_end(launcher, look)
        outcome = launcher.outcome()
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    assert outcome.status.server is not None
    assert outcome.status.server.progress.version == 2400
    assert len(samples) == 2, "parameter server and worker were looked at"
    for seen in samples.values():
        assert len(seen) >= 5
        quarter = len(seen) // 4 + 1
        early = max(rss for rss, _ in seen[:quarter])
        late = max(rss for rss, _ in seen)
        assert late - early < 6 * MB, f"grew by {(late - early) / MB:.1f} MB"
        # A thread may be there for as long as it answers somebody; one that stays is there in each look.
        assert min(n for _, n in seen[-quarter:]) <= max(n for _, n in seen[:quarter]) + 1


@pytest.mark.nightly
def test_the_servers_memory_does_not_grow_with_the_workers(tmp_path: Path) -> None:
    """Six workers push 38 MB each. Keeping their contributions would take 190 MB more than with one.

    A connection costs some megabytes, whatever the size of the model: gRPC's buffers, a thread, its arena.
    """
    address, http = addresses(2)
    spec = make_spec(parameterServer={"bucketBytes": 1 << 20}, data={"shardRecords": 2})
    environment = ProcessEnvironment(
        job="test", spec=spec, role="ps", index=0, addresses=(address,), bind=address, http=http, resume="no"
    )
    peak: dict[int, int] = {}
    members = [threading.Event() for _ in range(6)]
    log = tmp_path / "ps.log"

    def script(session: Session) -> None:
        model = make_mlp((6, *[1536] * 5, 1))
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
        members[session.worker].set()
        for step, (x, y) in enumerate(session.loader(Numbers(10_000), 2)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if session.worker == 0:
                count = sum(member.is_set() for member in members)
                peak[count] = max(peak.get(count, 0), seen.memory_info().rss)
                if step == 3:
                    for worker in range(1, 6):
                        start(worker)
                if len(members) == count:
                    counted.append(step)
            if len(counted) > 3:
                break

    counted: list[int] = []
    errors: list[BaseException] = []
    threads: list[threading.Thread] = []

    def start(worker: int) -> None:
        def run() -> None:
            session = Session("test", spec, worker, [GrpcConnection(address)])
            try:
                script(session)
            except BaseException as error:  # noqa: BLE001
                errors.append(error)
            finally:
                session.close()

        threads.append(threading.Thread(target=run, name=f"worker-{worker}"))
        threads[-1].start()

    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "elastic_ps.server"],
            env={**inherited(), **environment.to_variables(), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )
    try:
        seen = psutil.Process(server.pid)
        start(0)
        eventually(lambda: not any(t.is_alive() for t in threads), "the workers end", 3 * LIMIT)
    finally:
        server.terminate()
        server.wait(30)
        for thread in threads:
            thread.join(30)
    assert not errors, (errors, log.read_text()[-2000:])
    grown = peak[6] - peak[1]
    assert grown < 80 * MB, f"grew by {grown / MB:.1f} MB"


@pytest.mark.nightly
def test_fifty_times_three_workers_and_one_again(tmp_path: Path) -> None:
    """Nobody leaves a thread, a descriptor or memory behind, as worker or on the parameter server."""
    data, over = Numbers(100_000), threading.Event()
    process, seen = psutil.Process(), list[tuple[int, int, int]]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        for x, y in session.loader(data, 1):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if session.worker == 0 and over.is_set():
                break

    with running_job(tmp_path, transport="grpc", data={"shardRecords": 8}) as job:
        first = job.start(0, script)
        job.until(lambda: training(job, 0), "worker 0 trains")
        for _ in range(50):
            visitors = [job.start(worker, script) for worker in (1, 2)]
            job.until(lambda: training(job, 1) and training(job, 2), "all train")
            for session in job.sessions[1:]:
                session.drain()
            job.until(lambda: not any(v.is_alive() for v in visitors), "two leave")  # noqa: B023 (at once)
            del job.sessions[1:], job.threads[1:]
            gc.collect()
            seen.append((threading.active_count(), process.num_fds(), process.memory_info().rss))
        over.set()
        job.until(lambda: not first.is_alive(), "worker 0 ends")
        commits = job.commits()
    positions = [p for c in commits for r in ranges_of(c) for p in range(r.start, r.stop)]
    assert len(positions) == len(set(positions)), "a record is in the model twice"
    early, late = [max(column) for column in zip(*seen[5:20], strict=True)], seen[-1]
    print("threads, descriptors, bytes, early and after 50 times:", early, late)
    assert late[0] <= early[0] + 8, "one thread for each visit would be 60"
    assert late[1] <= early[1] + 8
    assert late[2] - early[2] < 20 * MB
