"""`elastic-ps evaluate`, which becomes another program, since the command line does not import torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from elastic_ps.api.job import load_job
from elastic_ps.errors import CheckpointError, UserError
from elastic_ps.evaluation import results as evaluations


def evaluate(parsed: argparse.Namespace) -> NoReturn:
    """Evaluate the checkpoints of a directory. The process ends with the exit code."""
    entrypoint, arguments = _evaluator(parsed)
    program = [sys.executable, "-m", "elastic_ps.evaluation", str(parsed.directory)]
    options = [] if parsed.version is None else ["--version", str(parsed.version)]
    options += ["--json"] if parsed.json else []
    os.execv(sys.executable, [*program, entrypoint, json.dumps(arguments), *options])


def _evaluator(parsed: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The evaluator's entrypoint and its arguments. Raises UserError."""
    if parsed.entrypoint is not None:
        return parsed.entrypoint, {}
    if parsed.job is not None:
        evaluator = load_job(parsed.job).spec.evaluator
        if evaluator is None:
            raise UserError(f"{parsed.job} has no spec.evaluator; name a function with --entrypoint")
        return evaluator.entrypoint, evaluator.arguments
    if not Path(parsed.directory).is_dir():
        raise UserError(f"{parsed.directory}: there is no such directory")
    try:
        found = evaluations.read(parsed.directory) or {}
    except CheckpointError as error:
        raise UserError(f"{error}; name the evaluator with --job or --entrypoint") from error
    entrypoint, arguments = found.get("entrypoint"), found.get("arguments")
    if not isinstance(entrypoint, str) or not isinstance(arguments, dict):
        raise UserError(
            f"{parsed.directory} does not say how to evaluate its checkpoints: the job had no evaluator. "
            "Name one with --job FILE or --entrypoint MODULE:FUNCTION"
        )
    return entrypoint, arguments
