"""Jobs of real processes with certificates: what a process with one, or none, can do to the others."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest
from google.protobuf.message import Message

from elastic_ps.api.job import TrainingJob
from elastic_ps.contract.certificates import validity_of
from elastic_ps.contract.identity import Role
from elastic_ps.contract.schemes import Scheme
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import RefusalCode, Refused, TransportError
from elastic_ps.local import Launcher, Options
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport import ways
from elastic_ps.transport.base import Frame
from elastic_ps.transport.credentials import Credentials
from tests.integration.test_faults import LIMIT, RECORDS, job
from tests.testing.certificates import write
from tests.testing.launching import forks, version_of, wait_for_workers
from tests.testing.polling import eventually

SOON = timedelta(seconds=20)
VICTIM = 0
HUGE = 1 << 31
NO = (RefusalCode.FORBIDDEN, RefusalCode.UNKNOWN_METHOD)


def calls(name: str) -> Sequence[Message]:
    """What rules a job whose ports are open: all in the victim's name, or in that of a parameter server."""
    caller = pb.Caller(job=name, term=1, worker=VICTIM, incarnation=1, call=1 << 40)
    return [
        pb.ConfigureRequest(job=name, term=HUGE, source="x", number=HUGE),
        pb.AdvanceRequest(job=name, version=HUGE, attempt=HUGE, term=HUGE, source="x", number=HUGE),
        pb.StateRequest(job=name, term=1, source="x", number=HUGE),
        pb.SumRequest(job=name, term=1),
        pb.HeldRequest(job=name, term=HUGE),
        pb.JoinRequest(caller=caller, pid=1, host="x", instance="thief"),
        pb.PushRequest(caller=caller, weight=1, codec="none"),
        pb.TakeRequest(caller=caller, records=RECORDS, epochs=1, batch=1),
        pb.FinishRequest(caller=caller, samples=RECORDS),
        pb.ReleaseRequest(caller=caller, abandoned=True),
        pb.LeaveRequest(caller=caller),
        pb.StopRequest(caller=caller, reason="it is mine"),
        pb.HeartbeatRequest(caller=caller),
        pb.GoneRequest(job=name, worker=VICTIM),
        pb.EvaluateRequest(job=name, process="x"),
        pb.ReadFileRequest(job=name, version=0, file="manifest.json"),
        pb.DeclareTensorRequest(
            caller=caller, instance="x", tensor=pb.Named(name="x", shape=[1], dtype="int8")
        ),
        pb.PushTensorRequest(caller=caller, instance="x", name="x", rule="zero"),
        pb.PullTensorRequest(caller=caller, name="x"),
        pb.FreeTensorRequest(caller=caller, name="x"),
    ]


def accepted(address: str, requests: Sequence[Message], credentials: Credentials | None) -> list[str]:
    """The calls that were not refused because of the certificate, or, without one, got any answer at all."""
    found = []
    for request in requests:
        method = type(request).__name__.removesuffix("Request")
        with contextlib.closing(ways.connect(address, credentials=credentials)) as connection:
            try:
                list(connection.call(method, Frame(request.SerializeToString()), timeout=SOON))
                found.append(method)
            except Refused as refusal:
                if credentials is None or refusal.code not in NO:
                    found.append(f"{method}: {refusal}")
            except TransportError as error:
                if credentials is not None:
                    found.append(f"{method}: {error}")
    return found


@contextlib.contextmanager
def running(wanted: TrainingJob, options: Options) -> Iterator[Launcher]:
    with Launcher(wanted, options) as launcher:
        launcher.start()
        wait_for_workers(launcher, lambda workers: set(workers) == {0, 1}, "both train")
        eventually(lambda: version_of(launcher) > 2, "some versions")
        yield launcher
        assert launcher.wait(LIMIT), launcher.status()


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_thief_of_a_workers_certificate_harms_that_worker_only(tmp_path: Path, transport: Scheme) -> None:
    history = tmp_path / "history"
    wanted = job("besieged", tmp_path, server={"replicas": 2, "durability": "standby"}, records=RECORDS)
    options = Options(forks=forks(), root=tmp_path, history=history, transport=transport)
    with running(wanted, options) as launcher:
        tls = launcher.directory.tls
        modes = {stat.S_IMODE(path.stat().st_mode) for path in tls.glob("*/*")}
        assert modes == {0o600}
        assert stat.S_IMODE(tls.stat().st_mode) == 0o700
        assert (tls / "operator-0" / "tls.key").exists(), "it can be used although the disk is full by then"
        thief, version = Credentials(tls / "worker-1"), version_of(launcher)
        ports = [*launcher.status().addresses, *launcher.standbys]
        for port in ports:
            assert accepted(f"{transport}:{port}", calls("besieged"), thief) == []
        assert accepted(f"{transport}:{ports[0]}", calls("besieged")[:3], None) == []
        eventually(lambda: version_of(launcher) > version, "training goes on")
        (tmp_path / "hurry").touch()
    outcome = launcher.outcome()
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    assert outcome.status.failures == 0
    assert [p.restarts for p in outcome.status.processes] == [0] * len(outcome.status.processes)
    assert check(read(history), Data(RECORDS, 1)) == []


@pytest.mark.nightly
def test_certificates_end_during_a_run_and_nobody_notices(tmp_path: Path) -> None:
    """They last for seconds. A worker and a parameter server are killed meanwhile, so all connect anew."""
    history, life = tmp_path / "history", timedelta(seconds=6)
    wanted = job("renewed", tmp_path, records=RECORDS)
    over = threading.Event()

    def renew(launcher: Launcher) -> int:
        """Replace every certificate; returns how many there are."""
        assert launcher.issuer is not None
        directories = [path for path in launcher.directory.tls.iterdir() if (path / "tls.key").exists()]
        for directory in directories:
            role, _, index = directory.name.partition("-")
            part, ca = cast(Role, role), launcher.issuer.authority
            write(directory, ca, part, int(index), job=launcher.run, lifetime=life)
        return len(directories)

    def renew_always(launcher: Launcher) -> None:
        while not over.wait(1.0):
            renew(launcher)

    with running(wanted, Options(forks=forks(), root=tmp_path, history=history, transport="tcp")) as launcher:
        renewing = threading.Thread(target=renew_always, args=(launcher,))
        assert renew(launcher) >= 3
        (_, first) = validity_of((launcher.directory.tls / "server-0" / "tls.crt").read_bytes())
        renewing.start()
        try:
            eventually(lambda: datetime.now(UTC) > first, "the first ones have ended")
            version = version_of(launcher)
            before = wait_for_workers(launcher, lambda workers: set(workers) == {0, 1}, "both train")
            for process in launcher.status().processes:
                if (process.role, process.index) in (("worker", 1), ("ps", 0)):
                    os.kill(process.pid, signal.SIGKILL)
            wait_for_workers(
                launcher, lambda workers: set(workers) == {0, 1} and workers[1] != before[1], "again"
            )
            eventually(lambda: version_of(launcher) > version, "training goes on")
            (tmp_path / "hurry").touch()
            assert launcher.wait(LIMIT), launcher.status()
        finally:
            over.set()
            renewing.join()
    outcome = launcher.outcome()
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    assert check(read(history), Data(RECORDS, 1)) == []


@pytest.mark.nightly
def test_an_insecure_job_has_no_certificates_and_trains(tmp_path: Path) -> None:
    wanted = job("open", tmp_path, records=RECORDS)
    with running(wanted, Options(forks=forks(), root=tmp_path, transport="tcp", tls=False)) as launcher:
        assert not launcher.directory.tls.exists()
        (tmp_path / "hurry").touch()
    assert launcher.outcome().verdict.phase == "Succeeded"
