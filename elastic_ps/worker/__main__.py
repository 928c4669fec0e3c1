"""`python -m elastic_ps.worker`: import the job's entrypoint and call it.

`python -m elastic_ps.worker --check module:function` only imports it, to find out before anything is
started whether that works.
"""

from __future__ import annotations

import importlib
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_ps import env, process
from elastic_ps.errors import InvalidJob, RefusalCode, Refused, UserError


def load_entrypoint(entrypoint: str) -> Callable[..., Any]:
    """Import `module.path:function`, with the current directory on the import path.

    Raises:
        InvalidJob: it does not import, or is not callable; the script's own traceback is in the message.
    """
    module_name, _, name = entrypoint.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and _is_machinery(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        raise InvalidJob(f"the entrypoint {entrypoint} cannot be imported:\n{text}") from error
    function = getattr(module, name, None)
    if function is None:
        raise InvalidJob(f"the entrypoint {entrypoint} does not exist: {module.__file__} has no {name!r}")
    if not callable(function):
        raise InvalidJob(
            f"the entrypoint {entrypoint} is not a function but of type {type(function).__name__}"
        )
    return function  # type: ignore[no-any-return]


def _is_machinery(file: str) -> bool:
    return file == __file__ or "importlib" in file


def check(entrypoint: str) -> int:
    """Print what is wrong with the entrypoint, if anything; returns the exit status."""
    try:
        load_entrypoint(entrypoint)
    except InvalidJob as error:
        print(f"error: {error}", file=sys.stderr)
        return env.EXIT_INVALID
    return 0


def main() -> int:
    """Run the script; returns the exit status, see `elastic_ps.env`."""
    if len(sys.argv) == 3 and sys.argv[1] == "--check":
        return check(sys.argv[2])
    process.end_on_request(env.EXIT_LEFT)
    from elastic_ps import compiler
    from elastic_ps.worker import current
    from elastic_ps.worker.member import Drained

    try:
        environment = env.read()
        process.begin(environment)
        compiler.defer()
        signal.signal(signal.SIGTERM, lambda *_: current.drain())
        function = load_entrypoint(environment.spec.entrypoint)
        function(**environment.spec.arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        process.leave_reason(str(error))
        return env.EXIT_INVALID
    except Drained:
        return env.EXIT_LEFT
    except Exception as error:  # noqa: BLE001 (the script's own failure)
        traceback.print_exc()
        process.leave_reason(traceback.format_exc()[-2000:])
        hung = isinstance(error, Refused) and error.code is RefusalCode.HUNG
        return env.EXIT_HUNG if hung else 1
    finally:
        current.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
