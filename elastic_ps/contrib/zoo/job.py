"""Makes a job from a command line of `elastic-ps train`, without starting it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ps.api.compression import CODECS
from elastic_ps.api.job import API_VERSION, KIND, TrainingJob, parse_job
from elastic_ps.contrib.zoo.catalog import check_fit, find_dataset, find_network
from elastic_ps.errors import UserError

ENTRYPOINT = "elastic_ps.contrib.zoo.train:main"
EVALUATOR = "elastic_ps.contrib.zoo.evaluate:main"
EVALUATED = ("data_dir", "test_batch_size", "enable_gpu")
"""The arguments of the script that its evaluator also takes, besides network and data set."""
WORKERS = 2
"""The default number of workers."""
MODES = {"normal": "sync", "sync": "sync", "kill": "sync", "bounded": "bounded"}
"""The names of modes, with `consistency.mode`. The first and the third are ps_pytorch's."""
COMPRESS = "compress"
"""ps_pytorch's name for a lossless codec."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The command line. An omitted flag is None, and has the default of the entrypoint or the job.

    Attributes:
        arguments: the arguments of the entrypoint, by name.
        num_workers: the number of workers; None for `num_aggregate`, or 2 if that is None, too.
        num_aggregate: the number of steps in a version.
        mode: one of `MODES`.
        max_staleness: see `consistency.maxStaleness`.
        eval_freq: the number of versions between two checkpoints.
        evaluate: whether an evaluator evaluates the checkpoints while the job trains.
        train_dir: the directory of the checkpoints.
        compress_grad: the codec of gradients.
        name: the job's name; None for one from network and data set.
        image: the container image on a cluster.
        data_claim: the volume claim on a cluster that is mounted at `data_dir`.
        train_claim: the volume claim on a cluster that checkpoints are written to.
        foreign: flags of ps_pytorch that were given and have no counterpart here.
    """

    arguments: dict[str, Any]
    num_workers: int | None = None
    num_aggregate: int | None = None
    mode: str = "normal"
    max_staleness: int | None = None
    eval_freq: int | None = None
    evaluate: bool = False
    train_dir: Path | None = None
    compress_grad: str | None = None
    name: str | None = None
    image: str | None = None
    data_claim: str | None = None
    train_claim: str | None = None
    foreign: Sequence[str] = ()


FOREIGN = {
    "--kill-threshold": "a step is left out as soon as --num-aggregate others have arrived, not after a time",
    "--comm-type": "workers pull the values as soon as they are there, bucket by bucket",
    "--gather-type": "gradients are pushed while backward computes them, bucket by bucket",
}
"""Flags of ps_pytorch without a counterpart, and what happens instead."""


def job_of(flags: Flags) -> tuple[dict[str, Any], TrainingJob, list[str]]:
    """The job as a document and as a model, and a sentence for each flag without effect.

    Raises:
        UserError: a flag, or a combination of flags, cannot be used; the message names it.
    """
    network = find_network(flags.arguments.get("network", "LeNet"))
    dataset = find_dataset(flags.arguments.get("dataset", "MNIST"))
    check_fit(network, dataset)
    name = flags.name or re.sub("[^a-z0-9]+", "-", f"{network.name}-{dataset.name}".lower())
    workers = _workers(flags)
    compression = _compression(flags.compress_grad)
    checkpoint: dict[str, Any] = {}
    if flags.eval_freq is not None:
        checkpoint["everyVersions"] = flags.eval_freq
    if flags.train_dir is not None:
        checkpoint["path"] = str(flags.train_dir)
    if flags.train_claim is not None:
        checkpoint["existingClaim"] = flags.train_claim
    worker: dict[str, Any] = {"replicas": workers}
    if template := _template(flags):
        worker["template"] = template
    what = {"network": network.name, "dataset": dataset.name}
    spec: dict[str, Any] = {
        "entrypoint": ENTRYPOINT,
        "arguments": {**flags.arguments, **what},
        **({"image": flags.image} if flags.image else {}),
        **({"parameterServer": {"checkpoint": checkpoint}} if checkpoint else {}),
        "worker": worker,
        **({"evaluator": _evaluator(flags, what)} if flags.evaluate else {}),
        "consistency": _consistency(flags, workers),
        **({"compression": compression} if compression else {}),
    }
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
    notes = [f"{flag} changes nothing: {FOREIGN[flag]}" for flag in flags.foreign]
    return document, parse_job(document, source="elastic-ps train"), notes


def _workers(flags: Flags) -> int:
    if flags.num_workers is None:
        return WORKERS if flags.num_aggregate is None else flags.num_aggregate
    if flags.num_aggregate is not None and flags.num_aggregate > flags.num_workers:
        raise UserError(
            f"--num-aggregate is {flags.num_aggregate}, but there are {flags.num_workers} workers: a version "
            "cannot be made of more steps than there are workers. Give a smaller number, or more workers"
        )
    return flags.num_workers


def _consistency(flags: Flags, workers: int) -> dict[str, Any]:
    if flags.mode not in MODES:
        raise UserError(f"--mode is {flags.mode!r}; expected one of {', '.join(MODES)}")
    mode = MODES[flags.mode]
    backup = 0 if flags.num_aggregate is None else workers - flags.num_aggregate
    if mode == "bounded":
        if flags.max_staleness is None:
            raise UserError(
                "--mode bounded needs --max-staleness: how many versions the other workers may make while "
                "one worker computes a step"
            )
        if backup:
            raise UserError(
                "--mode bounded makes a version as soon as one worker has made a step, so --num-aggregate "
                f"{flags.num_aggregate} has no meaning; leave one of the two out"
            )
        return {"mode": mode, "maxStaleness": flags.max_staleness}
    if flags.max_staleness is not None:
        raise UserError(
            f"--max-staleness has no meaning with --mode {flags.mode}, in which no gradient is stale; leave "
            "it out, or give --mode bounded"
        )
    if flags.mode == "kill" and not backup:
        raise UserError(
            "--mode kill leaves slow workers out, so it needs --num-aggregate below the number of workers, "
            f"which is {workers}"
        )
    return {"mode": mode, **({"backupWorkers": backup} if backup else {})}


def _compression(given: str | None) -> dict[str, Any]:
    """The job's `compression`; {} for the default."""
    if given is None:
        return {}
    if given == "None":  # ps_pytorch's
        return {"codec": "none"}
    if given == COMPRESS:
        return {"lossless": "zstd"}
    if given in CODECS or ":" in given:
        return {"codec": given}
    raise UserError(
        f"--compress-grad is {given!r}; expected one of {', '.join((COMPRESS, *CODECS))}, or module:Class"
    )


def _evaluator(flags: Flags, what: dict[str, str]) -> dict[str, Any]:
    shared = {name: flags.arguments[name] for name in EVALUATED if name in flags.arguments}
    evaluator: dict[str, Any] = {"entrypoint": EVALUATOR, "arguments": {**shared, **what}}
    if flags.eval_freq is not None:
        evaluator["every"] = flags.eval_freq
    evaluator["best"] = {"metric": "prec@1", "mode": "max"}
    if template := _template(flags, "evaluator"):
        evaluator["template"] = template
    return evaluator


def _template(flags: Flags, name: str = "worker") -> dict[str, Any]:
    """The additional fields of the pods of workers or the evaluator."""
    container: dict[str, Any] = {"name": name}
    spec: dict[str, Any] = {}
    if flags.arguments.get("enable_gpu"):
        container["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    if flags.data_claim is not None:
        directory = flags.arguments.get("data_dir")
        if directory is None or not Path(directory).is_absolute():
            raise UserError(
                "--data-claim needs --data-dir, the absolute path at which the workers' pods mount the "
                f"claim; given: {directory or 'nothing'}"
            )
        container["volumeMounts"] = [{"name": "data", "mountPath": directory, "readOnly": True}]
        spec["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": flags.data_claim}}]
    if len(container) == 1:
        return {}
    return {"spec": {**spec, "containers": [container]}}
