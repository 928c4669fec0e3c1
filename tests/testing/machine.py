"""A machine that the test does not have: one without memory, room, threads, or names, and one with GPUs.

Each stands in for a call of Python or of the system, whose answer no test can bring about on every machine,
and lasts as long as `patch`, pytest's `monkeypatch`.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable, Mapping
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ps.transport import local

Patch = pytest.MonkeyPatch


def always() -> bool:
    return True


def fails(
    patch: Patch, where: Any, call: str, error: BaseException, when: Callable[[], object] = always
) -> None:
    """`where.call` raises the error while `when()`: no test can fill a disk, or use up memory.

    Nor can one interrupt a thread just there, or have code fail that has no known mistake.
    """
    usual = getattr(where, call)

    def either(*given: Any, **named: Any) -> Any:
        if when():
            raise error
        return usual(*given, **named)

    patch.setattr(where, call, either)


def full() -> OSError:
    """What a full disk says."""
    return OSError(errno.ENOSPC, "No space left on device")


def lacks_descriptors(patch: Patch, count: int) -> None:
    """The process may have that many descriptors: with so few, pytest itself could not go on."""
    patch.setattr("resource.getrlimit", lambda _: (count, 1000))


def lacks_shared_memory(patch: Patch) -> None:
    """The system gives none, as some containers' do not."""
    fails(patch, os, "memfd_create", PermissionError("not here"))


def lacks_ipv6(patch: Patch) -> None:
    patch.setattr("socket.has_dualstack_ipv6", lambda: False)


def is_another_host(patch: Patch) -> None:
    """Loopback counts as the address of another host: a machine for tests has no second one."""
    patch.setattr(local, "name_of", lambda _: None)


def is_another_users(patch: Patch) -> None:
    """Who listens within the host is another user, whom a test cannot become."""
    patch.setattr(local, "same_user", lambda _: False)


def knows_names(patch: Patch, known: Mapping[str, str], name: str) -> None:
    """The host's name is looked up in `known`, which may change, as a cluster's DNS does."""
    usual = socket.getaddrinfo

    def asked(host: str, *rest: Any, **more: Any) -> Any:
        if host == name and host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return usual(known.get(host, host), *rest, **more)

    patch.setattr(socket, "getaddrinfo", asked)


def dials(patch: Patch, dial: Callable[..., socket.socket]) -> None:
    """What connects calls `dial`: a host that vanished answers in no time that a test can wait for."""
    patch.setattr("socket.create_connection", dial)


def has_cores(patch: Patch, count: int) -> None:
    patch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


def is_told(patch: Patch, text: str) -> None:
    """Standard input."""
    patch.setattr(sys, "stdin", StringIO(text))


def has_gpus(patch: Patch, count: int, choose: Callable[[torch.device], None]) -> None:
    """So many, of which `choose` is told which one a process uses."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(torch.cuda, "set_device", choose)


def is_one_of_two(patch: Patch, backend: str) -> None:
    """This process uses the second GPU, in a group of two that speaks as `backend` says."""
    patch.setattr(dist, "get_backend_config", lambda group: backend)
    patch.setattr(dist, "get_world_size", lambda group: 2)
    patch.setattr(torch.cuda, "current_device", lambda: 1)


def has_torch(patch: Patch, version: str) -> None:
    """From now on torch says so of itself: only one is installed."""
    patch.setattr(torch, "__version__", version)


def has_cuda(patch: Patch, ones: Callable[..., object], **calls: object) -> None:
    """torch finds a GPU of which these are the calls, and `ones` what it makes there."""
    for name, call in calls.items():
        patch.setattr(torch.cuda, name, call)
    patch.setattr(torch, "ones", ones)
