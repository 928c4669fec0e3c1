"""What every process of a job does about its own life: log, notice that its starter died, end on request."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from elastic_ps.contract import exits
from elastic_ps.contract.env import ProcessEnvironment
from elastic_ps.errors import InvalidJob

logger = logging.getLogger(__name__)

TERMINATION_LOG = Path("/dev/termination-log")
"""Where Kubernetes looks for the reason of an exit."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's <malloc.h>
_SOME = 1 << 20
_NEVER, _MOST = 2**31 - 1, 32 << 20  # the largest values that mallopt takes for them on 64 bits


class Alarm:
    """What a thread waits for, and signal handlers may set: one that waits, any that set it.

    The handler of a second signal may begin while that of the first one sets it, or while the main thread
    begins to wait. `threading.Event` holds a lock in both, and would then wait for its own thread for ever.
    """

    def __init__(self) -> None:
        self._set = False
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()  # its `put` may interrupt itself

    def is_set(self) -> bool:
        """Whether it was set, and not cleared since."""
        return self._set

    def set(self) -> None:
        """Wake the thread that waits, or have it not wait. Does not block."""
        self._set = True
        self._calls.put(None)

    def clear(self) -> None:
        """Only the thread that waits may call this."""
        self._set = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()

    def wait(self, timeout: float) -> bool:
        """Block until it is set, or for so many seconds. Returns whether it is set.

        Python handles signals in the main thread. One that the system has given to another thread does not
        wake it, so that its handler runs when the time is over.
        """
        if not self._set:
            with contextlib.suppress(queue.Empty):
                self._calls.get(timeout=timeout)
        return self._set


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import what stays for the life of the process, without looking for garbage all the while.

    Importing torch makes a million objects, none of them garbage. Python's collector goes through them again
    and again, for a sixth of the time; afterwards it leaves them alone.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def find_own_modules() -> None:
    """Import from the current directory, too, as `python -m` does: there are the user's modules."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def import_own(name: str, *, what: str, whose: str) -> Any:
    """What a user names as `module:attribute`; their modules are also found in the current directory.

    Args:
        what: that it is, as in "the codec".
        whose: the processes that need it, in words.

    Raises:
        InvalidJob: it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    find_own_modules()
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a script that runs when it is imported may end the process
        raise InvalidJob(
            f"{what} {name} cannot be imported: {type(error).__name__}: {error}. It has to be there for "
            f"{whose}"
        ) from error


def take_descriptors() -> None:
    """Let this process have as many as the system permits: of a server, each call of a worker takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """How many cores this process can keep busy: those that it may run on, or what its container has of them.

    Args:
        cgroup: where a container sees its own group of version 2. Outside of one there is no quota.
    """
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # the quota may be `max`
        quota, period = map(int, (cgroup / "cpu.max").read_text().split())
        cores = min(cores, max(1, round(quota / period)))
    return cores


def keep_freed_memory() -> None:
    """From now on tensors of less than 32 MiB that are freed leave their memory to this process.

    A step frees its gradients, and the next one allocates as many. glibc gives such memory back to the system
    each time, which then fills each page with zeros again. Settings of the user's own (`MALLOC_...`,
    `GLIBC_TUNABLES`) stand, and so does a C library without `mallopt`.
    """
    _set_thresholds(trim=_NEVER, mmap=_MOST)


def give_back_freed_memory() -> None:
    """From now on the memory of a freed tensor of 1 MiB or more goes back to the system at once.

    glibc keeps up to 32 MiB of each size that was freed once, so that what is needed for short, such as the
    copy of a bucket, stays with the process and in pieces. Settings of the user's own stand as above.
    """
    _set_thresholds(trim=_SOME, mmap=_SOME)


def _set_thresholds(*, trim: int, mmap: int) -> None:
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, trim)
        mallopt(_MMAP_THRESHOLD, mmap)


def end_soon() -> None:
    """This process ends next: do not collect garbage for that, which takes longer than all the rest of it."""
    exits.ignore_requests()
    gc.disable()
    gc.freeze()


def end_now(status: int) -> NoReturn:
    """End this process with this exit status, when it has closed all that it has opened.

    Threads that still serve do so to the end. Python's own end, which stops them first, takes some tenths of
    a second when torch is loaded.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def begin(environment: ProcessEnvironment) -> None:
    """What every process does first.

    From then on the process ends when its starter dies. It logs to stderr, one line for each event. The root
    logger is left to the script, as under `python`.
    """
    _watch_lifeline(environment.lifeline)
    name = f"{environment.role}-{environment.index}"
    if environment.links:
        name += f"/{environment.local_rank}"
    ours, handler = logging.getLogger("elastic_ps"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name} %(levelname)s %(message)s"))
    ours.handlers = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False  # else what the script's own handlers get is said twice


def _watch_lifeline(descriptor: int | None) -> None:
    """End this process at once when its starter has died, that is, when `descriptor` is closed."""
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
    """From now on an exception that a thread does not handle ends this process, with status 1.

    A parameter server that has lost one of its threads would look healthy and never answer. Started again, it
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
    """What the system says of a process of this host: `/proc/PID/stat` from the state on.

    Raises:
        OSError: it is gone, or cannot be looked at.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def tell_joined(file: Path | None) -> None:
    """Write into the file by which the starter of this worker sees that it has joined.

    It holds this process's number, and when it began in ticks since the system did: the file may outlive it,
    as when a container is started again in its pod.
    """
    try:
        if file is not None:
            pid = os.getpid()
            file.write_text(f"{pid} {stat(pid)[19]}")
    except OSError as error:
        logger.warning("cannot write %s, which shows that this worker has joined: %s", file, error)


def leave_reason(text: str, log: Path | None = None) -> None:
    """Leave the reason of this process's end in `log`, by default where Kubernetes looks for it."""
    log = log or TERMINATION_LOG
    try:
        if log.exists():
            log.write_text(text)
    except OSError as error:  # the node's disk may be full; what is still to be done is done all the same
        print(f"cannot write the reason of this end to {log}: {error}", file=sys.stderr)


def end_hung(reason: str) -> None:
    """End this process at once, since it is hung: print where its threads are, then why. Does not return."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    print(f"error: {reason}", file=sys.stderr, flush=True)
    leave_reason(reason)
    os._exit(exits.HUNG)
