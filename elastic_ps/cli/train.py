"""`elastic-ps train`: make a job from flags, then run it, print it, or create it on a cluster."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_ps.api import manifest
from elastic_ps.api.job import TrainingJob
from elastic_ps.cli.run import run_job
from elastic_ps.cli.train_flags import ARGUMENTS
from elastic_ps.contract.env import started_by_mpirun
from elastic_ps.contrib.zoo.catalog import find_dataset
from elastic_ps.contrib.zoo.job import FOREIGN, Flags, job_of
from elastic_ps.errors import UserError
from elastic_ps.local import Programs

SUBMIT = "elastic_operator.submit"


def train(parsed: argparse.Namespace, programs: Programs | None) -> int:
    """Run the command; returns the exit code."""
    if parsed.dry_run or parsed.apply:
        option = "--dry-run" if parsed.dry_run else "--apply"
        if started_by_mpirun():
            raise UserError(f"{option} starts no processes here; run it without mpirun")
        for other in ("report", "trace", "resume", "transport", "insecure", "bind", "detach"):
            if getattr(parsed, other):
                raise UserError(
                    f"{option} starts no processes here, so --{other} has no effect; leave it out"
                )
        document, _, notes = job_of(_flags(parsed, None))
        _tell(notes)
        return _print(document) if parsed.dry_run else _apply(document, parsed)
    for option in ("namespace", "data_claim", "train_claim"):
        if (given := getattr(parsed, option)) is not None:
            raise UserError(
                f"--{option.replace('_', '-')} {given} is for a cluster; give --apply or --dry-run, too, or "
                "leave it out"
            )

    def make(ranks: int | None) -> TrainingJob:
        _, job, notes = job_of(_flags(parsed, ranks))
        dataset = find_dataset(str(job.spec.arguments["dataset"]))
        dataset.check_place(None if parsed.data_dir is None else Path(parsed.data_dir))
        _tell(notes)
        return job

    return run_job(make, parsed, programs)


def _flags(parsed: argparse.Namespace, ranks: int | None) -> Flags:
    arguments = {name: getattr(parsed, name) for name in ARGUMENTS if getattr(parsed, name) is not None}
    if parsed.enable_gpu:
        if parsed.no_cuda:
            raise UserError("--enable-gpu and --no-cuda contradict each other; leave one of the two out")
        arguments["enable_gpu"] = True
    return Flags(
        arguments=arguments,
        num_workers=ranks if parsed.num_workers is None else parsed.num_workers,
        num_aggregate=parsed.num_aggregate,
        mode=parsed.mode,
        max_staleness=parsed.max_staleness,
        eval_freq=parsed.eval_freq,
        evaluate=parsed.evaluate,
        train_dir=parsed.train_dir,
        compress_grad=parsed.compress_grad,
        name=parsed.name,
        image=parsed.image,
        data_claim=parsed.data_claim,
        train_claim=parsed.train_claim,
        foreign=[flag for flag in FOREIGN if getattr(parsed, flag[2:].replace("-", "_")) is not None],
    )


def _tell(notes: list[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _print(document: Mapping[str, Any]) -> int:
    print(manifest.write(document), end="")
    return 0


def _apply(document: Mapping[str, Any], parsed: argparse.Namespace) -> int:
    """Create the job on the cluster, in a process of its own, since this one has no Kubernetes client."""
    if "image" not in document["spec"]:
        raise UserError("--apply needs --image: the container image that the job's pods run")
    if parsed.train_dir is not None:
        raise UserError(
            f"--train-dir {parsed.train_dir} is a directory of this machine, which the job's pods cannot "
            "reach. Give --train-claim, a PersistentVolumeClaim, or leave it out"
        )
    needed = (SUBMIT.partition(".")[0], "kubernetes", "prometheus_client")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"--apply needs {', '.join(missing)}, which this Python does not have: "
            "pip install 'elastic-ps[operator]'. Or use --dry-run, and kubectl apply"
        )
    where = [] if parsed.namespace is None else ["--namespace", parsed.namespace]
    text = manifest.write(document)
    command = [sys.executable, "-m", SUBMIT, *where]
    code = subprocess.run(command, input=text, text=True, check=False).returncode
    if code == 0 and parsed.train_claim is None:
        _tell(["the trained model is lost with the job's pods; --train-claim CLAIM keeps its checkpoints"])
    return code
