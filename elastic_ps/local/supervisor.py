"""Runs a job as processes on this machine: observes, asks `plan` what to do, and does it.

The supervisor is level-triggered: several times a second it compares the wanted job (`job.json`, which
`elastic-ps scale` edits) with the processes. It has its own thread, so that a slow view or a stopped terminal
never delays it.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import assert_never

from elastic_ps.api.job import TrainingJob
from elastic_ps.api.mutable import MutableFields
from elastic_ps.api.status import ServerStatus
from elastic_ps.checkpoint import files
from elastic_ps.contract import exits
from elastic_ps.contract.deaths import cause_of, is_sigkill
from elastic_ps.contract.env import ProcessEnvironment, Resume, Role, inherited
from elastic_ps.contract.words import amount
from elastic_ps.errors import ElasticPSError, InvalidJob, UserError
from elastic_ps.local import issuer, room
from elastic_ps.local import plan as planning
from elastic_ps.local.forks import Fork, ForkServer
from elastic_ps.local.options import Options, Outcome
from elastic_ps.local.plan import Observed, Process, StopRequest, Verdict
from elastic_ps.local.poller import Poller, fetch_evaluations, fetch_loss
from elastic_ps.local.processes import (
    Child,
    Lifeline,
    Started,
    bound_to,
    free_ports,
    may_pass,
    processes_of,
    with_threads,
)
from elastic_ps.local.record import Record
from elastic_ps.local.script import path_of
from elastic_ps.local.snapshot import at_the_end, phase_of, process_statuses, was_finished, with_answers
from elastic_ps.local.state import (
    KEEP_RUNS,
    JobDirectory,
    LocalStatus,
    generation_of,
    is_stopped,
    newest_checkpoint,
    start_time,
)
from elastic_ps.local.trace import collect_traces
from elastic_ps.process.lifecycle import Alarm, usable_cores

TICK = timedelta(milliseconds=50)
STATUS_INTERVAL = timedelta(milliseconds=500)

START_PAUSE = timedelta(seconds=2)
"""How long to wait after the system has refused to start a process."""


class Launcher:
    """One run of a job.

    Creating it reserves the job's name on this machine. `start` starts the processes, and `wait` blocks until
    the job is over and no process is left. Leaving the `with` block ends everything in any case. Thread-safe,
    except that `start`, `wait` and the `with` block are for one thread.

    Raises:
        UserError: a job with this name runs already, or its state cannot be written.
    """

    def __init__(self, job: TrainingJob, options: Options | None = None) -> None:
        self.job = job
        self.options = options or Options()
        self.directory = JobDirectory(job.name, root=self.options.root, script=path_of(job))
        self.record = Record()
        self.run = uuid.uuid4().hex
        self.issuer = issuer.Issuer(self.run, self.directory.tls) if self.options.tls else None
        self._lock_file = self.directory.claim()
        with self.directory.kept():
            self.checkpoints = self._choose_checkpoints()
            self._resumed = newest_checkpoint(self.checkpoints) if self.options.resume is not None else None
            self.directory.write_job(job)
            self._mutable = self.directory.write_mutable(job)
            self._stamp = self.directory.job_stamp()
        self._schedule = self.options.schedule
        self._most_workers = max([job.spec.worker.replicas, *(at.workers for at in self._schedule)])
        # The original one: a restarted parameter server must cut the model into the same buckets.
        computing = job.spec.worker.replicas * job.spec.worker.processes
        self._crowded = self.options.slots is None and computing >= usable_cores()
        self._observed = Observed(started=time.monotonic())
        self._children: dict[int, Started] = {}
        self._start_times: dict[int, int | None] = {}
        self._instances: dict[int, str] = {}
        self._addresses: tuple[str, ...] = ()
        self.standbys: tuple[str, ...] = ()
        self._http: tuple[str, ...] = ()
        self._standbys_http: tuple[str, ...] = ()
        self._began = time.time()
        self._free_memory, self._kills = room.free_memory(), room.Kills()
        self._measured = False  # whether the job has been found to fit, or not
        self._written = -1.0
        self._answered_last = False
        self._start_at: dict[str, float] = {}
        self._warned: dict[str, str] = {}
        self._lock, self._ports = threading.Lock(), contextlib.ExitStack()
        self._stop: StopRequest | None = None
        self._wake = Alarm()
        self._error: BaseException | None = None
        self._status = self._build_status(ended=False)
        self._over = threading.Event()  # no process is left
        self._pid: int | None = None  # the pid of the launcher, once it has started

    def start(self) -> None:
        """Start the supervisor; returns at once. Call it in the launcher's process.

        Raises:
            CannotListen: this host has not enough free ports.
        """
        self._choose_addresses()
        self.directory.sign(self._lock_file)
        if self.issuer is not None:
            self.issuer.own()  # at once: later the disk may be full
        self._status = self._build_status(ended=False)
        self.directory.write_status(self._status)
        self._pid = os.getpid()
        try:
            threading.Thread(target=self._run, name="supervisor").start()
        except RuntimeError:  # the system has room for no other thread
            self._over.set()
            raise

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the job is over and no process of it is left; False if `timeout` came first."""
        if self._pid != os.getpid():
            return True
        until = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
        # Again and again: a signal that comes just before a wait does not end it. Not with Thread.join: if
        # a signal's handler raises there, Python 3.11 takes the thread for ended.
        while not self._over.wait(max(0, min(TICK.total_seconds(), until - time.monotonic()))):
            if time.monotonic() >= until:
                return False
        return True

    def stop(self, why: str, *, at_once: bool = False) -> None:
        """End the job: workers leave, parameter servers write a checkpoint; or kill all of them at once.

        Returns immediately. Safe to call from a signal handler and more than once.
        """
        if self._stop is None or at_once:
            self._stop = StopRequest(why, at_once=at_once)
        self._wake.set()

    @property
    def stopping(self) -> bool:
        """Whether `stop` has been called."""
        return self._stop is not None

    def status(self) -> LocalStatus:
        """The recent state of the job."""
        with self._lock:
            return self._status

    def outcome(self) -> Outcome:
        """How the job ended; call it after `wait`.

        Raises:
            ElasticPSError: the launcher itself failed; the cause is chained.
        """
        if self._error is not None:
            raise ElasticPSError(f"the launcher of job {self.job.name!r} failed") from self._error
        if self._observed.verdict is None:
            raise ElasticPSError(f"job {self.job.name!r} is still running")
        status = self.status()
        elapsed = timedelta(seconds=status.elapsed)
        return Outcome(self._observed.verdict, self.record, elapsed, status, self._schedule)

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.wait(timedelta(0)):
            self.stop("the launcher ends", at_once=True)
            self.wait()
        if self._pid != os.getpid():  # the launcher is a fork of this process, or its parent
            self._lock_file.close()
        else:
            files.unlock(self._lock_file)

    def _choose_checkpoints(self) -> Path:
        if self.options.resume is not None:
            with contextlib.suppress(OSError):
                self.directory.take_run(self.options.resume.resolve())  # before anything is written there
            return self.options.resume.resolve()
        given = self.job.spec.parameter_server.checkpoint.path
        if given is not None:
            return Path(given).resolve()
        for old in self.directory.remove_old_checkpoints():
            text = f"deleting {old}: without checkpoint.path, a job keeps the checkpoints of {KEEP_RUNS} runs"
            self.record.add_event(0.0, "checkpoint", text)
        return self.directory.new_checkpoints()

    def _choose_addresses(self) -> None:
        shards = self.job.spec.parameter_server.replicas
        standbys = shards if self._desired().standbys else 0
        ports = iter(free_ports(2 * (shards + standbys), self.options.ports, held=self._ports))
        self._addresses = tuple(f"{self.options.host}:{port}" for port in islice(ports, shards))
        self.standbys = tuple(f"{self.options.host}:{port}" for port in islice(ports, standbys))
        self._http = tuple(f"127.0.0.1:{port}" for port in islice(ports, shards))
        self._standbys_http = tuple(f"127.0.0.1:{port}" for port in ports)

    def _run(self) -> None:
        """The supervisor thread. No process outlives it, whatever happens."""
        with contextlib.ExitStack() as last:
            last.callback(self._over.set)
            last.callback(self._finish)
            last.enter_context(self._ports)
            self._forks = self.options.forks
            try:
                self._notices = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker-gone")
                last.callback(self._notices.shutdown, wait=True, cancel_futures=True)
                self._poller = last.enter_context(contextlib.closing(Poller(self._http)))
                self._lifeline = last.enter_context(contextlib.closing(Lifeline()))
                if self._forks is None and self.options.programs.forkable:
                    self._forks = last.enter_context(contextlib.closing(ForkServer(self._variables())))
                while self._forks is not None and self._stop is None and not self._forks.ready(TICK):
                    pass
                while self._observed.verdict is None or self._children:
                    self._tick()
                    self._wake.wait(TICK.total_seconds())
                    self._wake.clear()
            except BaseException as error:  # noqa: BLE001 - raised again by outcome()
                self._error = error
            finally:
                for child in self._children.values():
                    child.kill()

    def _tick(self) -> None:
        now = time.monotonic()
        changed = self._read_edits() | self._reap(now) | self._read_answers(now)
        self._observed = replace(self._observed, stop=self._stop)
        for action in planning.plan(self._desired(), self._observed, now):
            if isinstance(action, planning.Start) and now < self._start_at.get(action.name, now):
                continue
            self._execute(action, now)
            changed = True
        with self._lock:
            self._status = self._build_status(ended=False)
        if changed or now - self._written >= STATUS_INTERVAL.total_seconds():
            self._written = now
            self._write_status()

    def _write_status(self) -> None:
        """Write the status. A full disk must not end the training."""
        try:
            self.directory.write_status(self._status)
        except OSError as error:
            self._warn("status", f"the job's status cannot be written: {error}")

    def _desired(self) -> planning.Desired:
        spec = self.job.spec
        seconds = spec.run_policy.active_deadline_seconds
        return planning.Desired(
            shards=spec.parameter_server.replicas,
            workers=spec.worker.replicas,
            standbys=spec.parameter_server.durability == "standby",
            backoff_limit=spec.run_policy.backoff_limit,
            deadline=None if seconds is None else timedelta(seconds=seconds),
            stop_diverged=spec.run_policy.on_divergence == "stop",
            schedule=self._schedule,
            evaluator_grace=None if spec.evaluator is None else spec.evaluator.finish_timeout,
            leave_grace=self.options.leave_grace,
            finished_grace=self.options.finished_grace,
        )

    def _read_edits(self) -> bool:
        """Apply a new number of workers, and other changes of the running job (`tuning`)."""
        try:
            stamp = self.directory.job_stamp()
            if stamp == self._stamp:
                return False
            edited = self.directory.read_job()
            self._change(edited)
        except OSError as error:
            self._warn("edits", f"a change of the job is not applied yet: {error}")
            return False
        except (ValueError, InvalidJob) as error:
            self._stamp = stamp
            self._event("warning", f"a change of the job cannot be read: {error}")
            return False
        self._stamp = stamp
        self._warned.pop("edits", None)
        before, wanted = self.job.spec.worker.replicas, edited.spec.worker.replicas
        if wanted != before:
            self.job.spec.worker.replicas = wanted
            version = self._observed.progress.version
            self._event("scale", f"scaled from {before} to {wanted} workers at version {version}")
        return wanted != before

    def _change(self, edited: TrainingJob) -> None:
        """Hand the wanted fields to the parameter server and to processes that start later."""
        mutable = MutableFields.of(edited.spec, generation=generation_of(edited))
        if mutable.replaces(MutableFields.of(self.job.spec, generation=generation_of(self.job))):
            changed = {"metadata": edited.metadata, "spec": mutable.applied_to(self.job.spec)}
            job = self.job.model_copy(update=changed)
            self.directory.write_mutable(job)
            self.job = job

    def _reap(self, now: float) -> bool:
        """Note the processes that have ended."""
        processes, changed = list(self._observed.processes), False
        self._kills.look(now)
        for position, process in enumerate(processes):
            child = self._children.get(process.pid) if process.alive else None
            status = child.poll() if child else None
            if child is None or status is None:
                continue
            del self._children[process.pid]
            here = self.options.slots is None and not process.killed
            starved = here and is_sigkill(status) and self._kills.lately(now)
            changed, ended = True, replace(process, ended=now, exit=status, starved=starved)
            if ended.ending in ("failed", "invalid", "killed") or ended.role != "worker":
                ended = replace(ended, output=child.output() if status else "")
                if self.job.spec.run_policy.on_divergence == "stop":  # then it may start no other process
                    self._poller.ask()
            processes[position] = ended
            self._tell_end(ended)
        self._observed = replace(self._observed, processes=tuple(processes))
        return changed

    def _tell_end(self, process: Process) -> None:
        status = process.exit or 0
        if process.role == "worker" and status not in (0, exits.LEFT):
            gone = self.options.on_worker_gone
            instance = self._instances[process.pid]
            addresses = self._reached_at(self._addresses)
            with contextlib.suppress(OSError, RuntimeError):  # else its lease ends
                own = self.issuer.own() if self.issuer is not None else None
                self._notices.submit(gone, self.job.name, addresses, process.index, instance, own)
        if status != 0 and not (process.killed or process.asked):
            said = cause_of(process.output).splitlines()[:1] or process.output.splitlines()[-1:]
            last = said if process.ending != "killed" else []
            self._event("died", ": ".join([f"{process.name} (pid {process.pid}) {process.how}", *last]))
            if process.role == "evaluator" and process.ending == "invalid":
                self._event("warning", "the evaluator is not started again; the job trains without it")

    def _read_answers(self, now: float) -> bool:
        polled = self._poller.polled()
        if polled.status is not None and polled.status is not self.record.last:
            self._note_whether_finished_before(polled.status)
            self.record.add(polled.status, now - self._observed.started)
            if polled.status.value_bytes and not self._measured:
                self._measure(polled.status)
            self._observed = replace(
                self._observed,
                progress=polled.status.progress,
                problem=polled.status.problem,
                asked_at=polled.asked_at,
            )
        limits = self.job.spec.worker.progress_timeout, self.options.finished_grace
        processes = tuple(
            with_answers(each, polled.status, polled.ready, limits, stopped=self._stopped(each, now), now=now)
            for each in self._observed.processes
        )
        changed = processes != tuple(self._observed.processes)
        self._observed = replace(self._observed, processes=processes)
        return changed

    def _measure(self, status: ServerStatus) -> None:
        """Warn if the model, which is known now, needs more memory or disk than there is."""
        self._measured = True
        here = self._most_workers if self.options.slots is None else 0
        need = room.needed(self.job.spec, status.value_bytes, status.state_bytes, workers=here)
        for problem in room.shortages(need, room.Room(self._free_memory, room.disk_for(self.checkpoints))):
            self._event("warning", problem)

    def _stopped(self, process: Process, now: float) -> float | None:
        """Since when a process has been stopped that keeps a finished job open; None if it runs."""
        here = self.options.slots is None  # otherwise it is on another host
        if here and process.alive and self._observed.progress.finished and is_stopped(process.pid):
            return now if process.stopped is None else process.stopped
        return None

    def _note_whether_finished_before(self, status: ServerStatus) -> None:
        """Note whether a job that continues from a checkpoint was finished before."""
        was = was_finished(status, self.record.last, self._observed.was_finished, resumed=self._resumed)
        if was and not self._observed.was_finished:
            epochs = status.progress.epochs
            text = f"the checkpoint belongs to a finished job: all {epochs} epochs are in the model"
            self._event("checkpoint", text)
        self._observed = replace(self._observed, was_finished=was)

    def _execute(self, action: planning.Action, now: float) -> None:
        match action:
            case planning.Start():
                self._start_process(action, now)
            case planning.Terminate():
                if action.warns:
                    self._event("warning", f"ending {self._process(action.pid).name}: {action.reason}")
                self._answer_last(action.pid)
                self._update(action.pid, asked=now)
                self._children[action.pid].terminate()
            case planning.Kill():
                self._event("warning", f"killing {self._process(action.pid).name}: {action.reason}")
                self._update(action.pid, asked=self._process(action.pid).asked or now, killed=True)
                self._children[action.pid].kill()
            case planning.Scale():
                self._schedule = tuple(at for at in self._schedule if at != action.at)
                try:
                    self.directory.scale(action.at.workers)
                except UserError as error:
                    self._event("warning", str(error))
                except OSError as error:
                    text = f"the job was not scaled to {amount(action.at.workers, 'worker')}: {error}"
                    self._event("warning", f"{text}; do it with elastic-ps scale")
            case planning.Conclude():
                self._observed = replace(self._observed, verdict=action.verdict)
            case _:
                assert_never(action)

    def _start_process(self, action: planning.Start, now: float) -> None:
        if action.role == "ps":
            self._poller.restarted(action.index)
        try:
            environment = self.environment(action)
            child = self._start(action, environment)
        except OSError as error:
            if not may_pass(error, ran=bool(self._observed.of(action.role))):
                raise
            self._start_at[action.name] = now + START_PAUSE.total_seconds()
            again = f"it is tried again every {START_PAUSE.total_seconds():g} s"
            self._warn(action.name, f"{action.name} could not be started: {error}; {again}")
            return
        self._warned.pop(action.name, None)
        self._children[child.pid] = child
        self._start_times[child.pid] = start_time(child.pid)
        self._instances[child.pid] = environment.instance
        process = Process(role=action.role, index=action.index, pid=child.pid, started=now)
        self._observed = replace(self._observed, processes=(*self._observed.processes, process))
        if action.replaces is not None:
            self._event("process", f"{process.name} is started again (pid {child.pid}): {action.reason}")

    def _start(self, action: planning.Start, environment: ProcessEnvironment) -> Started:
        """Start a process. Raises OSError, and on another rank ElasticPSError; see `Slots.start`."""
        programs, role = self.options.programs, action.role
        program = {"worker": programs.worker, "evaluator": programs.evaluator}.get(role, programs.server)
        log, variables = self.directory.log(role, action.index), environment.to_variables()
        if role != "worker" or self.options.slots is None:
            return self._start_here(action, program, variables, log)
        certificate = issuer.read(environment.tls) if environment.tls is not None else None
        return self.options.slots.start(
            action.index, program, variables=variables, log=log, certificate=certificate
        )

    def _start_here(
        self, action: planning.Start, program: Sequence[str], contract: Mapping[str, str], log: Path
    ) -> Started:
        if self.options.bind and action.role == "worker":
            with bound_to(self._cores(action.index)):
                variables = {**self._variables(bound=True), **contract}
                return Child(program, variables=variables, log=log, lifeline=self._lifeline)
        variables, name = {**self._variables(), **contract}, f"{action.role}-{action.index}"
        line, fork = self._lifeline, None
        if self._forks is not None:
            fork = Fork.start(self._forks, program, variables=variables, log=log, lifeline=line, name=name)
        return fork or Child(program, variables=variables, log=log, lifeline=line)

    def _variables(self, *, bound: bool = False) -> dict[str, str]:
        """The common environment of processes on this host. `bound`: the process has its own cores."""
        variables = {"PYTHONUNBUFFERED": "1", **inherited()}
        return with_threads(variables, processes=1 if bound else processes_of(self.job.spec))

    def _cores(self, worker: int) -> tuple[int, ...]:
        return planning.cores_of(worker, workers=self._most_workers, cores=os.sched_getaffinity(0))

    def environment(self, action: planning.Start) -> ProcessEnvironment:
        """The environment of a process with this role and index."""
        shard = action.index if action.role in ("ps", "standby") else 0
        addresses = self._addresses
        if action.role == "worker" and self.options.route is not None:
            addresses = self.options.route(action.index, addresses)
        bind = (self.standbys if action.role == "standby" else self._addresses)[shard]
        return ProcessEnvironment(
            job=self.job.name,
            spec=self.job.spec,
            role=action.role,
            index=action.index,
            addresses=self._reached_at(addresses, by=action.role),
            standbys=self._reached_at(self.standbys),
            bind=f"{self.options.transport}:{bind}" if self.options.transport else bind,
            http=(self._standbys_http if action.role == "standby" else self._http)[shard],
            checkpoints=None if action.role == "evaluator" else self.checkpoints,
            resume=self._resume(action),
            durable=self.record.durable if (action.role, action.index) == ("ps", 0) else None,
            trace=self._trace_directory(),
            history=self.options.history,
            lifeline=self._lifeline.fd,
            run=self.run,
            instance=uuid.uuid4().hex,
            tls=self.issuer.of(action.role, action.index) if self.issuer is not None else None,
            tuning=self._mutable if (action.role, action.index) == ("ps", 0) else None,
            crowded=self._crowded,
        )

    def _reached_at(self, addresses: Sequence[str], *, by: Role | None = None) -> tuple[str, ...]:
        """The addresses, with the scheme of the chosen transport.

        Only workers use MPI: the other processes are on this host, like the parameter servers.
        """
        scheme = self.options.transport
        if scheme == "mpi" and by != "worker":
            scheme = "shm"
        return tuple(f"{scheme}:{address}" if scheme else address for address in addresses)

    def _resume(self, action: planning.Start) -> Resume:
        if self.options.resume is not None:
            return "require"
        return "auto" if action.replaces else "no"

    def _trace_directory(self) -> Path | None:
        if self.options.trace is None:
            return None
        directory = self.directory.path / f"trace-{os.getpid()}"
        directory.mkdir(exist_ok=True)
        return directory

    def _answer_last(self, pid: int) -> None:
        """Fetch the curves before the parameter servers end."""
        if self._process(pid).role in ("worker", "evaluator") or self._answered_last:
            return
        self._answered_last = True
        self._poller.ask()
        self._read_answers(time.monotonic())
        self.record.loss = fetch_loss(self._http[0])
        self.record.evaluations = fetch_evaluations(self._http[0])

    def _process(self, pid: int) -> Process:
        return next(p for p in reversed(self._observed.processes) if p.pid == pid)

    def _update(self, pid: int, *, asked: float, killed: bool = False) -> None:
        found = self._process(pid)
        updated = replace(found, asked=asked, killed=killed)
        processes = tuple(updated if each is found else each for each in self._observed.processes)
        self._observed = replace(self._observed, processes=processes)

    def _event(self, kind: str, text: str) -> None:
        self.record.add_event(time.monotonic() - self._observed.started, kind, text)

    def _warn(self, topic: str, text: str) -> None:
        """Record a warning, unless it is the last one on its topic."""
        if self._warned.get(topic) != text:
            self._warned[topic] = text
            self._event("warning", text)

    def _build_status(self, *, ended: bool) -> LocalStatus:
        observed, server = self._observed, self.record.last
        if ended:
            server = at_the_end(server, newest_checkpoint(self.checkpoints))
        verdict = observed.verdict or Verdict("Running", "", "")
        return LocalStatus(
            job=self.job.name,
            phase="Failed" if self._error else phase_of(observed, server, ended=ended),
            reason="LauncherFailed" if self._error else verdict.reason,
            message=str(self._error) if self._error else verdict.message,
            launcher_pid=os.getpid(),
            launcher_start_time=start_time(os.getpid()),
            started=self._began,
            updated=time.time(),
            elapsed=time.monotonic() - observed.started,
            shards=self.job.spec.parameter_server.replicas,
            workers=self.job.spec.worker.replicas,
            failures=len(planning.failures(observed)),
            addresses=list(self._addresses),
            http=list(self._http),
            checkpoints=str(self.checkpoints),
            processes=process_statuses(observed, self._start_times, server),
            server=server,
        )

    def _finish(self) -> None:
        """Write the last status and the trace, after everything has ended."""
        traces, target = self._trace_directory(), self.options.trace
        if traces is not None and target is not None and (problem := collect_traces(traces, target)):
            self._event("warning", problem)
        with self._lock:
            self._status = self._build_status(ended=True)
        self._write_status()
