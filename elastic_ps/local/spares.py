"""Processes that wait to take the place of one that dies, with everything imported that takes long."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic_ps.local.processes import Child, Lifeline

PROGRAM = (sys.executable, "-m", "elastic_ps.spare")


class Spares:
    """The spare processes of a job on this machine. To be used by one thread.

    Args:
        count: how many wait at most; 0 for none.
        lifeline: of the launcher, which they inherit for what they become.
    """

    def __init__(self, count: int, lifeline: Lifeline) -> None:
        self._count, self._lifeline = count, lifeline
        self._waiting: list[subprocess.Popen[bytes]] = []

    def fill(self, variables: Mapping[str, str]) -> None:
        """Start those that are missing, with these variables. Does not wait until they are ready."""
        for dead in [spare for spare in self._waiting if spare.poll() is not None]:
            self._waiting.remove(dead)
            _hang_up(dead)
        while len(self._waiting) < self._count:
            self._waiting.append(
                subprocess.Popen(
                    PROGRAM,
                    env=dict(variables),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(self._lifeline.fd,),
                    start_new_session=True,
                )
            )

    def take(self, argv: Sequence[str], *, variables: Mapping[str, str], log: Path) -> Child | None:
        """Let one become a program, as `Child` starts it; None if there is none, or it cannot become that.

        One that is still importing becomes it when it is done.
        """
        python, *module = argv
        if (python, *module[:-1]) != PROGRAM[:-1]:
            return None
        order = {"program": module[-1], "variables": dict(variables), "log": str(log.absolute())}
        while self._waiting:
            spare = self._waiting.pop(0)
            assert spare.stdin is not None
            try:
                spare.stdin.write(json.dumps(order).encode() + b"\n")
                spare.stdin.flush()
            except BrokenPipeError:  # it was killed
                spare.wait()
                continue
            finally:
                _hang_up(spare)
            return Child(spare, log)
        return None

    def close(self) -> None:
        """End those that wait. Blocks for a moment."""
        for spare in self._waiting:
            spare.kill()
            spare.wait()
            _hang_up(spare)
        self._waiting = []


def _hang_up(spare: subprocess.Popen[bytes]) -> None:
    """Nothing more is said to it."""
    assert spare.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        spare.stdin.close()
