"""Hostfiles for mpirun, from Slurm's environment and from lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ps.cli import main
from elastic_ps.errors import UserError
from elastic_ps.local.hosts import Host, expand, from_lines, from_slurm, write


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("node1", ["node1"]),
        ("a,b,c", ["a", "b", "c"]),
        ("gpu[01-03,07],login", ["gpu01", "gpu02", "gpu03", "gpu07", "login"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("rack[0-1]node[1-2].cluster", [f"rack{r}node{n}.cluster" for r in (0, 1) for n in (1, 2)]),
    ],
)
def test_a_list_of_slurm_is_expanded(nodelist: str, names: list[str]) -> None:
    assert expand(nodelist) == names


@pytest.mark.parametrize("nodelist", ["n[1-", "n[3-1]", "n[x]", "n[]", "n]1[", "n[1-2-3]", "n[[1]]"])
def test_a_list_that_cannot_be_read_is_shown(nodelist: str) -> None:
    with pytest.raises(UserError, match=r"cannot be read; expected names and ranges as in gpu\[01-03,07\]"):
        expand(nodelist)


def test_a_range_that_is_far_too_long_takes_no_memory() -> None:
    for nodelist in ("n[1-99999999999]", "n[0-999]r[0-999]s[0-999]"):
        with pytest.raises(UserError, match="more than 65536 hosts"):
            expand(nodelist)


def test_hosts_have_the_tasks_that_slurm_gives_them() -> None:
    slurm = {"SLURM_JOB_NODELIST": "a[1-3],b", "SLURM_TASKS_PER_NODE": "4(x2),2,1"}
    assert from_slurm(slurm) == [Host("a1", 4), Host("a2", 4), Host("a3", 2), Host("b", 1)]
    assert from_slurm({"SLURM_NODELIST": "a[1-2]"}) == [Host("a1", 1), Host("a2", 1)]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, r"no hosts are given, and SLURM_JOB_NODELIST is not set\. Name the hosts"),
        ({"SLURM_TASKS_PER_NODE": "4(x3)"}, "for 3 hosts, but .* has 2"),
        ({"SLURM_TASKS_PER_NODE": "four"}, r"is 'four'; expected numbers as in 4\(x2\),1"),
        ({"SLURM_TASKS_PER_NODE": "4(x99999999999)"}, "expected numbers"),
    ],
)
def test_an_environment_that_cannot_be_read_is_said(variables: dict[str, str], words: str) -> None:
    nodes = {"SLURM_JOB_NODELIST": "a[1-2]"} if variables else {}
    with pytest.raises(UserError, match=words):
        from_slurm({**nodes, **variables})


def test_lines_as_people_write_them() -> None:
    lines = ["# ours", "", "host0 slots=1  # the parameter server", "host1:4", "10.0.0.7", "gpu-2.site"]
    expected = [Host("host0", 1), Host("host1", 4), Host("10.0.0.7", 3), Host("gpu-2.site", 3)]
    assert from_lines(lines, slots=3) == expected


@pytest.mark.parametrize(
    "line", ["host:", "host:0", "host slots=", "two hosts", "-x", "host;ls", "host:four"]
)
def test_a_line_that_is_no_host_is_shown(line: str) -> None:
    with pytest.raises(
        UserError, match="is not a host; expected a name, as in host1, host1:4 or host1 slots=4"
    ):
        from_lines([line], slots=1)


def test_a_host_is_named_once() -> None:
    with pytest.raises(UserError, match="the host a is named twice"):
        from_lines(["a", "a:4"], slots=1)


def test_each_mpirun_gets_its_own_words() -> None:
    hosts = [Host("a", 1), Host("b", 4)]
    first = "# rank 0 is on a: mpirun -n 5 --hostfile FILE elastic-ps run JOB\n"
    assert write(hosts, "open-mpi") == first + "a slots=1\nb slots=4\n"
    assert write(hosts, "mpich") == first + "a:1\nb:4\n"


def test_a_rank_is_needed_for_a_worker() -> None:
    with pytest.raises(UserError, match="room for 1 rank, but rank 0 runs the launcher"):
        write([Host("a", 1)], "open-mpi")


def test_the_command_prints_a_hostfile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hosts_address"
    file.write_text("a\nb\n")
    assert main(["hostfile", "--from", str(file), "--slots", "2", "--style", "mpich"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["a:2", "b:2"]
    assert main(["hostfile", "--from", str(tmp_path / "nothing")]) == 2
    assert "cannot read" in capsys.readouterr().err
