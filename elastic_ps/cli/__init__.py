"""The command `elastic-ps`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elastic_ps.cli.parser import build_parser
from elastic_ps.errors import ElasticPSError, UserError

if TYPE_CHECKING:
    from elastic_ps.local import Programs

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None, *, programs: Programs | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: the command line without the program's name; None takes the process's own.
        programs: what a job's processes run, for tests.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = given[: given.index("--")] if "--" in given else given
    parser = build_parser()
    parsed = parser.parse_args(own)
    parsed.script_arguments = given[len(own) + 1 :]
    if "--" in given and parsed.command != "run":
        parser.error(f"only `elastic-ps run` takes arguments after --, and `{parsed.command}` does not")
    try:
        if parsed.command == "run":
            from elastic_ps.cli.run import run

            return run(parsed, programs)
        if parsed.command == "train":
            from elastic_ps.cli.train import train

            return train(parsed, programs)
        if parsed.command == "drill":
            from elastic_ps.cli.drill import drill

            return drill(parsed, programs)
        if parsed.command == "export":
            from elastic_ps.cli.export import export

            return export(parsed)
        if parsed.command == "evaluate":
            from elastic_ps.cli.evaluate import evaluate

            return evaluate(parsed)
        if parsed.command == "hostfile":
            from elastic_ps.cli.hostfile import hostfile

            return hostfile(parsed)
        from elastic_ps.cli import control, setting

        commands = {
            "status": control.status,
            "scale": control.scale,
            "set": setting.set_fields,
            "logs": control.logs,
            "stop": control.stop,
        }
        return commands[parsed.command](parsed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except ElasticPSError as error:
        cause = f": {error.__cause__}" if error.__cause__ else ""
        print(f"error: {error}{cause}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
