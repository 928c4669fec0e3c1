"""The life cycle of every process of a job: logging, the death of its starter, the end on request."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import gc
import importlib
import io
import logging
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from elastic_ps.contract import exits
from elastic_ps.contract.env import ProcessEnvironment
from elastic_ps.errors import InvalidJob

logger = logging.getLogger(__name__)

TERMINATION_LOG = Path("/dev/termination-log")
"""Where Kubernetes looks for the reason of an exit."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's <malloc.h>
_NEVER, _MOST = 2**31 - 1, 32 << 20  # the largest values that mallopt takes for them on 64 bits


class Alarm:
    """An event that signal handlers may set. Only one thread waits for it.

    A signal handler may run while another one sets the event, or while the main thread begins to wait.
    `threading.Event` holds a lock in both, and would then deadlock with its own thread.
    """

    def __init__(self) -> None:
        self._set = False
        # It is held unless a `set` is news. Not a SimpleQueue: before Python 3.13 a `get` of one may wait for
        # ever if its thread stands still until the timeout is over.
        self._news = threading.Lock()
        self._news.acquire()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it, which wakes the waiting thread. Does not block."""
        self._set = True
        with contextlib.suppress(RuntimeError):  # it is news already
            self._news.release()

    def clear(self) -> None:
        """Clear it. For the waiting thread only."""
        self._set = False
        self._news.acquire(blocking=False)

    def wait(self, timeout: float) -> bool:
        """Block until it is set, or for so many seconds. Returns whether it is set.

        Python handles signals in the main thread. A signal that the system delivers to another thread does
        not wake it, so its handler runs when the time is over.
        """
        if not self._set:
            self._news.acquire(timeout=timeout)
        return self._set


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import modules for the life of the process, without garbage collection meanwhile.

    Importing torch creates a million objects, none of them garbage. Python's collector would scan them again
    and again, for a sixth of the time. Afterwards they are frozen.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def find_own_modules() -> None:
    """Import from the current directory, too, like `python -m`: it has the user's modules."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def import_own(name: str, *, what: str, whose: str) -> Any:
    """Import a user's `module:attribute`, also from the current directory.

    Args:
        what: its name in messages, such as "the codec".
        whose: the processes that need it, for messages.

    Raises:
        InvalidJob: it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    find_own_modules()
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a script that runs on import may end the process
        raise InvalidJob(
            f"{what} {name} cannot be imported: {type(error).__name__}: {error}. It must be "
            f"importable for {whose}"
        ) from error


def take_descriptors() -> None:
    """Raise the limit of file descriptors to the maximum: each call of a worker takes one of a server."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The number of cores that this process may use, by its affinity and its container's quota.

    Args:
        cgroup: the directory in which a container sees its own cgroup (version 2).
    """
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # the quota may be `max`
        quota, period = map(int, (cgroup / "cpu.max").read_text().split())
        cores = min(cores, max(1, round(quota / period)))
    return cores


def keep_freed_memory() -> None:
    """Keep the memory of freed tensors of less than 32 MiB in this process.

    A step frees its gradients, and the next one allocates as many. glibc would return the memory to the
    system each time, which then has to zero each page again. The user's settings (`MALLOC_...`,
    `GLIBC_TUNABLES`) take precedence. Does nothing with a C library without `mallopt`.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _MOST)


def give_back_freed_memory() -> None:
    """Return the memory that `keep_freed_memory` has kept until now to the system, where glibc can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def handle_sigterm(handle: Callable[[], object]) -> None:
    """Call `handle` when this process gets SIGTERM. A process that the script forks off ends by it.

    Who ends such a process waits for that, as a `multiprocessing.Pool` does. Python forgets signals that come
    within a fork, so they come after it.
    """
    masks = threading.local()

    def ours(*_: object) -> None:
        handle()

    def before() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def begin_child() -> None:
        if signal.getsignal(signal.SIGTERM) is ours:  # and not a handler of the script's
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        after()

    signal.signal(signal.SIGTERM, ours)
    os.register_at_fork(before=before, after_in_parent=after, after_in_child=begin_child)


def end_soon() -> None:
    """Prepare the end of this process: disable garbage collection."""
    exits.ignore_requests()
    gc.disable()


def end_now(status: int) -> NoReturn:
    """End this process with this exit status, after everything was closed.

    Threads that still serve do so until the end. Python's own shutdown would stop them first, and takes some
    tenths of a second when torch is loaded.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # a script may have closed it, or set None
            stream.flush()
    os._exit(status)


def begin(environment: ProcessEnvironment) -> None:
    """Set up a process; every process calls this first.

    From then on the process ends when its starter dies, and logs to stderr, one line for each event. The root
    logger is left to the script, as under `python`. A full disk with its output does not fail the script.
    """
    _watch_lifeline(environment.lifeline)
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None and stream is getattr(sys, f"__{name}__"):
            lossy = _lossy(stream)
            setattr(sys, name, lossy)
            setattr(sys, f"__{name}__", lossy)
    name = f"{environment.role}-{environment.index}"
    if environment.links:
        name += f"/{environment.local_rank}"
    log_as(name)


def log_as(name: str) -> None:
    """Log to stderr from now on, under this name of the process."""
    ours, handler = logging.getLogger("elastic_ps"), _Handler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name} %(levelname)s %(message)s"))
    ours.handlers = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False  # otherwise the script's own handlers would repeat it


class _Handler(logging.StreamHandler[TextIO]):
    """Says nothing any more once the script has closed its stderr."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.stream.closed:
            super().handleError(record)


class _Lossy(io.FileIO):
    """A file that leaves out what a full disk does not take."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return memoryview(data).nbytes


def _lossy(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same output, as a `_Lossy` file."""
    stream.flush()
    raw = _Lossy(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _watch_lifeline(descriptor: int | None) -> None:
    """End this process at once when its starter dies, which closes `descriptor`."""
    if descriptor is None:
        return
    os.set_inheritable(descriptor, False)

    def watch() -> None:
        while os.read(descriptor, 1):
            pass
        if os.getpgrp() == os.getpid():  # a group of its own: take its children (DataLoader's) along
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def end_if_a_thread_fails() -> None:
    """End this process with status 1 if a thread does not handle an exception.

    A parameter server that has lost a thread would look healthy but never answer. After a restart it
    continues from its checkpoint.
    """

    def end(failure: threading.ExceptHookArgs) -> None:
        name = failure.thread.name if failure.thread is not None else "unknown"
        reason = f"the thread {name} has failed: {failure.exc_type.__name__}: {failure.exc_value}"
        with contextlib.suppress(Exception):
            traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
            print(f"error: {reason}", file=sys.stderr, flush=True)
            leave_reason(reason)
        os._exit(1)

    threading.excepthook = end


def stat(pid: int) -> list[str]:
    """The fields of `/proc/PID/stat` for a process of this host, from the state on.

    Raises:
        OSError: the process is gone, or cannot be inspected.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def tell_joined(file: Path | None) -> None:
    """Write the file that shows the starter of this worker that it has joined.

    It holds the process id and the start time in ticks since boot, since the file may outlive the process,
    for example when a container is restarted in its pod.
    """
    try:
        if file is not None:
            pid = os.getpid()
            file.write_text(f"{pid} {stat(pid)[19]}")
    except OSError as error:
        logger.warning("cannot write %s, which shows that this worker has joined: %s", file, error)


def leave_reason(text: str, log: Path | None = None) -> None:
    """Write the reason of this process's end to `log`, by default the file that Kubernetes reads."""
    log = log or TERMINATION_LOG
    try:
        if log.exists():
            log.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:  # the node's disk may be full; the rest of the shutdown goes on
        print(f"cannot write the reason of this end to {log}: {error}", file=sys.stderr)


def end_hung(reason: str) -> None:
    """End this hung process at once, after printing the stacks of its threads and the reason."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    print(f"error: {reason}", file=sys.stderr, flush=True)
    leave_reason(reason)
    os._exit(exits.HUNG)
