"""Whether a job fits in memory and on disk; the figures are those of docs/guides/resources.md."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from elastic_ps.local.room import LATELY, PROCESS, Kills, Room, disk_for, free_memory, needed, shortages
from tests.testing.harness import make_spec

MODEL = 500_000_000
"""Bytes of 125 million float32 parameters, of which Adam keeps two averages."""


def need(**fields: Any) -> Room:
    spec = make_spec(**fields)
    return needed(spec, MODEL, 2 * MODEL, workers=spec.worker.replicas)


def test_the_example_of_the_guide() -> None:
    writing = 3 * MODEL // 16
    two = need(worker={"replicas": 2})
    assert two.memory == 4 * MODEL + writing + 2 * 3 * MODEL + 3 * PROCESS
    assert two.disk == 6e9
    assert need(evaluator={"entrypoint": "a:b"}).disk == 15e9


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"worker": {"replicas": 2}}, 3 * MODEL + PROCESS),
        ({"parameterServer": {"durability": "standby"}}, 4 * MODEL + 3 * MODEL // 16 + PROCESS),
        ({"parameterServer": {"replicas": 2}}, PROCESS),
        ({"strategy": "all-reduce"}, 2 * MODEL),
        ({"consistency": {"mode": "local", "steps": 4}}, 2 * MODEL),
        ({"compression": {"values": "bf16"}}, MODEL),
        ({"evaluator": {"entrypoint": "a:b"}}, MODEL + PROCESS),
        ({"worker": {"processes": 3}}, 2 * (MODEL + PROCESS)),
    ],
)
def test_what_takes_more_memory(fields: dict[str, Any], more: int) -> None:
    assert need(**fields).memory - need().memory == more


def test_a_shortage_names_the_figures_and_what_to_change() -> None:
    enough = Room(8e9, 6e9)
    assert list(shortages(Room(8e9, 6e9), enough)) == []
    assert list(shortages(Room(8e9, 6e9), Room(math.inf, math.inf))) == []
    (memory,) = shortages(Room(9e9, 6e9), enough)
    for part in ("9.00 GB", "8.00 GB", "worker.replicas"):
        assert part in memory
    (disk,) = shortages(Room(8e9, 7.5e9), enough)
    for part in ("7.50 GB", "6.00 GB", "checkpoint.keep", "checkpoint.path"):
        assert part in disk


def test_memory_is_what_the_host_and_the_container_have_left(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    assert free_memory(proc=proc, cgroup=cgroup) == math.inf
    for directory in (proc, cgroup):
        directory.mkdir()
    (proc / "meminfo").write_text("MemTotal:  8 kB\nMemAvailable:    4 kB\n")
    assert free_memory(proc=proc, cgroup=cgroup) == 4096
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("1000\n")
    (cgroup / "memory.stat").write_text("anon 1000\ninactive_file 0\n")
    assert free_memory(proc=proc, cgroup=cgroup) == 4096
    (cgroup / "memory.max").write_text("3000\n")
    assert free_memory(proc=proc, cgroup=cgroup) == 2000
    (cgroup / "memory.current").write_text("3001\n")
    assert free_memory(proc=proc, cgroup=cgroup) == 0
    (cgroup / "memory.stat").write_text("anon 501\ninactive_anon 7\ninactive_file 2500\n")
    assert free_memory(proc=proc, cgroup=cgroup) == 2499


def test_the_kernel_counts_the_processes_that_had_no_memory(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("oom_kill 3\nunevictable_pgs_culled 9\n")
    kills = Kills(proc=tmp_path)
    assert not kills.lately(1.0), "earlier kills are not ours"
    counters.write_text("oom_kill 5\n")
    kills.look(1.5)
    assert [kills.lately(now) for now in (2.0, 3.0, 2.0 + LATELY)] == [True, True, False]
    counters.write_text("oom_kill 6\n")
    kills.look(9.0)
    assert [kills.lately(9.0 + more) for more in (LATELY / 2, LATELY)] == [True, False]
    counters.unlink()
    assert not kills.lately(20.0)


def test_the_disk_of_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    assert 0 < disk_for(tmp_path / "not" / "there") < math.inf


def test_checkpoints_that_new_ones_replace_are_no_shortage(tmp_path: Path) -> None:
    large = 1 << 40  # bytes that a sparse file does not take
    for directory in ("version-3", "partial-1-2-4"):
        (tmp_path / directory).mkdir()
        with (tmp_path / directory / "shard-0.safetensors").open("wb") as file:
            file.truncate(large)
    assert disk_for(tmp_path) - disk_for(tmp_path / "elsewhere") > 1.5 * large
