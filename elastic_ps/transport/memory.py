"""Memory that processes of one host share: a body in it is sent by naming its place.

It is anonymous (`memfd_create`), handed to the other process over a Unix socket, and gone when the last of
them has ended, so that nothing can be left behind. It can neither shrink nor grow: a peer that cut it off
would end whoever reads it with SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from elastic_ps.errors import Malformed

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes; a cache line, and more than any vector instruction asks for."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0

Allocate = Callable[[int], memoryview]
"""Gives that many writable bytes, all zero, aligned to `ALIGNMENT`."""


def plain(nbytes: int) -> memoryview:
    """Memory of this process alone; an `Allocate`."""
    return np.zeros(nbytes, dtype=np.uint8).data


class Handle(NamedTuple):
    """What is passed on of shared memory: its number among those of this process, its file, its bytes."""

    number: int
    fd: int
    size: int


class SharedMemory:
    """Memory that other processes on this host can be shown; they can read it.

    It is known, and its file is open, as long as anybody has a piece of it. Then it is all zero for those
    who have been shown it, so that what they have mapped takes no memory.
    """

    def __init__(self, nbytes: int) -> None:
        """Reserve `nbytes`, all zero. Pages are taken when they are first written to.

        Raises:
            OSError: the system has no such memory, or does not permit it.
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
        self._bytes = memoryview(mapping)
        self._used = 0
        start = address(self._bytes)
        _known[self.handle.number] = (start, start + size, self.handle)
        weakref.finalize(mapping, _give_up, self.handle, os.getpid()).atexit = False

    def take(self, nbytes: int) -> memoryview:
        """The next `nbytes` of it, aligned; an `Allocate`. Raises ValueError if there are not so many."""
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        size = self.handle.size
        if start + nbytes > size:
            raise ValueError(f"{nbytes} bytes asked for; {size - start} are left of {size}")
        self._used = start + nbytes
        return self._bytes[start : self._used]


_numbers = itertools.count(1)
_known: dict[int, tuple[int, int, Handle]] = {}


def _give_up(handle: Handle, owner: int) -> None:
    """Nobody has a piece any more. Others may still have it mapped for long, so its pages are freed."""
    _known.pop(handle.number, None)
    if os.getpid() == owner:  # in a forked child it is the parent's
        with contextlib.suppress(OSError), mmap.mmap(handle.fd, handle.size) as mapping:
            mapping.madvise(mmap.MADV_REMOVE)
    os.close(handle.fd)


def shared_if_possible(sizes: list[int]) -> Allocate:
    """Shared memory for pieces of these sizes; where the system has none, or not enough, this process's own.

    Whoever uses the pieces need not know: what is not shared is copied when it is sent. The log says so.
    """
    try:
        return SharedMemory(sum(size + ALIGNMENT for size in sizes)).take
    except (OSError, AttributeError) as error:  # another system than Linux, or a sandbox
        text = (
            "%d bytes of shared memory could not be had (%s): what is in them is sent, within this host, too"
        )
        logger.warning(text, sum(sizes), error)
        return plain


def address(view: memoryview) -> int:
    """Where the bytes of a contiguous view begin."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def place_of(view: memoryview) -> tuple[Handle, int] | None:
    """The shared memory of this process that a contiguous view lies in, and at which offset; None if none."""
    if not _known or not view.nbytes:
        return None
    start = address(view)
    for begin, end, handle in _known.copy().values():  # the garbage collector may take one out meanwhile
        if begin <= start and start + view.nbytes <= end:
            return handle, start - begin
    return None


class Mapped:
    """Another process's shared memory, to be read."""

    def __init__(self, fd: int) -> None:
        """Map it, and close `fd`.

        Raises:
            Malformed: it is something else, which could change its size.
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
        """Raises Malformed if it does not reach so far."""
        if offset + nbytes > len(self._bytes):
            raise Malformed(
                f"a body of {nbytes} bytes at {offset} of a shared memory that has {len(self._bytes)}"
            )
        return self._bytes[offset : offset + nbytes]
