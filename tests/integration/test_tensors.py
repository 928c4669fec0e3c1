"""`session.server` on every transport: messages get lost, and parameter servers are started again."""

from __future__ import annotations

import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from operator import sub
from typing import Any

import pytest
import torch

from elastic_ps.contract.env import ProcessEnvironment
from elastic_ps.core.stages import CourseEvent
from elastic_ps.errors import TensorLost, UsageError
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.process import ParameterServer
from elastic_ps.tensors.limits import TensorLimits
from elastic_ps.tensors.spread import home_of as home_among
from elastic_ps.tensors.spread import spread
from elastic_ps.transport import calls
from elastic_ps.transport.base import Connection, Frame, Incoming, Server
from elastic_ps.worker.session import Session
from elastic_ps.worker.wire.dialogue import USUAL as USUAL_OF_WORKERS
from elastic_ps.worker.wire.dialogue import WorkerLimits
from elastic_ps.worker.wire.local_world import LocalWorld
from tests.integration.test_unreliable import FATES, Network, Unreliable
from tests.testing.harness import make_spec, running_job
from tests.testing.polling import LIMIT, eventually
from tests.testing.transports import TRANSPORTS, InprocTransport, Transport
from tests.testing.watched import Watched

SHARDS = 2
BUCKET = 1024
LARGE = 3000
"""Elements of a tensor with slices on both shards."""


class Rig:
    """A job's parameter servers, which nobody gives a model, and sessions of workers."""

    def __init__(
        self,
        transport: Transport,
        limits: ServerLimits = USUAL,
        worker_limits: WorkerLimits = USUAL_OF_WORKERS,
        **server: Any,
    ) -> None:
        self.limits, self.worker_limits = limits, worker_limits
        fields = {"replicas": SHARDS, "bucketBytes": BUCKET, **server}
        self.transport, self.spec = transport, make_spec(parameterServer=fields)
        self.listeners: list[Server] = [transport.listen() for _ in range(fields["replicas"])]
        self.servers = [self._serve(shard) for shard in range(len(self.listeners))]
        self.sessions: list[Session] = []

    def _serve(self, shard: int) -> ParameterServer:
        environment = ProcessEnvironment(
            job="test",
            spec=self.spec,
            role="ps",
            index=shard,
            addresses=tuple(listener.address for listener in self.listeners),
        )
        listener = self.listeners[shard]
        return ParameterServer(environment, listener, self._connect, limits=self.limits)

    def _connect(self, shard: int) -> Connection:
        return self.transport.connect(self.listeners[shard])

    def restart(self, shard: int) -> None:
        """Lose a parameter server with all that it knows, and start it again at the same address."""
        self.servers[shard].close(keep=False)
        self.listeners[shard] = self.transport.listen(again=self.listeners[shard])
        self.servers[shard] = self._serve(shard)

    def session(
        self, through: Callable[[Connection], Connection] = lambda inner: inner, instance: str = ""
    ) -> Session:
        """Of another process of worker 0, whose certificate the tests have."""
        connections = [through(self.transport.connect(listener)) for listener in self.listeners]
        limits = self.worker_limits
        self.sessions.append(Session("test", self.spec, 0, connections, limits=limits, instance=instance))
        return self.sessions[-1]

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        for server in self.servers:
            server.close(keep=False)


@pytest.fixture
def make(request: pytest.FixtureRequest, certificates_of_transports: None) -> Iterator[Callable[..., Rig]]:
    """Makes rigs on the transport of the test; inproc if it names none."""
    rigs = []

    def new(transport: Transport | None = None, *limits: Any, **server: Any) -> Rig:
        rigs.append(Rig(transport or InprocTransport(), *limits, **server))
        return rigs[-1]

    yield new
    for rig in rigs:
        rig.close()


everywhere = pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda transport: transport.__name__)


def at_once(*work: Callable[[], object]) -> None:
    """Do it in threads; raises what one of them raises."""
    errors: list[BaseException] = []

    def run(each: Callable[[], object]) -> None:
        try:
            each()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def home_of(name: str) -> int:
    return home_among(name, SHARDS)


@everywhere
def test_each_push_is_carried_out_once_on_a_bad_network(
    make: Callable[..., Rig], transport: Callable[[], Transport]
) -> None:
    rig, network, brought = make(transport()), Network(5, 0.15), []

    def work(number: int) -> None:
        server = rig.session(lambda inner: Unreliable(inner, network)).server
        for name, shape in (("large", (LARGE,)), ("small", (2, 3))):
            brought.append((name, server.init(name, torch.full(shape, 100.0 * number))))
            for _ in range(10):
                handle = server.push(name, torch.ones(shape))
            handle.wait()

    at_once(*(partial(work, number) for number in range(3)))
    for timer in network.later:
        timer.join()
    assert set(network.happened) == set(FATES), network.happened
    server = rig.session().server
    for name, shape in (("large", (LARGE,)), ("small", (2, 3))):
        assert not server.init(name, torch.zeros(shape))
        values = server.pull(name)
        assert values.shape == shape
        (value,) = set(values.view(-1).tolist())
        assert value in (30.0, 130.0, 230.0), "the values of one worker, and 30 pushes"
    assert sorted(brought) == [("large", False)] * 2 + [("large", True)] + [("small", False)] * 2 + [
        ("small", True)
    ]


@everywhere
@pytest.mark.parametrize("lost", range(SHARDS))
def test_a_tensor_that_is_lost_is_never_taken_for_another(
    make: Callable[..., Rig], transport: Callable[[], Transport], lost: int
) -> None:
    """Whichever shard it is: the tensor's home, or the other one."""
    rig = make(transport())
    first, second = rig.session().server, rig.session().server
    for server in (first, second):
        server.init("w", torch.arange(LARGE))
    rig.restart(lost)
    for call in (
        lambda: second.pull("w"),
        lambda: second.push("w", torch.ones(LARGE, dtype=torch.int64)).wait(),
        lambda: second.push("w", rule="zero").wait(),
    ):
        with pytest.raises(TensorLost, match=f"'w' is lost: parameter server {lost}, .* was started again"):
            call()
    assert first.init("w", torch.full((LARGE,), 7)), "it begins anew, on all shards"
    assert first.pull("w").eq(7).all()
    with pytest.raises(TensorLost, match="'w'"):
        second.pull("w")
    assert not second.init("w", torch.zeros(LARGE, dtype=torch.int64))
    second.push("w", torch.ones(LARGE, dtype=torch.int64)).wait()
    assert first.pull("w").eq(8).all()


@everywhere
def test_workers_go_on_while_servers_are_started_again(
    make: Callable[..., Rig], transport: Callable[[], Transport]
) -> None:
    """What is there in the end is whole: no slice of it is of a tensor that is gone."""
    rig, over, pushes, lost = make(transport()), threading.Event(), [0, 0], [0, 0]

    def work(worker: int) -> None:
        try:
            server = rig.session().server
            server.init("w", torch.zeros(LARGE))
            while not over.is_set():
                try:
                    server.push("w", torch.ones(LARGE)).wait()
                    pushes[worker] += 1
                except TensorLost:
                    lost[worker] += 1
                    server.init("w", torch.zeros(LARGE))
        finally:
            over.set()

    def kill() -> None:
        try:
            for shard in (0, 1, 1, 0, None):
                before = list(pushes)
                eventually(lambda: over.is_set() or min(map(sub, pushes, before)) > 1, "both push")  # noqa: B023
                if shard is not None:
                    rig.restart(shard)
        finally:
            over.set()

    at_once(lambda: work(0), lambda: work(1), kill)
    assert min(lost) > 0
    server = rig.session().server
    server.init("w", torch.zeros(LARGE))
    before = server.pull("w")
    server.push("w", torch.ones(LARGE)).wait()
    assert (server.pull("w") - before).eq(1).all()
    assert before.min() >= 0


@pytest.mark.parametrize("seed", range(4))
def test_a_tensor_is_never_put_together_of_two(make: Callable[..., Rig], seed: int) -> None:
    """Whoever brings it, on a bad network, while servers are started again and workers lose their turn."""
    limits = (
        ServerLimits(tensors=TensorLimits(bring=timedelta(seconds=0.2))),
        WorkerLimits(renew=timedelta(seconds=0.05)),
    )
    rig, network, chance = make(None, *limits, replicas=3), Network(seed, 0.2), random.Random(seed)
    over, pulled = threading.Event(), [0, 0, 0]

    def work(worker: int) -> None:
        server, rounds = rig.session(lambda inner: Unreliable(inner, network)).server, 0
        try:
            while not over.is_set():
                rounds += 1
                try:
                    server.init("w", torch.full((LARGE,), 1000.0 * rounds + worker))
                    assert len(set(server.pull("w").tolist())) == 1
                    pulled[worker] += 1
                    if chance.random() < 0.3:
                        server.free("w")
                except TensorLost:
                    pass
        finally:
            over.set()

    def kill() -> None:
        try:
            for _ in range(8):
                before = sum(pulled)
                eventually(lambda: over.is_set() or sum(pulled) > before + 3, "somebody pulls")  # noqa: B023
                rig.restart(chance.randrange(3))
        finally:
            over.set()

    at_once(*(partial(work, worker) for worker in range(3)), kill)


def test_pushes_of_a_process_are_carried_out_in_their_order(make: Callable[..., Rig]) -> None:
    server = make().session().server
    server.init("w", torch.zeros(LARGE))
    server.push("w", torch.ones(LARGE), "copy")
    server.push("w", torch.full((LARGE,), 2.0))
    early = server.prefetch("w")
    server.push("w", rule="zero")
    server.push("w", torch.full((LARGE,), 5.0))
    assert server.pull("w").eq(5).all()
    assert early.wait().eq(3).all()


def test_pushes_of_a_process_and_of_its_child_all_count(make: Callable[..., Rig]) -> None:
    """A child that calls `connect`, such as a process of a DataLoader, has its parent's environment."""
    rig = make()
    parent, child = (rig.session(instance="one").server for _ in range(2))
    parent.init("w", torch.zeros(LARGE))
    child.init("w", torch.zeros(LARGE))
    for server in (child, parent, child):
        server.push("w", torch.ones(LARGE)).wait()
    assert parent.pull("w").eq(3).all()


def test_what_is_pushed_may_change_at_once(make: Callable[..., Rig]) -> None:
    server, values = make().session().server, torch.zeros(LARGE)
    server.init("w", values)
    for n in range(20):
        values.fill_(n)
        server.push("w", values)
        values.fill_(-1.0)
    assert server.pull("w").eq(sum(range(20))).all()


class Slow(Connection):
    """A connection on which each slice takes a while, and a pull's time limit is 300 times as short."""

    def __init__(self, inner: Connection) -> None:
        self._inner = inner

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        slow = method == calls.PULL_TENSOR.name
        for answer in self._inner.call(method, frame, timeout=timeout / 300 if slow else timeout):
            if slow:
                time.sleep(0.05)
            yield answer

    def close(self) -> None:
        self._inner.close()


def test_a_pull_of_many_slices_takes_as_long_as_it_needs(make: Callable[..., Rig]) -> None:
    server = make(None, USUAL, WorkerLimits(patience=timedelta(seconds=2))).session(Slow).server
    server.init("w", torch.ones(LARGE))
    assert server.pull("w").eq(1).all()
    assert calls.OPTIMIZER_STATE.timeout == calls.PULL_TENSOR.timeout, "it has as many answers"


def test_a_pull_goes_where_it_is_to_go(make: Callable[..., Rig]) -> None:
    server = make().session().server
    server.init("w", torch.full((40, 30), 2.0))
    layer = torch.nn.Linear(30, 40)
    before = layer.weight.detach().clone()
    handle = server.prefetch("w", layer.weight)
    eventually(lambda: handle.done, "the values are there")
    assert layer.weight.equal(before), "not before it is waited for"
    assert handle.wait() is not None
    assert layer.weight.eq(2.0).all()
    into = torch.zeros(30, 40).t()  # not contiguous
    assert server.pull("w", into).eq(2.0).all()
    assert into.eq(2.0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "uint8", "int64", "bool"])
def test_tensors_of_every_dtype(make: Callable[..., Rig], dtype: str) -> None:
    server, one = make().session().server, torch.ones(3, 5, dtype=getattr(torch, dtype))
    server.init("w", torch.zeros_like(one))
    server.push("w", one)
    assert server.pull("w").equal(one)
    assert server.pull("w").dtype is one.dtype


def test_a_freed_tensor_is_freed_for_all_and_its_name_may_be_used_again(make: Callable[..., Rig]) -> None:
    rig = make()
    first, second = rig.session().server, rig.session().server
    for server in (first, second):
        server.init("w", torch.zeros(LARGE))
    assert sum(server.status().tensor_bytes for server in rig.servers) == 4 * LARGE
    first.push("w", torch.ones(LARGE))
    first.free("w")
    assert sum(server.status().tensor_bytes for server in rig.servers) == 0
    with pytest.raises(UsageError, match=r"no tensor 'w' with session\.server, or has freed it"):
        first.push("w", torch.ones(LARGE))
    with pytest.raises(TensorLost, match=r"'w' .* was freed"):
        second.push("w", torch.ones(LARGE)).wait()
    assert second.init("w", torch.zeros(2, dtype=torch.int8)), "now as another one"
    assert second.pull("w").tolist() == [0, 0]


def test_what_nobody_has_waited_for_does_not_fail_in_silence(make: Callable[..., Rig]) -> None:
    rig = make()
    server = rig.session().server
    server.init("w", torch.zeros(LARGE))
    server.init("other", torch.zeros(1))
    rig.restart(0)
    rig.restart(1)
    server.init("other", torch.zeros(1))
    handle = server.push("w", torch.ones(LARGE))
    eventually(lambda: handle.done, "it has failed")
    with pytest.raises(TensorLost, match="'w'"):
        server.push("other", torch.ones(1))
    server.push("other", torch.ones(1))
    assert server.pull("other").item() == 1.0, "it is told once"
    handle = server.push("w", torch.ones(LARGE))
    eventually(lambda: handle.done, "it has failed")
    server.init("w", torch.zeros(LARGE))
    server.push("w", torch.ones(LARGE)).wait()
    assert server.pull("w").eq(1).all(), "of the tensor that was lost, nothing is told any more"


def test_what_was_begun_is_carried_out_when_the_session_ends(make: Callable[..., Rig]) -> None:
    rig = make()
    session, other = rig.session(), rig.session().server
    session.server.init("w", torch.zeros(LARGE))
    other.init("w", torch.zeros(LARGE))
    for _ in range(10):
        session.server.push("w", torch.ones(LARGE))
    session.close()
    assert other.pull("w").eq(10).all()
    with pytest.raises(UsageError, match="the session is closed"):
        session.server.push("w", torch.ones(LARGE))


class Held(Connection):
    """Pushes are not made before they may."""

    def __init__(self, inner: Connection, may: threading.Event) -> None:
        self._inner, self._may = inner, may

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        if method == "PushTensor":
            assert self._may.wait(LIMIT)
        return self._inner.call(method, frame, timeout=timeout)

    def close(self) -> None:
        self._inner.close()


def test_a_push_under_way_counts_when_the_tensor_is_found_again(make: Callable[..., Rig]) -> None:
    """A script may call `init` in each epoch. The session does not end before the push is carried out."""
    may, looks = threading.Event(), 0
    server = make().session(partial(Held, may=may)).server
    server.init("w", torch.zeros(1))
    server.push("w", torch.ones(1))
    assert not server.init("w", torch.zeros(1))

    def stops() -> bool:
        nonlocal looks
        looks += 1
        return looks > 3

    server.finish(stops)
    assert looks > 3, "the push was forgotten"
    may.set()
    server.finish(lambda: False)
    assert server.pull("w").item() == 1.0


class Dying(Connection):
    """Its process ends when it is about to bring a tensor's last slices."""

    def __init__(self, inner: Connection) -> None:
        self._inner = inner

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        if method == "PutTensor":
            raise SystemExit
        return self._inner.call(method, frame, timeout=timeout)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("after", ["nothing", "the other shard's slices"])
def test_another_worker_brings_what_a_dead_one_has_not(make: Callable[..., Rig], after: str) -> None:
    rig, home = make(limits=ServerLimits(tensors=TensorLimits(bring=timedelta(seconds=1)))), home_of("w")
    numbers = iter(range(SHARDS))

    def through(inner: Connection) -> Connection:
        return Dying(inner) if after == "nothing" or next(numbers) == home else inner

    dead, alive = rig.session(through).server, rig.session().server
    with pytest.raises(SystemExit):
        dead.init("w", torch.zeros(LARGE))
    assert alive.init("w", torch.ones(LARGE))
    assert alive.pull("w").eq(1).all()


def test_a_worker_that_takes_long_to_bring_a_tensor_says_that_it_still_does(make: Callable[..., Rig]) -> None:
    methods: list[str] = []

    def note(method: str, _: Frame) -> None:
        methods.append(method)

    limits = WorkerLimits(renew=timedelta(0))
    server = make(worker_limits=limits).session(lambda inner: Watched(inner, note)).server
    server.init("w", torch.zeros(LARGE))
    slices = len(spread("w", (LARGE,), "float32", bucket_bytes=BUCKET, shards=SHARDS))
    assert methods.count("PutTensor") == slices
    assert methods.count("DeclareTensor") >= slices, "one before each slice"
    assert server.pull("w").eq(0).all()


def test_a_tensor_that_does_not_fit_is_refused_and_leaves_nothing(make: Callable[..., Rig]) -> None:
    rig = make(tensorBytes=8000)
    server = rig.session().server
    server.init("w", torch.zeros(LARGE))  # 6000 bytes on each
    for name in ("x", "y"):
        with pytest.raises(UsageError, match=rf"'{name}' needs .*parameterServer\.tensorBytes: 8000"):
            server.init(name, torch.zeros(LARGE))
    assert sum(each.status().tensor_bytes for each in rig.servers) == 4 * LARGE
    server.free("w")
    server.init("x", torch.zeros(LARGE))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: s.init("w", [1.0]), "keeps tensors, but 'w' was given a list"),
        (lambda s: s.init("w", torch.zeros(0, 3)), "Expected a dense one with elements"),
        (lambda s: s.init("w", torch.zeros(3, dtype=torch.complex64)), "torch.complex64"),
        (lambda s: s.init("w", torch.zeros(3).to_sparse()), "torch.sparse_coo"),
        (lambda s: s.init("there", torch.zeros(3)), r"initialised as float32\[2\]"),
        (lambda s: s.init("w", torch.zeros(3, device="meta")), "is on the meta device, and has no values"),
        (
            lambda s: s.init("w", torch.nested.as_nested_tensor([torch.zeros(2)], layout=torch.jagged)),
            "the tensor is nested",
        ),
        (lambda s: s.init("x" * 201, torch.zeros(3)), "1 to 200 printable characters"),
        (lambda s: s.init(5, torch.zeros(3)), "1 to 200 printable characters; given: 5"),
        (lambda s: s.init("\ud800", torch.zeros(3)), r"1 to 200 printable characters; given: '\\ud800'"),
        (lambda s: s.pull(["there"]), r"1 to 200 printable characters; given: \['there'\]"),
        (lambda s: s.pull("there", [1.0, 2.0]), r"pull\('there'\): expected a tensor, given a list"),
        (lambda s: s.prefetch("there").wait(5), r"wait\(\) got 5; expected a datetime.timedelta"),
        (
            lambda s: s.push("w", torch.zeros(2)),
            "no tensor 'w' .* Initialised: 'there'. Call session.server.init",
        ),
        (lambda s: s.pull("w"), "Initialised: 'there'"),
        (lambda s: s.free("w"), "Initialised: 'there'"),
        (
            lambda s: s.push("there", torch.zeros(3)),
            r"the tensor is float32\[3\], but 'there' was .* float32\[2\]",
        ),
        (lambda s: s.push("there", torch.zeros(2).double()), r"the tensor is float64\[2\]"),
        (lambda s: s.pull("there", torch.zeros(1, 2)), r"the tensor is float32\[1, 2\]"),
        (
            lambda s: s.push("there", torch.zeros(2), "mean"),
            "unknown rule 'mean'; expected one of add, copy, zero",
        ),
        (lambda s: s.push("there", torch.zeros(2), "zero"), "the rule 'zero' needs no tensor"),
        (lambda s: s.push("there"), "the rule 'add' needs a tensor"),
    ],
)
def test_what_cannot_be_is_said(make: Callable[..., Rig], call: Callable[[Any], object], text: str) -> None:
    rig = make()
    server = rig.session().server
    server.init("there", torch.ones(2))
    with pytest.raises(UsageError, match=text):
        call(server)
    assert server.names() == ["there"]
    assert server.pull("there").tolist() == [1.0, 1.0]


def test_a_worker_of_several_processes_has_none() -> None:
    session = Session("test", make_spec(), 0, [], world=LocalWorld(0, (), 2))
    with pytest.raises(UsageError, match=r"worker\.processes: 1"):
        session.server  # noqa: B018


def test_a_tensor_outlives_terms_of_the_model(tmp_path: Any) -> None:
    """A job may have both: going back to a checkpoint concerns the model alone."""
    with running_job(tmp_path, checkpoints=tmp_path / "checkpoints") as job:
        session = job.session(0)
        model = torch.nn.Linear(2, 1)
        session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        session.server.init("w", torch.ones(3))
        term = job.status().term
        with job.coordinator.job.lock:
            job.coordinator.job.note_course(CourseEvent.ROLL_BACK)
        job.until(lambda: job.status().term > term, "the job goes back")
        session.server.push("w", torch.ones(3)).wait()
        assert session.server.pull("w").tolist() == [2.0] * 3


def test_a_server_is_ready_when_somebody_uses_it(make: Callable[..., Rig]) -> None:
    rig = make()
    assert not any(server.status().ready for server in rig.servers)
    session = rig.session()
    session.server.init("small", torch.zeros(1))
    assert all(server.status().ready for server in rig.servers), "also the one that has nothing of it"
    session.report(accuracy=0.5)
    assert rig.servers[0].status().progress.metrics == {"accuracy": 0.5}


def test_a_handle_waits_no_longer_than_it_is_told(make: Callable[..., Rig]) -> None:
    rig = make()
    server = rig.session().server
    server.init("w", torch.zeros(LARGE))
    for each in rig.servers:
        each.close(keep=False)
    handle = server.push("w", torch.ones(LARGE))
    with pytest.raises(TimeoutError):
        handle.wait(timedelta(seconds=0.05))
    assert not handle.done


@pytest.mark.parametrize("begun", [True, False])
def test_a_child_of_the_worker_is_told_that_it_cannot_use_it(make: Callable[..., Rig], begun: bool) -> None:
    """The threads that make the calls are not in a child, which would wait for ever."""
    session = make().session()
    if begun:
        session.server.init("w", torch.ones(2))
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            session.server.pull("w")
        except BaseException as error:  # noqa: BLE001
            os.write(tell, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(tell)
    try:
        text = os.read(told, 1000).decode() if select.select([told], [], [], LIMIT)[0] else "nothing"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
    assert text.startswith("UsageError: session.server works only in the worker's own process")
    assert session.server.init("w", torch.ones(2)) is not begun
    assert session.server.pull("w").tolist() == [1.0, 1.0]


def test_a_session_that_is_closed_says_so(make: Callable[..., Rig]) -> None:
    session = make().session()
    server = session.server
    server.init("w", torch.ones(2))
    session.close()
    for call in (lambda: server.init("x", torch.ones(2)), lambda: server.pull("w")):
        with pytest.raises(UsageError, match="the session is closed"):
            call()
