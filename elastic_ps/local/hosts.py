"""The hosts for the ranks of `mpirun`: from Slurm's environment, or from a list as for ssh.

It does not use Slurm's programs, which a container or a login host may lack.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from elastic_ps.contract.words import amount
from elastic_ps.errors import UserError

Style: TypeAlias = Literal["open-mpi", "mpich"]

MOST = 65_536
"""The most hosts in a list. A range with a digit too many would fill the memory."""

_NAME = r"(?P<name>[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)"
_LINE = re.compile(_NAME + r"((:|\s+slots\s*=\s*)(?P<slots>[1-9]\d*))?")
_COUNT = re.compile(r"(?P<tasks>\d+)(?:\(x(?P<nodes>\d+)\))?")
_PART = re.compile(r"([^][,]+)|\[([^][]*)\]")


class Host(NamedTuple):
    """A host, with its number of slots for ranks."""

    name: str
    slots: int


def from_slurm(variables: Mapping[str, str]) -> list[Host]:
    """The hosts of a Slurm allocation, each with as many slots as Slurm gives it tasks.

    Args:
        variables: the environment of a process in the allocation; see "OUTPUT ENVIRONMENT VARIABLES" of
            salloc(1).

    Raises:
        UserError: this is not an allocation, or the variables cannot be parsed.
    """
    nodes = variables.get("SLURM_JOB_NODELIST") or variables.get("SLURM_NODELIST")
    if not nodes:
        raise UserError(
            "no hosts are given, and SLURM_JOB_NODELIST is not set. Name the hosts, as in `elastic-ps "
            "hostfile host0:1 host1:4`, or their file with --from, or run this in a Slurm allocation"
        )
    names = expand(nodes)
    tasks = _tasks(variables["SLURM_TASKS_PER_NODE"]) if variables.get("SLURM_TASKS_PER_NODE") else None
    if tasks is not None and len(tasks) != len(names):
        raise UserError(
            f"SLURM_TASKS_PER_NODE is {variables['SLURM_TASKS_PER_NODE']!r}, for {len(tasks)} hosts, but "
            f"SLURM_JOB_NODELIST {nodes!r} has {len(names)}"
        )
    return [Host(name, slots) for name, slots in zip(names, tasks or [1] * len(names), strict=True)]


def expand(nodelist: str) -> list[str]:
    """The hosts of a list in Slurm's format: `gpu[01-03,07],login` has five. Raises UserError."""
    names: list[str] = []
    for word in re.findall(r"(?:[^][,]|\[[^][]*\])+|,|.", nodelist):
        if word == ",":
            continue
        parts = _PART.findall(word)
        if "".join(plain or f"[{inner}]" for plain, inner in parts) != word:
            raise _unreadable(nodelist, word)
        choices = [[plain] if plain else _numbers(nodelist, inner) for plain, inner in parts]
        names += map("".join, itertools.islice(itertools.product(*choices), MOST + 1))
        if len(names) > MOST:
            raise UserError(f"the list of hosts {nodelist!r} has more than {MOST} hosts")
    return names


def _numbers(nodelist: str, ranges: str) -> list[str]:
    found: list[str] = []
    for each in ranges.split(","):
        first, dash, last = each.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise _unreadable(nodelist, f"[{ranges}]")
        numbers = range(int(first), int(last) + 1)
        found += [str(number).zfill(len(first)) for number in itertools.islice(numbers, MOST + 1)]
    return found


def _unreadable(nodelist: str, part: str) -> UserError:
    return UserError(
        f"{part!r} in the list of hosts {nodelist!r} cannot be read; expected names and ranges as in "
        "gpu[01-03,07],login"
    )


def _tasks(text: str) -> list[int]:
    """The number of tasks of each host: `4(x2),1` is 4, 4 and 1. Raises UserError."""
    found: list[int] = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word)
        if match is None or int(match["nodes"] or 1) > MOST:
            raise UserError(f"SLURM_TASKS_PER_NODE is {text!r}; expected numbers as in 4(x2),1")
        found += [int(match["tasks"])] * int(match["nodes"] or 1)
    return found


def from_lines(lines: Iterable[str], *, slots: int) -> list[Host]:
    """Hosts in the formats `host1`, `host1:4` and `host1 slots=4`, with comments after a #.

    Args:
        slots: the slots of a host without a number.

    Raises:
        UserError: a line cannot be parsed, or names a host again.
    """
    hosts: dict[str, Host] = {}
    for line in lines:
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise UserError(f"{text!r} is not a host; expected a name, as in host1, host1:4 or host1 slots=4")
        if match["name"] in hosts:
            raise UserError(f"the host {match['name']} is named twice; name it once, with all of its slots")
        hosts[match["name"]] = Host(match["name"], int(match["slots"] or slots))
    return list(hosts.values())


def write(hosts: Sequence[Host], style: Style) -> str:
    """A hostfile for `mpirun`. Its first line has the command.

    Raises:
        UserError: there is no rank for a worker.
    """
    ranks = sum(host.slots for host in hosts)
    if ranks < 2:
        raise UserError(
            f"there is room for {amount(ranks, 'rank')}, but rank 0 runs the launcher and the parameter "
            "servers, and each worker needs a further rank. Give a host more slots, or name more hosts"
        )
    lines = [f"# rank 0 is on {hosts[0].name}: mpirun -n {ranks} --hostfile FILE elastic-ps run JOB"]
    between = ":" if style == "mpich" else " slots="
    return "\n".join([*lines, *(f"{host.name}{between}{host.slots}" for host in hosts if host.slots)]) + "\n"
