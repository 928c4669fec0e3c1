"""A plain Python script as a job: `elastic-ps run train.py -- --lr 0.1`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from elastic_ps.api.job import API_VERSION, KIND, TrainingJob, parse_job
from elastic_ps.errors import UserError

ENTRYPOINT = "elastic_ps.process.entrypoint:run_script"


def is_script(path: Path) -> bool:
    """Whether `path` is a script and not a job's YAML file, by its name."""
    return path.suffix == ".py"


def name_of(path: Path) -> str:
    """The name of a script's job: the file's, changed to a valid name."""
    return re.sub("[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:52].rstrip("-") or "script"


def path_of(job: TrainingJob) -> str:
    """The full path of the script that a job was made from; "" if it has a YAML file."""
    return str(job.spec.arguments.get("path", "")) if job.spec.entrypoint == ENTRYPOINT else ""


def job_of(path: Path, argv: Sequence[str]) -> TrainingJob:
    """A job whose workers run the script with this command line; everything else is the default.

    Raises:
        UserError: the file cannot be read, or is not Python; or this locale cannot encode its name or an
            argument.
    """
    try:
        whole, source = str(path.resolve()), path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the script {path}: {error.strerror}") from error
    for text in (whole, *argv):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"this locale cannot encode {text!a}, so no process can receive it. Set LC_ALL=C.UTF-8"
            ) from error
    try:
        compile(source, str(path), "exec")
    except (SyntaxError, ValueError) as error:
        raise UserError(f"the script {path} is not Python: {error}") from error
    spec = {"entrypoint": ENTRYPOINT, "arguments": {"path": whole, "argv": list(argv)}}
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name_of(path)}, "spec": spec}
    return parse_job(document, source=str(path))
