"""Memory that processes of a host share: to send a body, they send its place in the memory.

It is anonymous (`memfd_create`), handed over through a Unix socket, and freed when the last process has
ended, so that nothing is left behind. Its size is sealed: if a peer could truncate it, a reader would die of
SIGBUS.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from elastic_ps.errors import Malformed

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""The alignment in bytes: a cache line, and more than any vector instruction needs."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0

_MAP_FIXED = 0x10  # of <sys/mman.h>, which Python's mmap does not have

Allocate = Callable[[int], memoryview]
"""Allocates that many writable zero bytes, aligned to `ALIGNMENT`."""


def plain(nbytes: int) -> memoryview:
    """Memory of this process alone; an `Allocate`."""
    return np.zeros(nbytes, dtype=np.uint8).data


def pieces_of(memory: memoryview) -> Allocate:
    """Allocates the pieces of some memory in order. It raises ValueError if too few bytes are left."""
    used = 0

    def take(nbytes: int) -> memoryview:
        nonlocal used
        start = -(-used // ALIGNMENT) * ALIGNMENT
        if start + nbytes > len(memory):
            raise ValueError(f"{nbytes} bytes asked for; {len(memory) - start} are left of {len(memory)}")
        used = start + nbytes
        return memory[start:used]

    return take


class Handle(NamedTuple):
    """The data to share memory: its number in this process, its file descriptor, and its bytes."""

    number: int
    fd: int
    size: int


class SharedMemory:
    """Memory that other processes on this host may read.

    It is registered, and its file is open, as long as a piece of it is in use. Afterwards its pages are
    freed, so that mappings in other processes take no memory.

    Attributes:
        take: allocates its pieces, see `pieces_of`.
    """

    def __init__(self, nbytes: int) -> None:
        """Reserve `nbytes`, all zero. Pages are taken when they are first written to.

        Raises:
            OSError: the system does not support or permit such memory.
        """
        size = max(nbytes, 1)
        fd = os.memfd_create("elastic-ps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        self.handle = Handle(next(_numbers), fd, size)
        memory = memoryview(mapping)
        self.take, start = pieces_of(memory), address(memory)
        _known[self.handle.number] = (start, start + size, self.handle)
        _watch_forks()
        weakref.finalize(mapping, _give_up, self.handle, os.getpid()).atexit = False


_numbers = itertools.count(1)
_known: dict[int, tuple[int, int, Handle]] = {}


@cache
def _watch_forks() -> None:
    """Let what a forked child writes be the child's own from now on, as with all other memory."""
    remap = ctypes.CDLL(None, use_errno=True).mmap
    remap.restype = ctypes.c_void_p
    remap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def part() -> None:
        for start, end, handle in _known.values():
            flags = mmap.MAP_PRIVATE | _MAP_FIXED
            remap(start, end - start, mmap.PROT_READ | mmap.PROT_WRITE, flags, handle.fd, 0)
        _known.clear()  # it is shared no more; a child of the child's sees what that has written

    os.register_at_fork(after_in_child=part)


def _give_up(handle: Handle, owner: int) -> None:
    """Free the pages when no piece is in use any more: other processes may keep it mapped for long."""
    _known.pop(handle.number, None)
    if os.getpid() == owner:  # in a forked child, it belongs to the parent
        with contextlib.suppress(OSError), mmap.mmap(handle.fd, handle.size) as mapping:
            mapping.madvise(mmap.MADV_REMOVE)
    os.close(handle.fd)


def shared_if_possible(sizes: list[int]) -> Allocate:
    """Shared memory for pieces of these sizes; private memory if the system has not enough.

    The caller need not know which: private memory is copied when it is sent. A fallback is logged.
    """
    try:
        return SharedMemory(sum(size + ALIGNMENT for size in sizes)).take
    except (OSError, AttributeError) as error:  # another system than Linux, or a sandbox
        text = "this system does not give %d bytes of shared memory (%s): they are sent over a socket instead"
        logger.warning(text, sum(sizes), error)
        return plain


def address(view: memoryview) -> int:
    """The address of a contiguous view."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def place_of(view: memoryview) -> tuple[Handle, int] | None:
    """The shared memory of this process around a contiguous view, and the offset; None if there is none."""
    if not _known or not view.nbytes:
        return None
    start = address(view)
    for begin, end, handle in _known.copy().values():  # the garbage collector may remove one meanwhile
        if begin <= start and start + view.nbytes <= end:
            return handle, start - begin
    return None


class Mapped:
    """The shared memory of another process, for reading."""

    def __init__(self, fd: int) -> None:
        """Map it, and close `fd`.

        Raises:
            Malformed: it is something else, whose size could change.
        """
        try:
            size = os.fstat(fd).st_size
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise Malformed("the memory that was handed over may change its size")
            self._bytes = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))
        except (OSError, ValueError) as error:
            raise Malformed(f"the descriptor that was handed over is not shared memory: {error}") from error
        finally:
            os.close(fd)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A body in it. Raises Malformed if the memory is smaller."""
        if offset + nbytes > len(self._bytes):
            raise Malformed(
                f"a body of {nbytes} bytes at {offset} of a shared memory that has {len(self._bytes)}"
            )
        return self._bytes[offset : offset + nbytes]
