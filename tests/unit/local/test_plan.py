"""The launcher's decisions, without processes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from elastic_ps.api.status import FINISHED_GRACE, Divergence, MemberStatus, Progress, ServerStatus
from elastic_ps.contract import exits
from elastic_ps.contract.deaths import describe_exit
from elastic_ps.local.plan import (
    Conclude,
    Desired,
    Kill,
    Observed,
    Process,
    Scale,
    ScaleAt,
    Start,
    StopRequest,
    Terminate,
    Verdict,
    cores_of,
    failures,
    plan,
    restart_delay,
)
from elastic_ps.local.processes import PIDS
from elastic_ps.local.snapshot import overstays, stuck, useful

NOW = 1000.0
DESIRED = Desired(shards=1, workers=2, backoff_limit=1)
SERVER = Process(role="ps", index=0, pid=1, started=NOW - 10, ready=True)
FINISHED = Progress(finished=True, records_expected=100, records_applied=100)
HALF = Progress(records_expected=100, records_applied=50)
STOPPED = HALF.model_copy(update={"finished": True, "stopped": "no improvement"})


def worker(index: int, *, pid: int | None = None, **fields: Any) -> Process:
    return Process(
        role="worker", index=index, pid=100 + index if pid is None else pid, **{"started": NOW - 5, **fields}
    )


def ended(index: int, status: int, **fields: Any) -> Process:
    return worker(index, **{"exit": status, "ended": NOW - 1, **fields})


def observed(*workers: Process, **fields: Any) -> Observed:
    return Observed(**{"started": NOW - 10, "processes": (SERVER, *workers), "asked_at": NOW, **fields})


def verdict(*workers: Process, desired: Desired = DESIRED, **fields: Any) -> Verdict:
    actions = plan(desired, observed(*workers, **fields), NOW)
    assert len(actions) == 1
    assert isinstance(actions[0], Conclude)
    return actions[0].verdict


def test_parameter_servers_start_before_workers() -> None:
    desired = replace(DESIRED, shards=2)
    start = Observed(started=NOW)
    assert [(a.role, a.index) for a in plan(desired, start, NOW) if isinstance(a, Start)] == [
        ("ps", 0),
        ("ps", 1),
    ]
    second = Process(role="ps", index=1, pid=2, started=NOW)
    dead = Observed(started=NOW, processes=(SERVER, replace(second, exit=-9, ended=NOW)))
    assert [(a.role, a.index) for a in plan(desired, dead, NOW) if isinstance(a, Start)] == [("ps", 1)]
    starting = Observed(started=NOW, processes=(SERVER, second))
    assert [(a.role, a.index) for a in plan(desired, starting, NOW) if isinstance(a, Start)] == [
        ("worker", 0),
        ("worker", 1),
    ]


def test_nothing_to_do_when_all_is_as_wanted() -> None:
    assert plan(DESIRED, observed(worker(0), worker(1)), NOW) == []


def test_scaling_up_starts_only_the_new_workers() -> None:
    actions = plan(replace(DESIRED, workers=4), observed(worker(0), worker(1)), NOW)
    assert [(a.role, a.index) for a in actions if isinstance(a, Start)] == [("worker", 2), ("worker", 3)]


def test_scaling_down_asks_the_highest_indexes_and_nobody_else() -> None:
    actions = plan(replace(DESIRED, workers=1), observed(worker(0), worker(1), worker(2)), NOW)
    assert [a.pid for a in actions if isinstance(a, Terminate)] == [101, 102]
    assert len(actions) == 2


def test_a_worker_that_does_not_leave_is_killed_after_its_grace_period_and_once() -> None:
    desired = replace(DESIRED, workers=1, leave_grace=timedelta(seconds=30))
    assert plan(desired, observed(worker(0), worker(1, asked=NOW - 29)), NOW) == []
    [action] = plan(desired, observed(worker(0), worker(1, asked=NOW - 31)), NOW)
    assert isinstance(action, Kill)
    assert action.pid == 101
    assert plan(desired, observed(worker(0), worker(1, asked=NOW - 31, killed=True)), NOW) == []


def test_a_worker_that_left_comes_back_when_it_is_wanted_again() -> None:
    left = ended(1, 0, asked=NOW - 3)
    [action] = plan(DESIRED, observed(worker(0), left), NOW)
    assert isinstance(action, Start)
    assert (action.index, action.replaces) == (1, None)
    assert plan(DESIRED, observed(worker(0), left, progress=FINISHED), NOW) == []


def test_a_worker_that_is_stuck_is_killed_counted_and_replaced() -> None:
    [action] = plan(DESIRED, observed(worker(0), worker(1, stuck="declared hung")), NOW)
    assert action == Kill(101, "declared hung")
    assert (
        plan(DESIRED, observed(worker(0), worker(1, stuck="declared hung", killed=True, asked=NOW)), NOW)
        == []
    )
    killed = ended(1, -9, stuck="declared hung", asked=NOW - 2, killed=True)
    [action] = plan(DESIRED, observed(worker(0), killed), NOW)
    assert isinstance(action, Start)
    assert killed.ending == "failed"
    assert ended(1, exits.HUNG).ending == "failed"


@pytest.mark.parametrize(
    ("state", "gone", "timeout", "kill"),
    [
        ("hung", 14, 60, False),
        ("hung", 16, 60, True),
        ("lost", 16, 60, False),
        ("lost", 61, 60, True),
        ("lost", 10**6, 0, False),
        ("left", 10**6, 60, False),
        ("training", None, 60, False),
        ("hung", None, 60, False),
    ],
)
def test_who_has_been_given_up_and_lives_on_is_stuck(
    state: Any, gone: float | None, timeout: int, kill: bool
) -> None:
    process = worker(1)
    member = MemberStatus(
        worker=1, incarnation=3, pid=101, host="h", state=state, joined_version=0, gone_seconds=gone
    )
    status = ServerStatus(job="j", shard=0, shards=1, term=1, ready=True, members=[member])
    limit = timedelta(seconds=timeout)
    assert bool(stuck(process, status, limit)) == kill
    again = member.model_copy(update={"incarnation": 4, "state": "training", "gone_seconds": None})
    joined_again = status.model_copy(update={"members": [member, again]})
    assert not stuck(process, joined_again, limit)
    assert not stuck(replace(process, pid=102), status, limit)
    assert not stuck(replace(process, asked=NOW), status, limit), "it is leaving anyway"


@pytest.mark.parametrize(("finished", "gone", "kill"), [(False, 999, ""), (True, 59, ""), (True, 61, "61 s")])
@pytest.mark.parametrize("timeout", [0, 1800])
def test_a_worker_that_does_not_answer_keeps_a_finished_job_open_for_a_minute(
    finished: bool, gone: float, kill: str, timeout: int
) -> None:
    lost = MemberStatus(worker=1, incarnation=3, pid=101, host="h", state="lost", joined_version=0)
    members = [lost.model_copy(update={"gone_seconds": gone})]
    progress = FINISHED if finished else HALF
    status = ServerStatus(job="j", shard=0, shards=1, term=1, ready=True, members=members, progress=progress)
    why = overstays(worker(1), status, timedelta(seconds=timeout), FINISHED_GRACE, now=NOW)
    assert ("the training is done" in why and kill in why) if kill else why == ""


@pytest.mark.parametrize("state", [None, "left"])
@pytest.mark.parametrize(("stopped", "kill"), [(None, False), (NOW - 59, False), (NOW - 61, True)])
def test_a_worker_that_is_stopped_keeps_a_finished_job_open_for_a_minute(
    state: Any, stopped: float | None, kill: bool
) -> None:
    """The parameter server knows nothing of one that has not joined, or has left."""
    member = MemberStatus(worker=1, incarnation=3, pid=101, host="h", state=state or "left", joined_version=0)
    members = [] if state is None else [member]
    status = ServerStatus(job="j", shard=0, shards=1, term=1, ready=True, members=members, progress=FINISHED)
    process = worker(1, stopped=stopped)
    assert ("SIGSTOP" in overstays(process, status, timedelta(0), FINISHED_GRACE, now=NOW)) == kill
    goes_on = status.model_copy(update={"progress": HALF})
    assert overstays(process, goes_on, timedelta(0), FINISHED_GRACE, now=NOW) == ""


def test_a_worker_that_keeps_a_finished_job_open_is_killed_and_replaced_and_counts_as_no_failure() -> None:
    """What its script does at the end, such as saving, is still to be done."""
    strict = replace(DESIRED, backoff_limit=0)
    actions = plan(strict, observed(ended(0, 0), worker(1, overstays="stopped"), progress=FINISHED), NOW)
    assert actions == [Kill(101, "stopped")]
    killed = ended(1, -9, overstays="stopped", asked=NOW - 2, killed=True)
    assert killed.ending == "killed"
    seen = observed(ended(0, 0), killed, progress=FINISHED)
    assert failures(seen) == []
    [action] = plan(strict, seen, NOW)
    assert isinstance(action, Start)


@pytest.mark.parametrize(
    ("joined", "done", "started", "ends"),
    [
        (False, 61, 300, True),
        (False, 59, 300, False),
        (False, 300, 59, False),
        (True, 300, 300, False),
        (False, None, 300, False),
    ],
)
def test_a_worker_that_never_joins_keeps_a_finished_job_open_for_a_minute(
    joined: bool, done: int | None, started: int, ends: bool
) -> None:
    """Its script computes something else. One that has joined may evaluate and save as long as it likes."""
    late = worker(1, joined=joined, started=NOW - started)
    first = worker(0, joined=True) if done is None else ended(0, 0, ended=NOW - done)
    actions = plan(DESIRED, observed(first, late, progress=FINISHED), NOW)
    assert [(type(a), a.pid) for a in actions if isinstance(a, Terminate | Kill)] == (
        [(Terminate, 101)] if ends else []
    )
    assert plan(DESIRED, observed(first, late, progress=HALF), NOW) == []
    if ends:
        assert isinstance(actions[0], Terminate)
        assert "has not called elastic_ps.connect()" in actions[0].reason
        gone = ended(1, -15, asked=NOW)
        assert verdict(first, gone, progress=FINISHED, asked_at=NOW + 1).phase == "Succeeded"
        before = ended(1, -9, pid=99, joined=True, started=NOW - 400, ended=NOW - 300)
        assert plan(DESIRED, observed(first, before, late, progress=FINISHED), NOW) == [], (
            "it may have to save"
        )


def test_a_worker_that_someone_else_asked_to_leave_is_not_done_and_is_replaced() -> None:
    left = ended(1, exits.LEFT)
    [action] = plan(DESIRED, observed(worker(0), left, progress=HALF), NOW)
    assert isinstance(action, Start)
    assert (action.index, action.replaces) == (1, 101)
    everybody = plan(DESIRED, observed(ended(0, exits.LEFT), left, progress=HALF), NOW)
    assert [a.index for a in everybody if isinstance(a, Start)] == [0, 1]
    assert plan(DESIRED, observed(worker(0), left, progress=FINISHED), NOW) == []


@pytest.mark.parametrize("status", [-9, -15, 137, 143])
def test_a_worker_killed_from_outside_is_replaced_however_often(status: int) -> None:
    history = [ended(1, status, pid=200 + n, started=NOW - 500, ended=NOW - 100) for n in range(8)]
    [action] = plan(DESIRED, observed(worker(0), *history), NOW)
    assert isinstance(action, Start)
    assert (action.index, action.replaces) == (1, 207)


def test_a_failed_worker_is_replaced_until_the_limit_is_exceeded() -> None:
    first = ended(1, 1, pid=201, output="ValueError: no")
    [action] = plan(DESIRED, observed(worker(0), first), NOW)
    assert isinstance(action, Start)
    result = verdict(worker(0), first, ended(1, 3, pid=202, output="ValueError: again", ended=NOW))
    assert (result.phase, result.reason) == ("Failed", "BackoffLimitExceeded")
    assert result.message == (
        "worker 1 exited with 3. Processes have failed 2 times, more than backoffLimit 1 allows. The last "
        "output of worker 1:\nValueError: again"
    )


def test_the_message_of_a_failed_job_begins_with_the_cause() -> None:
    output = "Traceback (most recent call last):\n  File x\nValueError: no\nwith two lines"
    result = verdict(worker(0), *(ended(1, 1, pid=pid, output=output, ended=NOW) for pid in (201, 202)))
    assert result.message.startswith("ValueError: no (worker 1 exited with 1). Processes have failed 2 times")


def test_replacements_wait_longer_and_longer_while_a_worker_dies_at_once() -> None:
    died = ended(0, -9)
    delays = [restart_delay([died] * count).total_seconds() for count in range(10)]
    assert delays == [0, 0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    lived_long = ended(0, -9, started=NOW - 100)
    assert restart_delay([died, died, lived_long]) == timedelta(0)
    assert plan(DESIRED, observed(worker(0), *[ended(1, -9)] * 4), NOW) == []


def test_who_was_killed_from_outside_after_it_had_done_something_is_replaced_at_once() -> None:
    """However often: that says nothing about the next one."""
    killed, crashed, failed = (ended(0, status, useful=True) for status in (-9, -11, 1))
    assert restart_delay([killed] * 9) == timedelta(0)
    for each in (crashed, failed):
        assert restart_delay([each] * 4) == timedelta(seconds=2)
        assert restart_delay([each, each, each, killed]) == timedelta(0)


def test_a_job_that_cannot_work_fails_at_once_with_the_workers_words() -> None:
    result = verdict(worker(0), ended(1, exits.INVALID, output="model has no trainable parameters"))
    assert result == Verdict("Failed", "InvalidJob", "model has no trainable parameters")


def test_exit_codes_of_a_worker_that_was_asked_to_leave_count_against_nothing() -> None:
    desired = replace(DESIRED, workers=1)
    for status in (0, 1, -9, exits.INVALID, exits.LEFT):
        assert plan(desired, observed(worker(0), ended(1, status, asked=NOW - 2)), NOW) == []


@pytest.mark.parametrize("started", [NOW - 10, NOW - 10_000])
def test_a_lost_parameter_server_is_brought_back_and_the_workers_are_left_alone(started: float) -> None:
    lost = replace(SERVER, exit=-9, ended=NOW, started=started, ready=False)
    [action] = plan(DESIRED, Observed(started=NOW, processes=(lost, worker(0))), NOW)
    assert isinstance(action, Start)
    assert (action.role, action.index, action.replaces) == ("ps", 0, SERVER.pid)
    assert "SIGKILL" in action.reason


def test_a_parameter_server_that_never_answers_fails_the_job() -> None:
    silent = replace(SERVER, ready=False, started=NOW - 1000)
    [action] = plan(DESIRED, Observed(started=NOW - 1000, processes=(silent,)), NOW)
    assert isinstance(action, Conclude)
    assert action.verdict.reason == "ParameterServerSilent"


def test_the_deadline_fails_the_job() -> None:
    desired = replace(DESIRED, deadline=timedelta(seconds=9))
    exceeded = verdict(worker(0), worker(1), desired=desired)
    assert exceeded.reason == "DeadlineExceeded"
    assert exceeded.message.endswith("Raise the limit"), "a run from the start would exceed it, too"


@pytest.mark.parametrize("progress", [HALF, FINISHED])
def test_a_job_that_learns_nothing_fails_if_it_is_to_stop_then(progress: Progress) -> None:
    """Also if a worker has failed over it, or if that is known only when all is done."""
    found = Divergence(reason="LossNotFinite", message="the loss is NaN")
    diverged = progress.model_copy(update={"diverged": found})
    stop = replace(DESIRED, stop_diverged=True, backoff_limit=0)
    for workers in ([worker(0), worker(1)], [worker(0), ended(1, 1)], [ended(0, 0), ended(1, 0)]):
        expected = Verdict("Failed", "Diverged", "the loss is NaN")
        assert verdict(*workers, desired=stop, progress=diverged) == expected
    assert plan(DESIRED, observed(worker(0), worker(1), progress=diverged), NOW) == []


@pytest.mark.parametrize(
    ("progress", "phase", "reason"),
    [
        (FINISHED, "Succeeded", "Finished"),
        (Progress(version=10), "Succeeded", "Finished"),
        (HALF, "Failed", "RecordsLeft"),
        (STOPPED, "Succeeded", "StoppedEarly"),
    ],
)
def test_the_end_when_every_worker_has_ended_well(progress: Progress, phase: str, reason: str) -> None:
    result = verdict(ended(0, 0), ended(1, 0), progress=progress)
    assert (result.phase, result.reason) == (phase, reason)


LEFT = HALF.model_copy(update={"open_shares": [0, 1]})


def test_a_worker_that_leaves_records_of_its_fixed_share_fails_the_job() -> None:
    failed = verdict(worker(0), ended(1, 0), progress=LEFT)
    assert (failed.phase, failed.reason) == ("Failed", "RecordsLeft")
    assert failed.message.startswith("worker 1 has ended its script, but only 50 of 100 records")
    assert "session.stop(reason)" in failed.message


def test_a_worker_may_be_done_with_its_fixed_share_before_the_others() -> None:
    others = HALF.model_copy(update={"open_shares": [0]})
    assert plan(DESIRED, observed(worker(0), ended(1, 0), progress=others), NOW) == []


def test_workers_with_fixed_shares_have_less_time_to_leave() -> None:
    """A step of theirs may wait for a worker that has left."""
    asked, concluded = replace(worker(0), asked=NOW), Verdict("Failed", "RecordsLeft", "")
    for progress, kills in ((HALF, 0), (LEFT, 1), (LEFT.model_copy(update={"open_shares": [0]}), 0)):
        seen = replace(observed(asked, progress=progress), verdict=concluded)
        assert [type(action) for action in plan(DESIRED, seen, NOW + 6)] == [Kill] * kills


def test_a_worker_with_a_fixed_share_is_judged_by_an_answer_from_after_its_end() -> None:
    assert plan(DESIRED, observed(worker(0), ended(1, 0), progress=LEFT, asked_at=NOW - 2), NOW) == []


def test_the_end_is_judged_by_an_answer_from_after_the_last_worker() -> None:
    workers = (ended(0, 0), ended(1, 0))
    assert plan(DESIRED, observed(*workers, progress=HALF, asked_at=NOW - 2), NOW) == []
    late = plan(DESIRED, observed(*workers, progress=HALF, asked_at=NOW - 2), NOW + 60)
    assert [a.verdict.reason for a in late if isinstance(a, Conclude)] == ["NoAnswer"]


def test_a_job_whose_last_version_is_not_on_disk_has_failed_and_says_why() -> None:
    """It may be on the way there when the last worker has ended, and it may take long."""
    workers = (ended(0, 0), ended(1, 0))
    unwritten = FINISHED.model_copy(update={"version": 48, "durable_version": 32})
    full = "cannot write shard-0-of-1.safetensors of version 48: No space left on device"

    def reasons(progress: Progress, problem: str, seconds: float) -> list[str]:
        seen = observed(*workers, progress=progress, problem=problem, asked_at=NOW + seconds)
        actions = plan(DESIRED, seen, NOW + seconds)
        return [action.verdict.reason for action in actions if isinstance(action, Conclude)]

    assert reasons(unwritten, "", 0) == reasons(unwritten, full, 0) == []
    assert reasons(unwritten, "", 60) == []
    assert reasons(unwritten, full, 60) == reasons(unwritten, "", 3600) == ["NotOnDisk"]
    assert reasons(FINISHED.model_copy(update={"version": 48, "durable_version": 48}), full, 0) == [
        "Finished"
    ]
    actions = plan(DESIRED, observed(*workers, progress=unwritten, problem=full, asked_at=NOW + 60), NOW + 60)
    assert isinstance(actions[0], Conclude)
    assert actions[0].verdict.phase == "Failed"
    assert actions[0].verdict.message.startswith(f"{full}. ")
    assert "version 48 is not on disk" in actions[0].verdict.message
    assert "version 32" in actions[0].verdict.message


def test_a_worker_that_is_done_is_not_replaced_while_others_go_on() -> None:
    assert plan(DESIRED, observed(worker(0), ended(1, 0), progress=HALF), NOW) == []


def test_nobody_new_starts_when_all_records_are_in_the_model() -> None:
    desired = replace(DESIRED, workers=4)
    assert plan(desired, observed(worker(0), worker(1), progress=FINISHED), NOW) == []
    assert verdict(ended(0, 0), ended(1, 0), desired=desired, progress=FINISHED).phase == "Succeeded"


def test_the_schedule_is_followed_when_its_version_is_reached() -> None:
    desired = replace(DESIRED, schedule=(ScaleAt(400, 2), ScaleAt(150, 4)))
    at = [observed(worker(0), worker(1), progress=Progress(version=v)) for v in (149, 150, 500)]
    assert plan(desired, at[0], NOW) == []
    assert [a.at for a in plan(desired, at[1], NOW) if isinstance(a, Scale)] == [ScaleAt(150, 4)]
    assert [a.at.version for a in plan(desired, at[2], NOW) if isinstance(a, Scale)] == [150, 400]


def test_stopping_ends_workers_first_and_then_parameter_servers() -> None:
    stop = StopRequest("stopped by SIGINT")
    concluded = verdict(worker(0), worker(1), stop=stop)
    assert (concluded.phase, concluded.reason) == ("Suspended", "Stopped")

    def close(*workers: Process, at: float = NOW, server: Process = SERVER) -> list[tuple[type, int]]:
        seen = Observed(started=NOW, processes=(server, *workers), stop=stop, verdict=concluded)
        actions = plan(DESIRED, seen, at)
        return [(type(a), a.pid) for a in actions if isinstance(a, (Terminate, Kill))]

    assert close(worker(0), worker(1)) == [(Terminate, 100), (Terminate, 101)]
    asked = (worker(0, asked=NOW), worker(1, asked=NOW))
    assert close(*asked, at=NOW + 59) == [], "they finish their step"
    assert close(*asked, at=NOW + 61) == [(Kill, 100), (Kill, 101)]
    gone, writes = (ended(0, 0), ended(1, -9)), replace(SERVER, asked=NOW)
    assert close(*gone) == [(Terminate, SERVER.pid)]
    assert close(*gone, at=NOW + 119, server=writes) == [], "it writes a checkpoint"
    assert close(*gone, at=NOW + 121, server=writes) == [(Kill, SERVER.pid)]


def test_stopping_at_once_kills_everything() -> None:
    actions = plan(
        DESIRED,
        observed(
            worker(0, asked=NOW), stop=StopRequest("twice", at_once=True), verdict=Verdict("Failed", "", "")
        ),
        NOW,
    )
    assert [a.pid for a in actions if isinstance(a, Kill)] == [1, 100]


def crashes(status: int, count: int, **fields: Any) -> list[Process]:
    """Replacements of worker 1 that each died of the same."""
    return [
        ended(1, status, **{"pid": 200 + n, "started": NOW - 90 + n, "ended": NOW - 80 + n, **fields})
        for n in range(count)
    ]


@pytest.mark.parametrize("status", [-signal.SIGSEGV, -signal.SIGINT, 128 + signal.SIGABRT])
def test_a_worker_that_crashes_again_and_again_fails_the_job(status: int) -> None:
    [action] = plan(DESIRED, observed(worker(0), *crashes(status, 2)), NOW)
    assert isinstance(action, Start)
    over = verdict(worker(0), *crashes(status, 3))
    assert (over.phase, over.reason) == ("Failed", "BackoffLimitExceeded")
    assert over.message.startswith(f"worker 1 {describe_exit(status)}. Processes have failed 2 times")


@pytest.mark.parametrize(
    "status", [-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGKILL, exits.FENCED, exits.SILENT]
)
def test_being_killed_from_outside_never_counts(status: int) -> None:
    assert failures(observed(worker(0), *crashes(status, 9))) == []


def test_a_worker_that_has_no_memory_again_and_again_fails_the_job() -> None:
    over = verdict(worker(0), *crashes(-signal.SIGKILL, 3, starved=True))
    assert over.message.startswith(
        "worker 1 was killed by SIGKILL, probably because there was no memory left. Processes have failed 2"
    )


def test_crashes_after_steps_that_are_in_the_model_do_not_count() -> None:
    assert failures(observed(worker(0), *crashes(-signal.SIGSEGV, 9, useful=True))) == []


@pytest.mark.parametrize("status", [1, 128, 255])
def test_a_script_that_fails_after_steps_that_are_in_the_model_counts_each_time(status: int) -> None:
    """`sys.exit(-1)` ends a process with 255."""
    dead = crashes(status, 9, useful=True)
    assert failures(observed(worker(0), *dead)) == dead
    assert {process.ending for process in dead} == {"failed"}


def test_what_makes_a_process_useful() -> None:
    def server(steps: int, pid: int = 101) -> ServerStatus:
        member = MemberStatus(
            worker=1, incarnation=1, pid=pid, host="", state="lost", joined_version=0, steps=steps
        )
        return ServerStatus(job="j", shard=0, shards=1, term=1, ready=True, members=[member])

    assert useful(ended(1, -11), server(steps=1), frozenset())
    assert not useful(ended(1, -11), server(steps=0), frozenset())
    assert not useful(ended(1, -11), server(steps=1, pid=102), frozenset())
    assert useful(worker(1, pid=2 * PIDS + 101), server(steps=1), frozenset()), "a worker of another host"
    assert not useful(worker(1), None, frozenset({1}))
    ready = server(steps=0)
    empty = ready.model_copy(update={"ready": False})
    assert useful(SERVER, ready, frozenset({0}))
    assert not useful(SERVER, empty, frozenset({0})), "it may die while it takes the first values"
    assert not useful(SERVER, None, frozenset({0}))
    assert not useful(SERVER, ready, frozenset({1}))
    assert not useful(replace(SERVER, exit=-11), ready, frozenset({0}))


def test_a_job_that_was_finished_ends_when_its_workers_find_nothing_to_train() -> None:
    """Whether the script trains more epochs than before, only a worker can tell."""
    known: dict[str, Any] = {"progress": FINISHED, "was_finished": True}
    assert [a.index for a in plan(DESIRED, observed(**known), NOW) if isinstance(a, Start)] == [0, 1]
    assert plan(DESIRED, observed(worker(0), worker(1), **known), NOW) == []
    left = ended(1, 0, asked=NOW - 3)
    assert plan(DESIRED, observed(worker(0), left, **known), NOW) == []
    done = verdict(ended(0, 0), ended(1, 0), **known)
    assert (done.phase, done.reason) == ("Succeeded", "Finished")
    assert "had finished before" in done.message


@pytest.mark.parametrize(
    ("workers", "cores", "expected"),
    [
        (1, range(4), [(0, 1, 2, 3)]),
        (2, [7, 2, 5, 3], [(2, 3), (5, 7)]),
        (3, range(8), [(0, 1), (2, 3, 4), (5, 6, 7)]),
        (3, [4, 9], [(4,), (9,), (4,)]),
    ],
)
def test_each_worker_has_cores_of_its_own(
    workers: int, cores: Sequence[int], expected: list[tuple[int, ...]]
) -> None:
    assert [cores_of(index, workers=workers, cores=cores) for index in range(workers)] == expected
    assert cores_of(workers, workers=workers, cores=cores) == expected[0], "one that was added later"


GRACE = timedelta(seconds=60)
EVALUATED = replace(DESIRED, evaluator_grace=GRACE)


def evaluator(**fields: Any) -> Process:
    return Process(role="evaluator", index=0, **{"pid": 9, "started": NOW - 5, **fields})


def started(*processes: Process, **fields: Any) -> list[str]:
    actions = plan(EVALUATED, observed(*processes, **fields), NOW)
    return [action.role for action in actions if isinstance(action, Start)]


def test_an_evaluator_is_started_once_the_parameter_server_answers() -> None:
    assert started(worker(0), worker(1)) == ["evaluator"]
    assert started(worker(0), worker(1), asked_at=None) == []
    assert started(worker(0), worker(1), evaluator()) == []
    assert plan(DESIRED, observed(worker(0), worker(1)), NOW) == []


def test_an_evaluator_waits_until_a_worker_knows_whether_a_finished_job_goes_on() -> None:
    assert started(worker(0), worker(1), progress=FINISHED) == []
    assert started(worker(0), ended(1, 0), progress=FINISHED) == ["evaluator"]


@pytest.mark.parametrize(("status", "again"), [(-9, True), (1, True), (exits.INVALID, False), (0, False)])
def test_an_evaluator_that_dies_is_started_again_and_counts_for_nothing(status: int, again: bool) -> None:
    dead = [evaluator(exit=status, ended=NOW - 100, pid=20 + n) for n in range(5)]
    seen = observed(worker(0), worker(1), *dead, progress=HALF)
    assert [a.role for a in plan(EVALUATED, seen, NOW) if isinstance(a, Start)] == ["evaluator"] * again
    assert failures(seen) == []


def test_an_evaluator_that_keeps_dying_is_started_again_later_and_later() -> None:
    dead = [evaluator(exit=1, ended=NOW - 3, pid=20 + n) for n in range(5)]
    assert started(worker(0), worker(1), *dead) == []


def test_the_job_ends_when_the_evaluator_has_ended() -> None:
    done = (ended(0, 0), ended(1, 0))
    assert plan(EVALUATED, observed(*done, evaluator(), progress=FINISHED), NOW) == []
    assert started(*done, evaluator(exit=-9, ended=NOW - 5), progress=FINISHED) == ["evaluator"]
    for status in (0, exits.INVALID):
        end = verdict(*done, evaluator(exit=status, ended=NOW), desired=EVALUATED, progress=FINISHED)
        assert (end.phase, end.reason) == ("Succeeded", "Finished")
        assert "evaluator" not in end.message


def test_the_job_ends_without_an_evaluator_that_takes_too_long() -> None:
    late = NOW - GRACE.total_seconds() - 1
    done = (ended(0, 0, ended=late), ended(1, 0, ended=late))
    end = verdict(*done, evaluator(), desired=EVALUATED, progress=FINISHED)
    assert (end.phase, end.reason) == ("Succeeded", "Finished")
    assert "The evaluator was not done 60 s later" in end.message


def test_an_evaluator_is_asked_to_end_with_the_workers() -> None:
    over = Verdict("Suspended", "Stopped", "stopped")
    actions = plan(EVALUATED, observed(ended(0, 0), ended(1, 0), evaluator(), verdict=over), NOW)
    assert [action.pid for action in actions if isinstance(action, Terminate)] == [9]
