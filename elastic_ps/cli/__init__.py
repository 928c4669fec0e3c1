"""The command `elastic-ps`.

It imports only modules that Python has loaded already: a Ctrl-C has to end the command with a message from
the first moment on, and the imports of a command take half a second.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # the module `typing` is not loaded yet
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_ps.local import Programs

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None, *, programs: Programs | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: the command line without the program's name; None takes the process's own.
        programs: what a job's processes run, for tests.
    """
    _have_outputs()
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:  # no exception, which a module that is being imported may catch or replace
        signal.signal(signal.SIGINT, lambda *_: _end())
    try:
        from elastic_ps.cli.commands import command_of

        command = command_of(sys.argv[1:] if arguments is None else arguments, programs)
    finally:
        if heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return command()


def _have_outputs() -> None:
    """Discard output to a stream that was closed when this process began."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 (for the life of the process)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123


def _end() -> None:
    """End this process, which has started nothing yet."""
    os.write(2, b"stopped by SIGINT: nothing was started\n")
    os._exit(EXIT_INTERRUPTED)
