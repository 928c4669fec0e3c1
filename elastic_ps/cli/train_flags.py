"""The options of `elastic-ps train`. They have ps_pytorch's names, so that its command lines work here."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from elastic_ps.contrib.zoo.catalog import DATA_SETS, TRAINED

DESCRIPTION = """\
Train a network of the zoo on one of its data sets, without a job file. The flags and most of their
defaults are those of ps_pytorch, an earlier parameter server for PyTorch. The job's parameter
server and workers are processes on this machine, as with `elastic-ps run`; under mpirun, each rank
but the first runs a worker.

--dry-run prints the job file that the flags stand for, so that you can edit it and run it with
`elastic-ps run`. --apply creates the job on the Kubernetes cluster of the current kubeconfig.

At the end the test loss, prec@1 and prec@5 (per cent) are shown."""

EXAMPLES = """\
examples:
  elastic-ps train --network LeNet --dataset digits --epochs 20
  elastic-ps train --network ResNet18 --dataset Cifar10 --data-dir data --lr 0.1 --momentum 0.9 \\
      --batch-size 128 --num-workers 4 --num-aggregate 3 --train-dir checkpoints --eval-freq 200
  mpirun -n 5 elastic-ps train --network ResNet18 --dataset Cifar10 --lr 0.1 --momentum 0.9
  elastic-ps train --network LeNet --dataset digits --dry-run > job.yaml"""

ARGUMENTS = (
    *("network", "dataset", "data_dir", "lr", "momentum", "weight_decay", "batch_size", "test_batch_size"),
    *("epochs", "max_steps", "seed", "log_interval"),
)
"""The options that are arguments of the entrypoint with the same names."""


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the options of the training and of the workers."""
    what = parser.add_argument_group("what to train")
    names = ", ".join(network.name for network in TRAINED)
    what.add_argument("--network", metavar="N", help=f"one of {names} (default: LeNet)")
    sets = ", ".join(dataset.name for dataset in DATA_SETS)
    what.add_argument("--dataset", metavar="D", help=f"one of {sets} (default: MNIST)")
    what.add_argument(
        "--data-dir",
        type=os.path.expanduser,
        metavar="DIR",
        help="where the data set's files are (default: mnist_data, cifar10_data, ...)",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--lr", type=_rate, metavar="X", help="SGD's learning rate (default: 0.01)")
    how.add_argument("--momentum", type=_rate, metavar="X", help="SGD's momentum (default: 0.5)")
    how.add_argument("--weight-decay", type=_rate, metavar="X", help="SGD's weight decay (default: 0)")
    how.add_argument(
        "--batch-size", type=_count, metavar="N", help="records in a batch of one worker (default: 128)"
    )
    how.add_argument(
        "--test-batch-size",
        type=_count,
        metavar="N",
        help="records in a batch of the test set (default: 500)",
    )
    how.add_argument(
        "--epochs",
        type=_count,
        metavar="N",
        help="how often all workers together train each record (default: 100)",
    )
    how.add_argument(
        "--max-steps", type=_count, metavar="N", help="stop after this many steps (default: 10000)"
    )
    how.add_argument(
        "--seed", type=int, metavar="N", help="the seed of initial values and augmentation (default: 1)"
    )
    how.add_argument(
        "--log-interval", type=_count, metavar="N", help="print the loss every N steps (default: 10)"
    )
    how.add_argument(
        "--enable-gpu",
        type=_switch,
        nargs="?",
        const=True,
        default=False,
        metavar="YES",
        help="train on GPUs",
    )
    how.add_argument("--no-cuda", action="store_true", help="train on the CPU, which is the default")
    _add_job(parser.add_argument_group("the job"))


def _add_job(job: argparse._ArgumentGroup) -> None:
    job.add_argument(
        "--num-workers",
        type=_count,
        metavar="N",
        help="the number of workers (default: --num-aggregate or 2; under mpirun, one per rank except rank "
        "0)",
    )
    job.add_argument(
        "--num-aggregate",
        type=_count,
        metavar="N",
        help="how many workers' steps make a version; slower ones are left out (default: all)",
    )
    job.add_argument(
        "--mode",
        default="normal",
        metavar="M",
        help="normal: workers wait for each other; kill: as normal, but slow workers' steps are dropped "
        "(needs --num-aggregate); bounded: workers wait only for one that is --max-staleness versions behind "
        "(default: normal)",
    )
    job.add_argument(
        "--max-staleness",
        type=_count,
        metavar="N",
        help="with --mode bounded: how many versions old a gradient may be",
    )
    job.add_argument(
        "--eval-freq",
        type=_count,
        metavar="N",
        help="write a checkpoint at least every N steps and every 30 s",
    )
    job.add_argument(
        "--evaluate",
        action="store_true",
        help="evaluate the checkpoints while the job trains, and keep the one with the best prec@1",
    )
    job.add_argument("--train-dir", type=path, metavar="DIR", help="the directory of the checkpoints")
    job.add_argument(
        "--compress-grad",
        metavar="CODEC",
        help="the codec of gradients: none, bf16, int8, topk, ..., or compress, which is lossless "
        "(default: none)",
    )
    job.add_argument(
        "--name", metavar="NAME", help="the job's name (default: the names of network and data set)"
    )
    # ps_pytorch's flags that change nothing here; the command says so.
    job.add_argument("--kill-threshold", help=argparse.SUPPRESS)
    job.add_argument("--comm-type", help=argparse.SUPPRESS)
    job.add_argument("--gather-type", help=argparse.SUPPRESS)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options for a job file and for a cluster."""
    cluster = parser.add_argument_group("instead of running it here")
    instead = cluster.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="print the job file")
    instead.add_argument("--apply", action="store_true", help="create the job on a Kubernetes cluster")
    cluster.add_argument("--image", metavar="IMAGE", help="the container image of the job's pods")
    cluster.add_argument(
        "-n", "--namespace", metavar="NS", help="the namespace (default: the one of the kubeconfig's context)"
    )
    cluster.add_argument(
        "--data-claim", metavar="CLAIM", help="a PersistentVolumeClaim with the data, mounted at --data-dir"
    )
    cluster.add_argument(
        "--train-claim",
        metavar="CLAIM",
        help="a PersistentVolumeClaim for the checkpoints (default: none; they are lost with the pods)",
    )


def path(text: str) -> Path:
    """A path. In `--report=~/out` the shell leaves the `~` to the program."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 (Path's raises for an unknown user)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _switch(text: str) -> bool:
    """Parse yes or no like ps_pytorch: an empty text means no."""
    if text.lower() in ("", "0", "no", "false"):
        return False
    if text.lower() in ("1", "yes", "true"):
        return True
    raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
