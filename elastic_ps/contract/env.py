"""The contract between a process and its starter (the operator, the local launcher, mpirun).

This is the only module that reads or prepares environment variables. `ProcessEnvironment` is written by
the one side with `to_variables` and read by the other with `read`.

How a process ends is part of the contract, too: `elastic_ps.contract.exits`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from elastic_ps.api.job import GROUP, TrainingJobSpec, parse_spec
from elastic_ps.contract import identity
from elastic_ps.errors import UsageError, UserError

PREFIX = "ELASTIC_PS_"
DEFAULT_PORT = 2222
DEFAULT_DATA_PORT = DEFAULT_PORT + 1
"""The default port of the data protocol; see `transport.tcp`."""
DEFAULT_HTTP_PORT = 8080

LOCAL_RANK, LOCAL_WORLD_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
"""Set in each process of a worker with several, as by `torchrun`. Scripts choose their GPU by it."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""The number of threads that a process computes with. By default torch uses one for each core.

The starter divides the cores among its processes with them, unless the user has set the first variable."""

RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""A process started by `mpirun` has one of these variables."""

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""The number of ranks; the first variable that is set counts. The last ones are those of a batch system,
which may start one process, in which `mpirun` starts several."""

_OF_MPI = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPI_")
"""Prefixes of variables that would make a script with MPI take itself for a rank, and wait."""

Role = Literal["ps", "standby", "worker", "evaluator"]
Resume = Literal["no", "auto", "require"]

IDENTITIES: dict[Role, identity.Role] = {
    "ps": "server",
    "standby": "standby",
    "worker": "worker",
    "evaluator": "evaluator",
}
"""The role in the certificate of a process."""

JOB_LABEL, ROLE_LABEL, INDEX_LABEL = f"{GROUP}/job", f"{GROUP}/role", f"{GROUP}/index"
"""The labels of every pod of a job: the job's name, the pod's role, and its index."""

DURABLE = PREFIX + "DURABLE"
"""The variable of `ProcessEnvironment.durable`. On a cluster it may change while a pod lives."""

CONTAINER: dict[Role, str] = {
    "ps": "parameter-server",
    "standby": "parameter-server",
    "worker": "worker",
    "evaluator": "evaluator",
}
"""The name of a process's container on a cluster, by which users' templates refer to it."""


@dataclass(frozen=True, kw_only=True)
class ProcessEnvironment:
    """The settings that a process of a job gets from its starter.

    Attributes:
        job: the job's name.
        spec: the job's spec as it was when the process was started.
        role: `ps`, `standby` (follows the PS of a shard), `worker` or `evaluator`.
        index: the shard's or the worker's index, from 0; the evaluator's is 0.
        addresses: `host:port` of every shard, in order. Here and below a scheme may precede it; see
            `transport.ways`.
        standbys: `host:port` of every shard's standby, in order of shard; empty if there are none.
        bind: `host:port` that a PS or standby listens on.
        http: `host:port` on which a PS or standby serves /status, /healthz and /metrics.
        checkpoints: directory of the checkpoints; None writes none.
        resume: whether a PS starts from the newest checkpoint: `no`, `auto` (if there is one), `require`.
        durable: for shard 0, a version that the starter knows to be on disk: the PS waits until the directory
            has it or a later one. None if the starter knows of none.
        trace: directory for trace events; None records none.
        history: directory for the histories that tests check; None records none.
        lifeline: a file descriptor that closes when the starter dies; the process then ends itself.
        run: a name of this run of the job that no other run has; "" if the starter gives none.
        instance: a name of the process that no other process has; "" if the starter gives none.
        hostname: the host name that a worker reports; "": the machine's own.
        tls: directory of the process's certificate, see `identity`; None: the job uses no TLS.
        local_rank: the process's index among those of its worker; 0 if there is one.
        links: for a worker of several processes, pairs of sockets' file descriptors: in process 0 a pair to
            each other process, in the others a pair to process 0. Empty in the process that starts them.
        tuning: for shard 0, a file with the wanted `MutableFields`. The starter replaces it when a user
            changes the job. None if the job cannot be changed.
        joined: a file that a worker creates when it has joined, for its starter to see; None creates none.
        crowded: for a PS, whether all processes of the job share its host, and the workers take every core.
    """

    job: str
    spec: TrainingJobSpec
    role: Role
    index: int
    addresses: tuple[str, ...]
    standbys: tuple[str, ...] = ()
    bind: str = f"0.0.0.0:{DEFAULT_PORT}"
    http: str = f"0.0.0.0:{DEFAULT_HTTP_PORT}"
    checkpoints: Path | None = None
    resume: Resume = "auto"
    durable: int | None = None
    trace: Path | None = None
    history: Path | None = None
    lifeline: int | None = None
    run: str = ""
    instance: str = ""
    hostname: str = ""
    tls: Path | None = None
    local_rank: int = 0
    links: tuple[tuple[int, int], ...] = ()
    tuning: Path | None = None
    joined: Path | None = None
    crowded: bool = False

    def to_variables(self) -> dict[str, str]:
        """The environment variables that `read` turns back into this object."""
        values = {
            "JOB": self.job,
            "SPEC": json.dumps(self.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)),
            "ROLE": self.role,
            "INDEX": str(self.index),
            "ADDRESSES": ",".join(self.addresses),
            "STANDBYS": ",".join(self.standbys),
            "BIND": self.bind,
            "HTTP": self.http,
            "CHECKPOINTS": str(self.checkpoints or ""),
            "RESUME": self.resume,
            "DURABLE": "" if self.durable is None else str(self.durable),
            "TRACE": str(self.trace or ""),
            "HISTORY": str(self.history or ""),
            "LIFELINE": "" if self.lifeline is None else str(self.lifeline),
            "RUN": self.run,
            "INSTANCE": self.instance,
            "HOSTNAME": self.hostname,
            "TLS_DIRECTORY": str(self.tls or ""),
            "LOCAL_RANK": str(self.local_rank or ""),
            "LINKS": ",".join(f"{questions}:{gradients}" for questions, gradients in self.links),
            "TUNING": str(self.tuning or ""),
            "JOINED": str(self.joined or ""),
            "CROWDED": "yes" if self.crowded else "",
        }
        return {PREFIX + key: value for key, value in values.items() if value}


def in_job(variables: Mapping[str, str] | None = None) -> bool:
    """Whether the process was started as part of a job: it has variables of the contract."""
    source = os.environ if variables is None else variables
    return any(PREFIX + key in source for key in ("JOB", "SPEC", "ROLE", "INDEX", "ADDRESSES"))


def read(variables: Mapping[str, str] | None = None) -> ProcessEnvironment:
    """Read the contract from `variables` (the process's own environment if None).

    Raises:
        UsageError: a variable is missing or wrong; the process was not started by elastic-ps.
    """
    source = os.environ if variables is None else variables

    def required(key: str) -> str:
        try:
            return source[PREFIX + key]
        except KeyError:
            raise UsageError(
                f"{PREFIX}{key} is not set: this process was not started as part of a job. "
                "Start the script with `elastic-ps run job.yaml`"
            ) from None

    def path(key: str) -> Path | None:
        value = source.get(PREFIX + key, "")
        return Path(value) if value else None

    role, resume = required("ROLE"), source.get(PREFIX + "RESUME", "auto")
    if role not in get_args(Role):
        raise UsageError(f"{PREFIX}ROLE is {role!r}; expected one of {', '.join(get_args(Role))}")
    if resume not in ("no", "auto", "require"):
        raise UsageError(f"{PREFIX}RESUME is {resume!r}; expected 'no', 'auto' or 'require'")
    index, lifeline = required("INDEX"), source.get(PREFIX + "LIFELINE", "")
    durable = source.get(DURABLE, "")
    for name, number in (("INDEX", index), ("DURABLE", durable or "0")):
        if not number.isdecimal():
            raise UsageError(f"{PREFIX}{name} is {number!r}; expected a whole number, 0 or more")
    return ProcessEnvironment(
        job=required("JOB"),
        spec=parse_spec(json.loads(required("SPEC")), source=PREFIX + "SPEC"),
        role=cast(Role, role),
        index=int(index),
        addresses=tuple(required("ADDRESSES").split(",")),
        standbys=tuple(filter(None, source.get(PREFIX + "STANDBYS", "").split(","))),
        bind=source.get(PREFIX + "BIND", f"0.0.0.0:{DEFAULT_PORT}"),
        http=source.get(PREFIX + "HTTP", f"0.0.0.0:{DEFAULT_HTTP_PORT}"),
        checkpoints=path("CHECKPOINTS"),
        resume="no" if resume == "no" else "require" if resume == "require" else "auto",
        durable=int(durable) if durable else None,
        trace=path("TRACE"),
        history=path("HISTORY"),
        lifeline=int(lifeline) if lifeline else None,
        run=source.get(PREFIX + "RUN", ""),
        instance=source.get(PREFIX + "INSTANCE", ""),
        hostname=source.get(PREFIX + "HOSTNAME", ""),
        tls=path("TLS_DIRECTORY"),
        local_rank=int(source.get(PREFIX + "LOCAL_RANK", "0")),
        links=tuple(
            (int(questions), int(gradients))
            for questions, _, gradients in (
                pair.partition(":") for pair in source.get(PREFIX + "LINKS", "").split(",") if pair
            )
        ),
        tuning=path("TUNING"),
        joined=path("JOINED"),
        crowded=source.get(PREFIX + "CROWDED", "") == "yes",
    )


def is_rank() -> bool:
    """Whether `mpirun`, or a batch system in its manner, has started this process."""
    return any(name in os.environ for name in RANKS)


def started_by_mpirun() -> bool:
    """Whether this process is one of several ranks."""
    size = next((os.environ[name] for name in SIZES if name in os.environ), "")
    return size != "1" and is_rank()


def require_ranks(size: int) -> None:
    """Raise UsageError if `mpirun` has started several processes, and MPI connects only this one with itself.

    Each of them would do the same work alone.
    """
    said = next((os.environ[name] for name in SIZES[:2] if name in os.environ), "1")
    if size == 1 and said != "1":
        raise UsageError(
            f"mpirun has started {said} processes, but MPI connects this one with no other, because mpi4py "
            "uses another MPI library than that of this mpirun. Compare `mpirun --version` with "
            "`python -m mpi4py --mpi-lib-version`, and use the mpirun of that library"
        )


def in_torchrun() -> bool:
    """Whether this process has the variables by which `torchrun` tells it how to find its group."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def inherited() -> dict[str, str]:
    """The environment of this process without the contract's variables, to start a process with another one.

    The variables of MPI are also left out, since a process that a rank starts is not a rank.
    """
    left_out = (PREFIX, *_OF_MPI) if is_rank() else (PREFIX,)
    return {key: value for key, value in os.environ.items() if not key.startswith(left_out)}


def disable_grpc_fork_hooks() -> None:
    """Keep gRPC's own fork handlers out of the process; call before grpc is imported.

    A training script forks (DataLoader workers) while calls are in flight, and gRPC's handlers then wait
    for the calls to end. Forked children here never touch a channel, so they need no handlers.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def state_directory() -> Path:
    """The directory of local jobs' state: `$XDG_STATE_HOME/elastic-ps`, by default in `~/.local/state`.

    Raises UserError if there is neither.
    """
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "elastic-ps"
    except RuntimeError as error:  # a container whose user has no entry in /etc/passwd
        raise UserError(
            "this user has no home directory for the state of jobs; set HOME or XDG_STATE_HOME"
        ) from error
