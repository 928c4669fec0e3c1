"""The launcher with real processes, which count instead of training."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_ps.api.job import TrainingJob
from elastic_ps.api.status import MemberStatus
from elastic_ps.errors import CannotListen, UserError
from elastic_ps.local import Launcher, Options, Outcome, ScaleAt, processes, supervisor
from elastic_ps.local.issuer import Issuer
from elastic_ps.local.plan import cores_of
from elastic_ps.local.report import build_report
from elastic_ps.local.state import JobDirectory
from elastic_ps.process.lifecycle import usable_cores
from tests.testing import machine
from tests.testing.forked import forked
from tests.testing.launching import PROGRAMS, gone, make_job, wait_for_end, wait_for_workers, workers_of
from tests.testing.polling import LIMIT, eventually

FOREVER = 10_000_000


@contextmanager
def launched(job: TrainingJob, root: Path, options: Options | None = None) -> Iterator[Launcher]:
    options = options or Options(root=root, programs=PROGRAMS)
    pids: set[int] = set()
    with Launcher(job, options) as launcher:
        launcher.start()
        yield launcher
        pids |= {process.pid for process in launcher.status().processes}
    assert all(gone(pid) for pid in pids)


def end_of(launcher: Launcher) -> Outcome:
    wait_for_end(launcher)
    return launcher.outcome()


def training(launcher: Launcher, count: int) -> dict[int, int]:
    return wait_for_workers(launcher, lambda workers: len(workers) == count, f"{count} workers train")


def test_a_job_runs_to_its_end(tmp_path: Path) -> None:
    with launched(make_job(records=800, workers=2), tmp_path) as launcher:
        outcome = end_of(launcher)
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    report = build_report(outcome)
    assert (report["records_applied"], report["test_accuracy"]) == (800, 0.975)
    assert len(report["loss"]) == report["version"] == 100
    assert sum(each["steps"] for each in report["workers"]) == 100
    assert outcome.status.phase == "Succeeded"
    assert [process.exit for process in outcome.status.processes] == [0, 0, 0]


def test_scaling_leaves_those_who_train_alone(tmp_path: Path) -> None:
    with launched(make_job(records=FOREVER, workers=2), tmp_path) as launcher:
        before = training(launcher, 2)
        launcher.directory.scale(4)
        grown = training(launcher, 4)
        launcher.directory.scale(1)
        shrunk = training(launcher, 1)
        assert {0: before[0]} == shrunk
        assert {index: grown[index] for index in (0, 1)} == before
        launcher.directory.scale(3)
        again = training(launcher, 3)
        assert again[0] == before[0]
        assert again[1] != before[1]
        launcher.stop("enough")
        outcome = end_of(launcher)
    assert outcome.status.failures == 0
    left = [member for member in _members(outcome) if member.worker in (1, 2, 3)]
    assert {member.state for member in left} == {"left"}


def test_the_schedule_is_followed_by_version(tmp_path: Path) -> None:
    schedule = (ScaleAt(20, 3), ScaleAt(400, 1), ScaleAt(10**6, 2))
    options = Options(root=tmp_path, programs=PROGRAMS, schedule=schedule)
    with launched(make_job(records=8000, workers=1, pair_from=30), tmp_path, options) as launcher:
        outcome = end_of(launcher)
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    assert outcome.unreached == (ScaleAt(10**6, 2),)
    joined = {member.worker: member.joined_version for member in _members(outcome)}
    assert joined[0] == 0
    assert joined[1] >= 20
    texts = [event.text for event in outcome.record.events if event.kind == "scale"]
    assert [text.split(" at ")[0] for text in texts] == [
        "scaled from 1 to 3 workers",
        "scaled from 3 to 1 workers",
    ]


def test_a_job_that_cannot_be_scaled_since_the_disk_is_full_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.fails(monkeypatch, JobDirectory, "scale", machine.full())
    options = Options(root=tmp_path, programs=PROGRAMS, schedule=(ScaleAt(20, 2),))
    with launched(make_job(records=2000, workers=1), tmp_path, options) as launcher:
        outcome = end_of(launcher)
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    [text] = [event.text for event in outcome.record.events if "was not scaled" in event.text]
    assert "No space left on device" in text
    assert "elastic-ps scale" in text


def test_a_job_goes_on_when_the_system_gives_no_process_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    class Scarce(processes.Child):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            tried.append(named["log"].stem)
            if len(tried) in (2, 3):
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            super().__init__(*arguments, **named)

    # The system is out of processes for two of them, and no test may use them all up.
    monkeypatch.setattr(supervisor, "Child", Scarce)
    with launched(make_job(records=800, workers=2), tmp_path) as launcher:
        outcome = end_of(launcher)
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    assert tried == ["ps-0", "worker-0", "worker-1", "worker-0", "worker-1"], "one holds up no other"
    texts = [event.text for event in outcome.record.events if "could not be started" in event.text]
    assert [text.partition(" could")[0] for text in texts] == ["worker 0", "worker 1"]
    assert all("temporarily unavailable" in text for text in texts)


def test_a_job_goes_on_when_the_home_is_read_only_while_a_worker_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only = threading.Event()
    broken = OSError(errno.EROFS, "Read-only file system")
    machine.fails(monkeypatch, processes, "opened", broken, read_only.is_set)
    with launched(make_job(records=FOREVER, workers=2), tmp_path) as launcher:
        before = training(launcher, 2)
        read_only.set()
        os.kill(before[1], signal.SIGKILL)
        events = launcher.record.events
        [text] = eventually(
            lambda: [event.text for event in events if "could not be started" in event.text], "a warning"
        )
        read_only.clear()
        assert training(launcher, 2)[0] == before[0]
    assert text.startswith("worker 1 could not be started")
    assert "Read-only file system" in text


def test_a_job_whose_first_process_cannot_be_started_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.fails(monkeypatch, processes, "opened", OSError(errno.EROFS, "Read-only file system"))
    with launched(make_job(), tmp_path) as launcher:
        assert launcher.wait(timedelta(seconds=LIMIT))
    assert launcher.status().phase == "Failed"
    assert "Read-only file system" in launcher.status().message


def test_a_job_goes_on_when_no_certificate_can_be_written_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = itertools.count(1)
    machine.fails(monkeypatch, Issuer, "of", machine.full(), lambda: next(asked) == 2)
    with launched(make_job(records=FOREVER, workers=2), tmp_path) as launcher:
        training(launcher, 2)
        launcher.stop("both train")
        outcome = end_of(launcher)
    assert next(asked) == 5, "one for each, and once more for worker 0"
    [text] = [event.text for event in outcome.record.events if "could not be started" in event.text]
    assert "No space left on device" in text


def test_a_change_is_taken_over_when_the_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = threading.Event()

    def change(job: TrainingJob) -> TrainingJob:
        consistency = {"mode": "async"}
        spec = job.spec.model_dump(by_alias=True, exclude_defaults=True) | {"consistency": consistency}
        spec["worker"]["replicas"] = 3
        return job.model_copy(update={"spec": type(job.spec).model_validate(spec)})

    machine.fails(monkeypatch, JobDirectory, "write_mutable", machine.full(), full.is_set)
    with launched(make_job(records=FOREVER, workers=2), tmp_path) as launcher:
        training(launcher, 2)
        full.set()
        launcher.directory.edit(change)

        def told() -> list[str]:
            return [event.text for event in launcher.record.events if "not applied yet" in event.text]

        eventually(told, "a warning")
        full.clear()
        training(launcher, 3)
        assert '"mode":"async"' in (launcher.directory.path / "tuning.json").read_text().replace(" ", "")
        assert len(told()) == 1


def test_a_job_goes_on_although_the_log_of_a_worker_was_deleted(tmp_path: Path) -> None:
    with launched(make_job(records=FOREVER, workers=2), tmp_path) as launcher:
        before = training(launcher, 2)
        launcher.directory.log("worker", 1).unlink()
        os.kill(before[1], signal.SIGKILL)
        eventually(lambda: workers_of(launcher.status()).get(1) not in (None, before[1]), "a replacement")


def test_what_is_deleted_for_a_new_run_is_told(tmp_path: Path) -> None:
    job = make_job(records=80, workers=1)
    old = [JobDirectory(job.name, root=tmp_path).new_checkpoints() for _ in range(3)]
    os.utime(old[1], (1, 1))
    with launched(job, tmp_path) as launcher:
        outcome = end_of(launcher)
    [text] = [event.text for event in outcome.record.events if event.text.startswith("deleting ")]
    assert str(old[1]) in text
    assert [path.is_dir() for path in old] == [True, False, True]


def test_a_model_that_does_not_fit_is_told_once_and_trained(tmp_path: Path) -> None:
    with launched(make_job(records=80, workers=1, value_bytes=10**15), tmp_path) as launcher:
        outcome = end_of(launcher)
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    warnings = [event.text for event in outcome.record.events if event.kind == "warning"]
    memory, disk = (text for text in warnings if "GB" in text)
    assert "of memory on this host" in memory
    assert "checkpoint.keep" in disk


def test_a_killed_worker_is_replaced_and_told_about(tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []
    options = Options(
        root=tmp_path,
        programs=PROGRAMS,
        on_worker_gone=lambda job, addresses, worker, instance, tls: told.append((worker, instance)),
    )
    with launched(make_job(records=FOREVER, workers=2, spec=_limit(0)), tmp_path, options) as launcher:
        before = training(launcher, 2)
        os.kill(before[1], signal.SIGKILL)
        eventually(lambda: workers_of(launcher.status()).get(1) not in (None, before[1]), "a replacement")
        assert workers_of(launcher.status())[0] == before[0]
        assert [worker for worker, _ in eventually(lambda: told, "it is told")] == [1]
        assert any("SIGKILL" in event.text for event in launcher.record.events)
        assert launcher.status().failures == 0


@pytest.mark.parametrize(
    ("where", "call", "error"),
    [
        (ThreadPoolExecutor, "submit", RuntimeError("can't start new thread")),
        (Issuer, "own", OSError(errno.ESTALE, "Stale file handle")),
    ],
)
def test_a_killed_worker_is_replaced_although_nobody_can_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: type, call: str, error: Exception
) -> None:
    with launched(make_job(records=FOREVER, workers=2), tmp_path) as launcher:
        before = training(launcher, 2)
        machine.fails(monkeypatch, where, call, error)
        os.kill(before[1], signal.SIGKILL)
        eventually(lambda: workers_of(launcher.status()).get(1) not in (None, before[1]), "a replacement")
        assert workers_of(launcher.status())[0] == before[0]


def test_a_launcher_that_gets_no_thread_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.fails(monkeypatch, supervisor, "Poller", RuntimeError("can't start new thread"))
    with launched(make_job(), tmp_path) as launcher:
        assert launcher.wait(timedelta(seconds=LIMIT))
    assert (launcher.status().phase, launcher.status().message) == ("Failed", "can't start new thread")


def test_a_server_that_is_started_again_is_told_which_version_was_on_disk(tmp_path: Path) -> None:
    """Else it would begin anew while the volume of the checkpoints is away."""
    with launched(make_job(workers=1, durable=7), tmp_path) as launcher:
        training(launcher, 1)
        eventually(lambda: launcher.record.durable == 7, "the launcher knows of it")
        (server,) = [process for process in launcher.status().processes if process.role == "ps"]
        os.kill(server.pid, signal.SIGKILL)
        log = launcher.directory.log("ps", 0)
        eventually(lambda: "serving auto 7" in log.read_text(), "the second server is told")
        assert "serving no None" in log.read_text()


def test_a_worker_that_someone_else_asked_to_leave_is_replaced(tmp_path: Path) -> None:
    with launched(make_job(records=FOREVER, workers=2, spec=_limit(0)), tmp_path) as launcher:
        before = training(launcher, 2)
        os.kill(before[1], signal.SIGTERM)
        eventually(lambda: workers_of(launcher.status()).get(1) not in (None, before[1]), "a replacement")
        assert workers_of(launcher.status())[0] == before[0]
        text = f"worker 1 (pid {before[1]}) left because it was asked to"
        assert text in [event.text for event in launcher.record.events]
        assert launcher.status().failures == 0


def test_a_script_that_fails_is_tried_again_until_the_limit(tmp_path: Path) -> None:
    job = make_job(records=FOREVER, workers=2, fail={"1": 3}, spec=_limit(2))
    with launched(job, tmp_path) as launcher:
        outcome = end_of(launcher)
    assert (outcome.verdict.phase, outcome.verdict.reason) == ("Failed", "BackoffLimitExceeded")
    assert "fake worker 1 ends with 3" in outcome.verdict.message
    assert outcome.status.failures == 3
    log = launcher.directory.log("worker", 1).read_text()
    assert log.count("ends with 3") == 3, "the log is kept over restarts"


def test_a_worker_that_crashes_again_and_again_fails_the_job(tmp_path: Path) -> None:
    job = make_job(records=FOREVER, workers=2, crash={"1": int(signal.SIGSEGV)}, spec=_limit(1))
    with launched(job, tmp_path) as launcher:
        outcome = end_of(launcher)
    assert (outcome.verdict.phase, outcome.verdict.reason) == ("Failed", "BackoffLimitExceeded")
    assert "worker 1 was killed by SIGSEGV" in outcome.verdict.message
    assert outcome.status.failures == 2
    assert outcome.record.last is not None
    assert outcome.record.last.progress.version > 0, "the other one trained"


def test_a_job_that_cannot_work_is_not_tried_again(tmp_path: Path) -> None:
    with launched(make_job(records=FOREVER, workers=2, fail={"0": 78}), tmp_path) as launcher:
        outcome = end_of(launcher)
    assert outcome.verdict.reason == "InvalidJob"
    assert "fake worker 0 ends with 78" in outcome.verdict.message


def test_a_parameter_server_that_cannot_start_fails_the_job(tmp_path: Path) -> None:
    job = make_job(server_fails=True, spec={"runPolicy": {"backoffLimit": 1}})
    with launched(job, tmp_path) as launcher:
        outcome = end_of(launcher)
    assert outcome.verdict.reason == "BackoffLimitExceeded"
    assert "the fake server cannot start" in outcome.verdict.message
    assert outcome.record.last is None, "nobody trained"


def test_a_machine_without_free_ports_is_told_in_words(tmp_path: Path) -> None:
    options = Options(root=tmp_path, programs=PROGRAMS, ports=range(10_000, 10_000))
    with (
        pytest.raises(CannotListen, match="a job needs 2 free ports"),
        launched(make_job(), tmp_path, options),
    ):
        pass


def test_the_deadline_ends_the_job(tmp_path: Path) -> None:
    job = make_job(records=FOREVER, spec={"runPolicy": {"activeDeadlineSeconds": 2}})
    with launched(job, tmp_path) as launcher:
        assert end_of(launcher).verdict.reason == "DeadlineExceeded"


def test_a_script_without_data_succeeds_when_its_workers_end(tmp_path: Path) -> None:
    with launched(make_job(steps=5), tmp_path) as launcher:
        assert end_of(launcher).verdict.phase == "Succeeded"


def test_workers_that_end_before_the_data_does_are_a_failure(tmp_path: Path) -> None:
    with launched(make_job(records=FOREVER, steps=5), tmp_path) as launcher:
        outcome = end_of(launcher)
    assert outcome.verdict.reason == "RecordsLeft"
    assert f"80 of {FOREVER}" in outcome.verdict.message


def test_a_worker_that_leaves_records_of_its_fixed_share_is_a_failure(tmp_path: Path) -> None:
    """Worker 1 still trains."""
    fixed = {"consistency": {"deterministic": True}}
    with launched(make_job(records=FOREVER, steps=5, apart=1, spec=fixed), tmp_path) as launcher:
        outcome = end_of(launcher)
    assert outcome.verdict.reason == "RecordsLeft"
    assert outcome.verdict.message.startswith(f"worker 0 has ended its script, but only 40 of {FOREVER}")


def test_several_shards(tmp_path: Path) -> None:
    job = make_job(records=200, spec={"parameterServer": {"replicas": 3}})
    with launched(job, tmp_path) as launcher:
        outcome = end_of(launcher)
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    assert len(set(outcome.status.addresses) | set(outcome.status.http)) == 6


def test_a_worker_that_ignores_the_request_and_all_it_started_are_killed(tmp_path: Path) -> None:
    options = Options(root=tmp_path, programs=PROGRAMS, leave_grace=timedelta(seconds=0.5))
    job = make_job(records=FOREVER, workers=1, stubborn=True, child=True)
    with launched(job, tmp_path, options) as launcher:
        [pid] = training(launcher, 1).values()
        [child] = psutil.Process(pid).children()
        launcher.stop("enough")
        outcome = end_of(launcher)
        assert gone(child.pid)
    assert any("killing worker 0" in event.text for event in outcome.record.events)


def soon(root: Path) -> Options:
    """A finished job does not wait for a minute."""
    return Options(root=root, programs=PROGRAMS, finished_grace=timedelta(seconds=0.5))


def test_a_worker_that_stays_stopped_keeps_a_finished_job_open_for_a_while_only(tmp_path: Path) -> None:
    job = make_job(records=2000, workers=2, stops=1, pair_from=0)
    with launched(job, tmp_path, soon(tmp_path)) as launcher:
        outcome = end_of(launcher)
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    [told] = [event.text for event in outcome.record.events if "killing" in event.text]
    assert "killing worker 1: the training is done, and it has been stopped" in told


def test_a_worker_that_never_joins_keeps_a_finished_job_open_for_a_while_only(tmp_path: Path) -> None:
    job = make_job(records=200, workers=2, apart=1)
    with launched(job, tmp_path, soon(tmp_path)) as launcher:
        outcome = end_of(launcher)
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    told = [event.text for event in outcome.record.events if "elastic_ps.connect()" in event.text]
    assert len(told) == 1
    assert told[0].startswith("ending worker 1: the training is finished")


def test_what_a_killed_worker_started_ends_with_it(tmp_path: Path) -> None:
    with launched(make_job(records=FOREVER, workers=1, child=True), tmp_path) as launcher:
        [pid] = training(launcher, 1).values()
        [child] = psutil.Process(pid).children()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: gone(child.pid), "the child of the killed worker ends")


def test_an_exception_leaves_no_process_and_no_thread(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), launched(make_job(records=FOREVER), tmp_path) as launcher:  # noqa: PT012
        pids = training(launcher, 2).values()
        _ = 1 // 0
    assert all(gone(pid) for pid in pids)
    eventually(lambda: set(threading.enumerate()) <= threads, "its threads end")


def test_what_a_job_says_is_its_users_alone(tmp_path: Path) -> None:
    """Arguments and output may hold what is nobody else's business."""
    umask = os.umask(0o022)
    try:
        with launched(make_job(records=8), tmp_path) as launcher:
            end_of(launcher)
    finally:
        os.umask(umask)
    path = launcher.directory.path
    said = [path / "job.json", path / "status.json", *launcher.directory.logs.iterdir()]
    assert {each.stat().st_mode & 0o777 for each in said} == {0o600}
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_name_is_taken_while_the_job_runs_and_free_afterwards(tmp_path: Path) -> None:
    with launched(make_job(records=FOREVER), tmp_path) as first:
        with pytest.raises(UserError, match="already runs"):
            Launcher(make_job(records=8), Options(root=tmp_path, programs=PROGRAMS))
        training(first, 2)
        first.stop("enough")
        end_of(first)
    with launched(make_job(records=8), tmp_path) as second:
        assert end_of(second).verdict.phase == "Succeeded"
    assert second.checkpoints != first.checkpoints
    assert list(first.checkpoints.glob("version-*")), "the stopped run's checkpoint is kept"


@pytest.mark.nightly
def test_a_name_is_free_afterwards_although_a_process_was_forked_meanwhile(tmp_path: Path) -> None:
    """It has the launcher's files open, too: a DataLoader's process, in a program that runs jobs."""
    with ExitStack() as stack:
        with launched(make_job(records=FOREVER), tmp_path) as first:
            training(first, 2)  # a fork in the middle of a Popen would hold the pipe that this waits for
            stack.enter_context(forked())
            first.stop("enough")
            end_of(first)
        assert first.directory.launcher() is None
        with launched(make_job(records=8), tmp_path) as second:
            assert end_of(second).verdict.phase == "Succeeded"


def test_a_forked_process_that_leaves_the_with_block_gives_nothing_back(tmp_path: Path) -> None:
    """As where an exception goes up in one: the job runs on, in the process that has started it."""
    with launched(make_job(records=FOREVER), tmp_path) as launcher:
        training(launcher, 2)
        leave = multiprocessing.get_context("fork").Process(target=launcher.__exit__, args=(None, None, None))
        leave.start()
        leave.join(LIMIT)
        assert leave.exitcode == 0
        assert launcher.directory.launcher() == os.getpid()
        training(launcher, 2)
        launcher.stop("enough")
        end_of(launcher)
    assert launcher.directory.launcher() is None


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("heard_by", ["who waits", "another thread"])
def test_an_exception_of_a_signals_handler_ends_the_wait_but_not_the_job(
    tmp_path: Path, heard_by: str
) -> None:
    """Python runs handlers in the main thread, also of a signal that does not wake that thread.

    So it is with a signal that comes just before the wait. The job goes on until the `with` block ends.
    """
    waiting, main = threading.Event(), threading.get_ident()

    def interrupt() -> None:
        waiting.wait(LIMIT)
        signal.pthread_kill(main if heard_by == "who waits" else threading.get_ident(), signal.SIGINT)

    def give_up() -> None:
        launcher.stop("nobody heard the signal")

    def wait() -> None:
        waiting.set()
        launcher.wait()

    with launched(make_job(records=FOREVER), tmp_path) as launcher:
        training(launcher, 2)
        thread, impatient = threading.Thread(target=interrupt), threading.Timer(LIMIT / 4, give_up)
        thread.start()
        impatient.start()
        with pytest.raises(KeyboardInterrupt):
            wait()
        impatient.cancel()
        thread.join()
        assert not launcher.stopping
        assert not launcher.wait(timedelta(0))
        training(launcher, 2)
    assert launcher.outcome().verdict.reason == "Stopped"


def test_a_trace_of_all_processes_is_one_file(tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    options = Options(root=tmp_path / "state", programs=PROGRAMS, trace=target)
    with launched(make_job(records=80), tmp_path, options) as launcher:
        end_of(launcher)
    events = json.loads(target.read_text())["traceEvents"]
    assert {event["name"] for event in events} == {"step"}
    assert len({event["pid"] for event in events}) == 2
    assert not list(launcher.directory.path.glob("trace-*"))


def test_a_process_that_ends_when_it_is_told_to_leaves_nothing_behind(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True)"
    log = tmp_path / "log"
    with closing(processes.Lifeline()) as lifeline:
        command = [sys.executable, "-c", code]
        child = processes.Child(command, variables=os.environ, log=log, lifeline=lifeline)
        other = eventually(lambda: int(log.read_text() or 0), "it starts another one")
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        child.terminate()
        assert child.poll() == 0
    eventually(lambda: gone(other), "the other one ends, too")


def test_cores_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with launched(make_job(steps=3, workers=1), tmp_path) as launcher:
        end_of(launcher)
    threads = max(1, usable_cores() // 2)
    assert f"has {threads} threads" in launcher.directory.log("worker", 0).read_text()


def test_workers_are_bound_to_cores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = os.sched_getaffinity(0)
    options = Options(root=tmp_path, programs=PROGRAMS, bind=True)
    with launched(make_job(steps=3, workers=2), tmp_path, options) as launcher:
        end_of(launcher)
    for worker in range(2):
        own = cores_of(worker, workers=2, cores=cores)
        log = launcher.directory.log("worker", worker).read_text()
        assert f"runs on cores {sorted(own)}" in log
        assert f"has {len(own)} threads" in log
    assert os.sched_getaffinity(0) == cores


def _members(outcome: Outcome) -> list[MemberStatus]:
    assert outcome.record.last is not None
    return outcome.record.last.members


def _limit(failures: int) -> dict[str, dict[str, int]]:
    return {"runPolicy": {"backoffLimit": failures}}
