"""What happens to a job in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulator.network import Weather
from tests.simulator.world import Process

Fault = Callable[[Any], None]


def _worker(cluster: Any) -> int:
    return int(cluster.here.random.randrange(cluster.wanted))


def _shard(cluster: Any) -> int:
    return int(cluster.here.random.randrange(cluster.plan.shards))


def _some(cluster: Any, process: Process) -> list[Process]:
    """A worker with several processes: all of them, or one."""
    members = cluster.members(process)
    return members if cluster.here.random.random() < 0.5 else [cluster.here.random.choice(members)]


def kill_worker(cluster: Any) -> None:
    """All of it, or one of its processes."""
    random = cluster.here.random
    member = random.randrange(cluster.plan.processes) if random.random() < 0.7 else None
    cluster.kill("worker", _worker(cluster), member=member, tell=random.random() < 0.5)


def drain_worker(cluster: Any) -> None:
    """A worker is asked to leave: one of its processes, or all, each at another time."""
    worker = cluster.processes.get(("worker", _worker(cluster)))
    for member in _some(cluster, worker) if worker else []:
        cluster.here.note(f"drain {member.name}")
        cluster.later(lambda member=member: cluster.drain(member), 0.0, 0.05)


def kill_ps(cluster: Any) -> None:
    cluster.kill("ps", _shard(cluster))


def kill_standby(cluster: Any) -> None:
    if cluster.plan.standby:
        cluster.kill("standby", _shard(cluster))


def freeze(cluster: Any) -> None:
    """Somebody does not run for a while: longer than a lease, or shorter."""
    random = cluster.here.random
    process = random.choice(
        sorted((p for p in cluster.processes.values() if not p.dead), key=lambda p: p.name)
    )
    seconds = random.choice([1, 8, 15, 40]) * random.random()
    for each in _some(cluster, process):
        cluster.here.note(f"freeze {each.name} for {seconds:.3f} s")
        cluster.here.freeze(each, seconds)


def replace_ps(cluster: Any) -> None:
    """A parameter server is taken for dead and replaced, while it lives: frozen, or as ever."""
    _replace(cluster, "ps", _shard(cluster), frozen=0.7)


def replace_worker(cluster: Any) -> None:
    """A worker is taken for dead and replaced, while it lives."""
    _replace(cluster, "worker", _worker(cluster), frozen=1.0)


def _replace(cluster: Any, role: str, index: int, *, frozen: float) -> None:
    """`frozen`: how probable it is that the process does not run for a while."""
    random = cluster.here.random
    old = cluster.processes.get((role, index))
    if old is None or old.dead:
        return
    if random.random() < frozen:
        seconds = random.choice([0.1, 0.5, 3, 20]) * random.random()
        for each in _some(cluster, old):
            cluster.here.freeze(each, seconds)
    cluster.here.note(f"replace {old.name}")
    cluster.start(role, index)


def cut(cluster: Any) -> None:
    """A worker, or a shard, does not reach an address for a while."""
    random = cluster.here.random
    source = random.choice([f"worker-{_worker(cluster)}", "ps-0", f"ps-{_shard(cluster)}"])
    kinds = ["ps", "standby"] if cluster.plan.standby else ["ps"]
    address = f"{random.choice(kinds)}-{_shard(cluster)}"
    cluster.here.note(f"cut {source} from {address}")
    cluster.network.cut.add((source, address))
    cluster.here.sleep(random.choice([0.3, 3, 15]) * random.random())
    cluster.network.cut.discard((source, address))


def storm(cluster: Any) -> None:
    """The network is bad for a while."""
    before = cluster.network.weather
    cluster.network.weather = Weather(lost_request=0.1, lost_answer=0.1, twice=0.1, late=0.1)
    cluster.here.sleep(cluster.here.random.uniform(0.1, 5))
    cluster.network.weather = before


def fill_disk(cluster: Any) -> None:
    seconds = cluster.here.random.uniform(0.05, 5)
    cluster.here.note(f"the disk is full for {seconds:.3f} s")
    cluster.disk.full_until = cluster.here.now + seconds


def fail_reads(cluster: Any) -> None:
    """The checkpoint volume cannot be read for a while, maybe while a parameter server starts."""
    random = cluster.here.random
    seconds = random.choice([0.01, 1, 10]) * random.random()
    cluster.here.note(f"the disk cannot be read for {seconds:.3f} s")
    cluster.disk.unreadable_until = cluster.here.now + seconds
    if random.random() < 0.5:
        cluster.kill("ps", _shard(cluster))


def grow(cluster: Any) -> None:
    """One more worker."""
    cluster.wanted += 1
    cluster.start("worker", cluster.wanted - 1)


def change(cluster: Any) -> None:
    """A person wants another consistency or compression, sometimes another one again soon."""
    random = cluster.here.random
    for _ in range(random.choice([1, 1, 2])):
        if random.random() < 0.5:
            cluster.here.sleep(random.choice([0.05, 0.5]) * random.random())
        cluster.change()


FAULTS: dict[str, Fault] = {
    f.__name__: f
    for f in (
        kill_worker,
        drain_worker,
        kill_ps,
        kill_standby,
        freeze,
        replace_ps,
        replace_worker,
        cut,
        storm,
        fill_disk,
        fail_reads,
        grow,
        change,
    )
}
