"""Who evaluates and saves: one worker, also when shard 0 is lost before all are told of the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.api.checkpoints import Times
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.checkpoint.store import Store
from elastic_ps.core.membership import Member
from elastic_ps.core.sequence import PushKey
from elastic_ps.errors import NoCheckpoint, RefusalCode, Refused, StorageUnavailable
from elastic_ps.process.telemetry import Trace
from elastic_ps.server.calls.node import Node
from elastic_ps.server.job.checkpointer import Checkpointer
from elastic_ps.server.job.status import progress
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.transport import messages_pb2 as pb
from tests.testing.coordinator import Asked, AskedShardZero, finish, start, take
from tests.testing.polling import LIMIT, eventually
from tests.testing.shard import PLAIN, Body


class Disk(Store):
    """A checkpoint directory in which there may be no room for what is said of a checkpoint later."""

    room = True

    def amend(self, *arguments: Any, **named: Any) -> None:
        if not self.room:
            raise StorageUnavailable("No space left on device")
        super().amend(*arguments, **named)


class Server:
    """Shard 0 of a job, with a real shard, and a real checkpoint of every version."""

    def __init__(self, directory: Path, limits: ServerLimits = USUAL) -> None:
        self._directory, self._limits = directory, limits
        self.start()

    def start(self) -> None:
        self.store = Disk(self._directory)
        self.term = self.store.next_term()
        self.checkpoints = Checkpointer(
            self.store,
            job="job",
            term=self.term,
            shards=1,
            times=Times(interval=timedelta(hours=1), every_versions=1, keep=2),
        )
        self.node = Node(0, 1, store=self.store, trace=Trace(None, ""))
        spec = TrainingJobSpec.model_validate({"entrypoint": "train:main"})
        self._zero = AskedShardZero(
            "job", spec, self.term, [self.node], checkpoints=self.checkpoints, limits=self._limits
        )
        try:
            found = self.checkpoints.newest()
        except NoCheckpoint:
            found = None
        self._zero.start(found)

    @property
    def problem(self) -> str:
        """What the status says is wrong."""
        return self._zero.status().problem

    @property
    def coordinator(self) -> Asked:
        return self._zero.coordinator

    def lose(self) -> None:
        self._zero.close(keep=False)
        self.node.close()
        self.store.close()

    def train(self, member: Member, taken: pb.TakeReply) -> None:
        """A worker's step, and the checkpoint of the version that it makes."""
        self.push(member, taken)
        finish(self.coordinator, member, taken)
        eventually(lambda: self.checkpoints.durable_version == taken.version + 1, "the version is on disk")

    def push(self, member: Member, taken: pb.TakeReply, *, step: int = 0) -> None:
        key = PushKey(
            term=self.term,
            worker=member.worker,
            incarnation=member.incarnation,
            step=step,
            bucket=0,
            version=taken.version,
            attempt=self.coordinator.job.state.rounds.attempt,
        )
        self.node.shard.push(key, 10, PLAIN, Body(torch.ones(4)))

    def skip_all(self, member: Member, *, call: int) -> pb.TakeReply:
        """A worker leaves all records out that there are, until it is told of the end."""
        taken = take(self.coordinator, member, call=call)
        while taken.ranges:
            call += 1
            taken = take(self.coordinator, member, call=call, skipped=taken.ranges)
        return taken


soon = pytest.mark.parametrize(
    "limits", [ServerLimits(answer=timedelta(milliseconds=300), keep_again=timedelta(0))], ids=["soon"]
)


@pytest.fixture
def server(tmp_path: Path, limits: ServerLimits) -> Iterator[Server]:
    made = Server(tmp_path, limits)
    yield made
    made.lose()


def end_of(taken: pb.TakeReply) -> tuple[bool, bool]:
    return taken.finished, taken.chief


def told(ask: Callable[[], pb.TakeReply]) -> tuple[bool, bool]:
    """The end, which is told when it is on disk: until then a worker asks again."""
    return end_of(eventually(lambda: None if (taken := ask()).pending else taken, "it is told of the end"))


def test_records_that_are_skipped_after_the_last_version_are_not_trained_after_a_loss(server: Server) -> None:
    """The worker that was told of the end had another model than those that trained them. Both were chief."""
    member = start(server.coordinator, 0)
    server.train(member, take(server.coordinator, member, call=1))
    assert end_of(server.skip_all(member, call=2)) == (True, True)
    server.lose()
    server.start()
    other, again = start(server.coordinator, 1), start(server.coordinator, 0)
    assert end_of(take(server.coordinator, other, call=1)) == (True, False)
    assert end_of(take(server.coordinator, again, call=1)) == (True, True), "it may not have heard of it"
    assert server.coordinator.job.state.version == 1


def test_a_job_that_was_stopped_stays_so_after_a_loss(server: Server) -> None:
    member = start(server.coordinator, 0)
    server.train(member, take(server.coordinator, member, call=1))
    server.coordinator.stop(0, member.incarnation, "it is good enough")
    assert end_of(take(server.coordinator, member, call=2)) == (True, True)
    server.coordinator.leave(0, member.incarnation, call=3)
    server.lose()
    server.start()
    other = start(server.coordinator, 1)
    assert end_of(take(server.coordinator, other, call=1)) == (True, False)
    assert server.coordinator.job.state.stopped == "it is good enough"


@soon
def test_a_worker_that_leaves_before_it_is_told_leaves_it_to_another_one(server: Server) -> None:
    members = [start(server.coordinator, worker) for worker in (0, 1)]
    server.train(members[0], take(server.coordinator, members[0], call=1))
    server.store.room = False
    assert server.skip_all(members[0], call=2).pending
    server.coordinator.leave(0, members[0].incarnation, call=100)
    server.store.room = True
    assert told(lambda: take(server.coordinator, members[1], call=1)) == (True, True)
    assert progress(server.coordinator.job.state, 0, None).chief == 1


def test_a_process_in_the_place_of_one_that_has_left_is_not_the_chief_of_its_epoch(server: Server) -> None:
    first, other = start(server.coordinator, 0, instance="a", call=1), start(server.coordinator, 1)

    def is_chief(member: Member) -> bool:
        return server.coordinator.is_chief(member.worker, member.incarnation, epoch=0)

    assert [is_chief(first), is_chief(other), is_chief(first)] == [True, False, True]
    chiefs = server.coordinator.job.state.chiefs
    assert chiefs.saves(0) == 0
    server.coordinator.leave(0, first.incarnation, call=1)
    assert chiefs.saves(0) is None
    assert not is_chief(start(server.coordinator, 0, instance="b", call=1))


def test_a_process_in_the_place_of_one_that_was_lost_is_the_chief_of_its_epoch(server: Server) -> None:
    first = start(server.coordinator, 0, instance="a", call=1)
    assert server.coordinator.is_chief(0, first.incarnation, epoch=0)
    server.coordinator.gone(0, "a")
    assert server.coordinator.job.state.chiefs.saves(0) == 0
    second = start(server.coordinator, 0, instance="b", call=1)
    assert server.coordinator.is_chief(0, second.incarnation, epoch=0)


def asks(server: Server, member: Member, epoch: int) -> bool:
    return server.coordinator.is_chief(member.worker, member.incarnation, epoch=epoch)


def test_the_chief_stays_while_it_lives(server: Server) -> None:
    """What its script has kept in a variable, such as the best score, is still there in the next epoch."""
    first, other = start(server.coordinator, 0, instance="a", call=1), start(server.coordinator, 1)
    assert [asks(server, first, 0), asks(server, other, 0)] == [True, False]
    assert [asks(server, other, 1), asks(server, first, 1)] == [False, True]
    server.coordinator.gone(0, "a")
    assert [asks(server, other, 2), asks(server, start(server.coordinator, 0), 2)] == [True, False]
    assert [asks(server, other, 1), asks(server, other, 3)] == [False, True]


def test_the_chief_stays_after_the_parameter_server_was_lost(server: Server) -> None:
    first, other = start(server.coordinator, 0), start(server.coordinator, 1)
    assert asks(server, other, 0)
    server.train(first, take(server.coordinator, first, call=1))
    server.lose()
    server.start()
    first, other = start(server.coordinator, 0), start(server.coordinator, 1)
    assert [asks(server, first, 1), asks(server, other, 1)] == [False, True]


@pytest.mark.parametrize("leaves", [False, True])
@soon
def test_nobody_is_told_of_the_end_before_the_chief_comes_to_it(server: Server, leaves: bool) -> None:
    """It may be busy in an earlier epoch. If it leaves there, another worker that waits is the chief."""
    chief, other = start(server.coordinator, 0), start(server.coordinator, 1)

    def takes(member: Member, call: int, **more: Any) -> pb.TakeReply:
        who = member.worker, member.incarnation
        return server.coordinator.take(*who, call=call, records=10, epochs=2, batch=10, wait=True, **more)

    assert asks(server, chief, 0)
    skipped = takes(other, 1)
    skipped = takes(other, 2, skipped=skipped.ranges)
    assert takes(other, 3, skipped=skipped.ranges).pending
    if leaves:
        server.coordinator.leave(0, chief.incarnation, call=1)
        assert told(lambda: takes(other, 3)) == (True, True)
    else:
        assert told(lambda: takes(chief, 1, early=True)) == (True, True)
        assert told(lambda: takes(other, 3)) == (True, False)


def test_a_request_for_records_that_is_repeated_while_it_waits_has_one_answer(
    server: Server, threads: ThreadPoolExecutor
) -> None:
    first, other = start(server.coordinator, 0), start(server.coordinator, 1)
    assert take(server.coordinator, first, call=1).ranges, "it has all records"
    asked = [threads.submit(take, server.coordinator, other, call=1) for _ in range(2)]
    assert not wait(asked, timeout=0.3).done
    server.coordinator.leave(0, first.incarnation, call=2)
    one, two = (each.result(LIMIT) for each in asked)
    assert one == two
    assert one.ranges


def test_a_chief_whose_script_has_left_its_loop_is_the_chief_no_more(server: Server) -> None:
    chief, other = start(server.coordinator, 0), start(server.coordinator, 1)
    assert asks(server, chief, 0)
    server.coordinator.release(0, chief.incarnation, call=1)  # it pauses
    assert not asks(server, other, 1)
    server.coordinator.release(0, chief.incarnation, call=2, leaves=True)
    assert [asks(server, other, 2), asks(server, chief, 2)] == [True, False]


def test_a_chief_that_has_left_its_loop_keeps_nobody_waiting_at_the_end(server: Server) -> None:
    """The end has come while it was in the loop, and it does not ask for it."""
    chief, other = start(server.coordinator, 0), start(server.coordinator, 1)
    assert asks(server, chief, 0)
    state = server.coordinator.job.state
    state.open_ledger(10, 1, shares=0)
    state.choose_chief(other, state.last_epoch + 1)
    assert state.chiefs.of == {0: 0, 1: 0}
    server.coordinator.release(0, chief.incarnation, call=1, leaves=True)
    assert asks(server, other, 1)


def test_who_asks_for_a_later_epoch_leaves_it_to_a_script_that_has_begun(server: Server) -> None:
    """It has asked for records once, has made its step, and has not asked since."""
    slow, other = start(server.coordinator, 0), start(server.coordinator, 1)
    who = slow.worker, slow.incarnation
    taken = server.coordinator.take(*who, call=1, records=10, epochs=3, batch=10, wait=True, early=True)
    server.train(slow, taken)
    assert [asks(server, other, 1), asks(server, slow, 0), asks(server, slow, 1)] == [False, True, True]


def test_a_worker_that_passes_an_epoch_is_not_its_chief(server: Server) -> None:
    """It said that it is in an earlier one, and then that its script goes on with a later one."""
    slow, other = start(server.coordinator, 0), start(server.coordinator, 1)
    state = server.coordinator.job.state
    state.open_ledger(10, 4, shares=0)
    state.chiefs.loops[0] = 0
    assert not server.coordinator.is_chief(0, slow.incarnation, epoch=1, passes=True)
    assert asks(server, other, 1)
    assert not server.coordinator.is_chief(0, slow.incarnation, epoch=2, passes=True)


def test_a_worker_that_is_chosen_before_it_passes_an_epoch_comes_to_it(server: Server) -> None:
    slow, other = start(server.coordinator, 0), start(server.coordinator, 1)
    state = server.coordinator.job.state
    state.open_ledger(10, 4, shares=0)
    state.chiefs.loops[0] = 0
    assert not asks(server, other, 1)
    assert server.coordinator.is_chief(0, slow.incarnation, epoch=1, passes=True)


def write(server: Server, member: Member, text: str, *, call: int) -> None:
    server.coordinator.write_state(member.worker, member.incarnation, text, call=call)


def test_the_chief_alone_writes_what_scripts_keep(server: Server) -> None:
    first, other = start(server.coordinator, 0), start(server.coordinator, 1)
    with pytest.raises(
        Refused, match=r"worker 0 writes session\.state, but only the chief may, and there is none yet"
    ):
        write(server, first, "{}", call=1)
    assert asks(server, first, 0)
    write(server, first, '{"best": 1}', call=2)
    write(server, first, '{"best": 2}', call=3)
    with pytest.raises(Refused) as late:
        write(server, first, '{"best": 1}', call=2)
    assert late.value.code is RefusalCode.STALE_CALL, "the network delivers it a second time"
    with pytest.raises(
        Refused, match=r"worker 1 writes session\.state, but only the chief may, and that is worker 0"
    ):
        write(server, other, '{"best": 3}', call=1)
    assert server.coordinator.read_state() == '{"best": 2}'


def test_a_chief_of_before_does_not_replace_what_later_ones_have_written(server: Server) -> None:
    """It joins again when the chief after it has left."""
    first, other = start(server.coordinator, 0, instance="a", call=1), start(server.coordinator, 1)
    assert asks(server, first, 0)
    write(server, first, '{"best": 1}', call=1)
    server.coordinator.gone(0, "a")
    assert asks(server, other, 1)
    write(server, other, '{"best": 2}', call=1)
    server.coordinator.leave(1, other.incarnation, call=2)
    again = start(server.coordinator, 0, instance="a", call=2)
    with pytest.raises(Refused, match="and there is none yet"):
        server.coordinator.write_state(0, again.incarnation, '{"best": 1}', call=1, again=True)
    assert server.coordinator.read_state() == '{"best": 2}'


def test_what_scripts_keep_goes_back_with_the_job(server: Server) -> None:
    """It is as the checkpoint has it that the job goes on from."""
    first = start(server.coordinator, 0)
    assert asks(server, first, 0)
    write(server, first, '{"best": 1}', call=1)
    server.train(first, take(server.coordinator, first, call=2))
    write(server, first, '{"best": 2}', call=3)
    server.lose()
    server.start()
    assert server.coordinator.read_state() == '{"best": 1}'


def test_what_the_chief_keeps_after_the_end_is_in_the_last_checkpoint(server: Server) -> None:
    """It evaluates the last version, of which there is a checkpoint by then. Nothing else follows."""
    first = start(server.coordinator, 0)
    server.train(first, take(server.coordinator, first, call=1))
    assert end_of(server.skip_all(first, call=2)) == (True, True)
    write(server, first, '{"best": 1}', call=100)

    def kept() -> bool:
        return bool(server.store.manifest(1).state["script_state"] == '{"best": 1}')

    eventually(kept, "it is on disk")
    server.lose()
    server.start()
    assert server.coordinator.read_state() == '{"best": 1}'


def test_a_chief_that_has_left_its_loop_is_not_chosen_again_after_a_restart(server: Server) -> None:
    chief, other = start(server.coordinator, 0), start(server.coordinator, 1)
    assert asks(server, chief, 0)
    server.coordinator.release(0, chief.incarnation, call=1, leaves=True)
    server.train(other, take(server.coordinator, other, call=1))
    server.lose()
    server.start()
    chief, other = start(server.coordinator, 0), start(server.coordinator, 1)
    assert [asks(server, other, 1), asks(server, chief, 1)] == [True, False]


def test_the_chief_comes_to_an_epoch_that_others_have_trained_after_a_restart(server: Server) -> None:
    """It was told of the epoch before, in a term that is over."""
    chief, other = start(server.coordinator, 0), start(server.coordinator, 1)
    assert asks(server, chief, 0)
    server.train(other, take(server.coordinator, other, call=1))
    server.lose()
    server.start()
    chief, other = start(server.coordinator, 0), start(server.coordinator, 1)
    assert server.coordinator.is_chief(0, chief.incarnation, epoch=1, passes=True)
    assert not asks(server, other, 1)
