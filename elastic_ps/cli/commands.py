"""Finds the function for a command line, and handles its errors."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_ps.cli import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED
from elastic_ps.cli.parser import build_parser
from elastic_ps.errors import ElasticPSError, UserError

if TYPE_CHECKING:
    from elastic_ps.local import Programs


def command_of(given: Sequence[str], programs: Programs | None) -> Callable[[], int]:
    """The function for a command line, with its modules imported. Exits if the command line is wrong.

    Args:
        given: the command line without the program's name.
        programs: what a job's processes run, for tests.
    """
    own = list(given[: given.index("--")] if "--" in given else given)
    parser = build_parser()
    parsed, unknown = parser.parse_known_args(own)
    if unknown:
        words = " ".join(unknown)
        of_script = parsed.command == "run" and str(parsed.job).endswith(".py")
        hint = f". Arguments of the script follow --: {parsed.job} -- {words}" if of_script else ""
        parser.error(f"unrecognized arguments: {words}{hint}")
    parsed.script_arguments = given[len(own) + 1 :]
    if "--" in given and parsed.command != "run":
        parser.error(f"only `elastic-ps run` takes arguments after --, and `{parsed.command}` does not")
    command = _function_of(parsed, programs)
    return lambda: _carried_out(command)


def _function_of(parsed: argparse.Namespace, programs: Programs | None) -> Callable[[], int]:
    if parsed.command == "run":
        from elastic_ps.cli.run import run

        return lambda: run(parsed, programs)
    if parsed.command == "train":
        from elastic_ps.cli.train import train

        return lambda: train(parsed, programs)
    if parsed.command == "drill":
        from elastic_ps.cli.drill import drill

        return lambda: drill(parsed, programs)
    if parsed.command == "export":
        from elastic_ps.cli.export import export

        return lambda: export(parsed)
    if parsed.command == "evaluate":
        from elastic_ps.cli.evaluate import evaluate

        return lambda: evaluate(parsed)
    if parsed.command == "hostfile":
        from elastic_ps.cli.hostfile import hostfile

        return lambda: hostfile(parsed)
    from elastic_ps.cli import control, setting

    commands = {
        "status": control.status,
        "scale": control.scale,
        "set": setting.set_fields,
        "logs": control.logs,
        "stop": control.stop,
    }
    return lambda: commands[parsed.command](parsed)


def _carried_out(command: Callable[[], int]) -> int:
    """Run a command and print errors; returns the exit code. Characters the terminal lacks become `?`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except ElasticPSError as error:
        cause = f": {error.__cause__}" if error.__cause__ else ""
        print(f"error: {error}{cause}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
        said = f"{error.strerror}: {error.filename}"
        if _is_of_state(str(error.filename)):
            said = (
                f"cannot read or write the state of jobs: {said}. Set XDG_STATE_HOME to a directory that can "
                "be read and written"
            )
        print(f"error: {said}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _is_of_state(path: str) -> bool:
    """Return whether a path lies in the directory of jobs' state."""
    from elastic_ps.contract.env import state_directory

    try:
        return Path(path).is_relative_to(state_directory())
    except UserError:  # there is none
        return False
