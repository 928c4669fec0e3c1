"""Runs a job's entrypoint with its arguments, or a plain script with a command line."""

from __future__ import annotations

import importlib
import inspect
import json
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from elastic_ps.errors import InvalidJob
from elastic_ps.process.lifecycle import find_own_modules

ALWAYS = (ImportError, SyntaxError)
"""Errors that a script raises at each start: a missing module, or wrong syntax."""

_RUNNERS = (
    __name__,
    "elastic_ps.evaluation.script",
    "elastic_ps.worker.script",
    "importlib",
    "importlib._bootstrap",
    "importlib._bootstrap_external",
    "runpy",
)
"""The modules through which a process comes to its script."""

_PLAIN = (bool, int, float, str, NoneType)


def load(
    entrypoint: str, arguments: Mapping[str, Any], *, field: str = "spec.arguments"
) -> Callable[[], Any]:
    """Import `module.path:function`, with the current directory on the import path, and bind the arguments.

    `field`: the source of the arguments, for messages.

    Raises:
        InvalidJob: it does not import, with the script's own traceback in the message; it is not callable; or
            it does not take these arguments.
    """
    module_name, _, name = entrypoint.partition(":")
    find_own_modules()
    sys.argv = sys.argv[:1]  # the module may parse it, as in a worker, and these are not its arguments
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        text = describe(error).rstrip()
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            text += f"\nIt was looked for in the current directory, {Path.cwd()}, and among installed modules"
        raise InvalidJob(f"the entrypoint {entrypoint} cannot be imported:\n{text}") from error
    function = getattr(module, name, None)
    if function is None:
        where = getattr(module, "__file__", None) or f"{module_name}, which comes from no file,"
        raise InvalidJob(f"the entrypoint {entrypoint} does not exist: {where} has no {name!r}")
    if not callable(function):
        raise InvalidJob(
            f"the entrypoint {entrypoint} must be a function; it is of type {type(function).__name__}"
        )
    _check_arguments(entrypoint, function, arguments, field)
    return lambda: function(**arguments)


def run_script(path: str, argv: Sequence[str] = ()) -> None:
    """Run a Python file like `python PATH ARGV...`: as `__main__`, with its directory first on the path."""
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
        if function is run_script:
            raise InvalidJob(
                f"{field} has {', '.join(arguments)}, but the job runs a script, not a function. Give a "
                "script its arguments after --, as in elastic-ps run train.py -- --epochs 3"
            ) from error
        name = entrypoint.partition(":")[2]
        raise InvalidJob(
            f"{field} do not fit the entrypoint {name}{signature}: {error}. Given: "
            f"{', '.join(arguments) or 'none'}"
        ) from None
    _check_kinds(function, arguments, field)


def _check_kinds(function: Callable[..., Any], arguments: Mapping[str, Any], field: str) -> None:
    """Raise InvalidJob if a parameter is annotated with plain types, and its value has another type."""
    if hasattr(function, "__wrapped__"):  # a wrapper may convert the arguments
        return
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except Exception:  # noqa: BLE001 (an annotation that only type checkers can read)
        return
    for name, value in arguments.items():
        if name not in parameters or value is parameters[name].default:
            continue
        annotation = parameters[name].annotation
        several = get_origin(annotation) in (Union, UnionType)
        kinds = get_args(annotation) if several else (annotation,)
        if not all(kind in _PLAIN for kind in kinds):
            continue
        if not isinstance(value, (*kinds, int) if float in kinds else kinds):
            wanted = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
            raise InvalidJob(
                f"{field}: {name} has to be {wanted}, as the entrypoint says; it is {json.dumps(value)}"
            )


def describe(error: BaseException) -> str:
    """The traceback of a script's error, without the frames that lead to the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _RUNNERS:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
