"""What a worker runs: the job's entrypoint with its arguments, or a plain script with a command line."""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_ps.errors import InvalidJob
from elastic_ps.process import find_own_modules


def load(
    entrypoint: str, arguments: Mapping[str, Any], *, field: str = "spec.arguments"
) -> Callable[[], Any]:
    """Import `module.path:function`, with the current directory on the import path, and bind the arguments.

    `field` is where the arguments come from.

    Raises:
        InvalidJob: it does not import, with the script's own traceback in the message; it is not callable; or
            it does not take these arguments.
    """
    module_name, _, name = entrypoint.partition(":")
    find_own_modules()
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
            f"the entrypoint {entrypoint} must be a function; it is of type {type(function).__name__}"
        )
    _check_arguments(entrypoint, function, arguments, field)
    return lambda: function(**arguments)


def run_script(path: str, argv: Sequence[str] = ()) -> None:
    """Run a Python file as `python PATH ARGV...` does: as `__main__`, its own directory first on the path."""
    sys.argv = [path, *argv]
    sys.path.insert(0, str(Path(path).resolve().parent))
    runpy.run_path(path, run_name="__main__")


def _check_arguments(
    entrypoint: str, function: Callable[..., Any], arguments: Mapping[str, Any], field: str
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without one
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        name = entrypoint.partition(":")[2]
        raise InvalidJob(
            f"{field} do not fit the entrypoint {name}{signature}: {error}. Given: "
            f"{', '.join(arguments) or 'none'}"
        ) from None


def _is_machinery(file: str) -> bool:
    return file == __file__ or "importlib" in file
