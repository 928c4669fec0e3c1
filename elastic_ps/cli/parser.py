"""The options of the command line, and their help. Imports nothing heavy."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import NoReturn, get_args

from elastic_ps.cli import train_flags
from elastic_ps.cli.train_flags import path
from elastic_ps.contract.schemes import Scheme
from elastic_ps.drill.faults import DESCRIPTIONS, KINDS, Kind
from elastic_ps.version import __version__

DESCRIPTION = """\
Train a PyTorch model with a parameter server and workers that come and go.

A YAML file (kind: TrainingJob) describes a job. `run` starts the job's parameter servers and workers
as processes on this machine and supervises them. The other commands show or change a running job,
from any terminal."""

EXAMPLES = """\
examples:
  elastic-ps run job.yaml                    train, with live progress; Ctrl-C stops the job cleanly
  elastic-ps run train.py --workers 2 -- --lr 0.1
                                             train with a script and its arguments, without a job file
  elastic-ps train --network ResNet18 --dataset Cifar10 --data-dir data --lr 0.1 --momentum 0.9
                                             train a network of the zoo, without a job file
  elastic-ps run job.yaml --workers 4        train with 4 workers, whatever the file says
  elastic-ps run job.yaml --scale 150:4 --scale 400:2 --report out
                                             grow to 4 workers at version 150, shrink to 2 at 400;
                                             write numbers and a picture into out/
  elastic-ps run job.yaml --detach           train in the background. Then:
  elastic-ps status digits                   show the progress of the job named digits
  elastic-ps scale digits --workers 4        change the number of workers while it trains
  elastic-ps set digits consistency.mode=async
                                             change the mode while it trains
  elastic-ps logs digits -f --worker 0       show what worker 0 prints
  elastic-ps stop digits                     write a checkpoint and stop
  elastic-ps drill job.yaml --seed 7         inject faults, and check that nothing is lost

A version is the model after one more optimizer step. A call of session.assign counts as a step.

exit codes:
  0    done; for run: the job succeeded
  1    the job failed
  2    bad input: the message says what to change; the same command would fail again
  130  stopped by Ctrl-C (129 SIGHUP, 143 SIGTERM)"""

RUN = """\
Run a job as processes on this machine until it succeeds, fails or is stopped.

First the command checks the file, imports the entrypoint once, and compares its signature with the
arguments, so that mistakes show at once. Then it starts the parameter servers and the workers. A
worker that is killed is replaced. A worker whose script fails, or that keeps crashing before its
first step, is replaced, too, until there are more such failures than runPolicy.backoffLimit.

At the first Ctrl-C the workers leave and the parameter servers write a checkpoint. A second Ctrl-C
kills all processes. Under mpirun, use `elastic-ps stop` on rank 0's host instead: at Ctrl-C, mpirun
may end the ranks before the checkpoint is written.

JOB may also be a Python script. The job is then named after the script, and every worker runs the
script as `python` would, with the arguments that follow --. To train in a single process, run
`python train.py`."""

RUN_EXAMPLES = """\
examples:
  elastic-ps run job.yaml --report out       out/run.json and out/run.png show how it went
  elastic-ps run job.yaml --trace trace.json open trace.json in https://ui.perfetto.dev
  elastic-ps run job.yaml --resume DIR       continue from the newest checkpoint in DIR
  mpirun -n 5 elastic-ps run job.yaml        under MPI: rank 0 is the parameter server, four are workers
  elastic-ps run train.py --workers 2 -- --lr 0.1
                                             a script that calls elastic_ps.connect()
  elastic-ps run train.py --set consistency.globalBatchSize=512 --set metadata.name=large
                                             any field of a job, without a YAML file"""


DRILL = """\
Run a job on this machine and inject faults: kill and freeze processes, damage checkpoints. Each
parameter server and each worker writes a history of what it did. At the end the histories are
compared: every record of every epoch must be in the model exactly once.

The seed decides in which order the faults are injected, at what share of the records, and into which
worker or parameter server. So the same seed repeats the same schedule. Each fault waits until the
job has recovered from the previous one, so the job has to be long enough for all of them."""

DRILL_EXAMPLES = """\
examples:
  elastic-ps drill job.yaml                  common faults, with a new seed
  elastic-ps drill job.yaml --seed 7 --faults kill-ps,kill-ps,freeze-worker --report out

exit codes:
  0    the job succeeded, every fault that is possible here happened, and nothing was lost
  1    anything else; the table shows what"""


SET_EXAMPLES = """\
examples:
  elastic-ps set digits consistency.mode=bounded consistency.maxStaleness=8
  elastic-ps set digits consistency.mode=sync
  elastic-ps set digits compression.codec=topk 'compression.options={ratio: 0.05}'
  elastic-ps set digits parameterServer.checkpoint.interval=5m"""


EXPORT_EXAMPLES = """\
examples:
  elastic-ps export checkpoints model.safetensors      model.load_state_dict(load_file("model.safetensors"))
  elastic-ps export checkpoints model.pt --version 80  model.load_state_dict(torch.load("model.pt"))"""


EVALUATE_EXAMPLES = """\
examples:
  elastic-ps evaluate checkpoints                      with the evaluator that the job had
  elastic-ps evaluate checkpoints --job job.yaml       with the evaluator that job.yaml names
  elastic-ps evaluate checkpoints --entrypoint evaluate:main --version 80"""


HOSTFILE_EXAMPLES = """\
examples:
  elastic-ps hostfile host0:1 host1:4 host2:4 > hosts
  elastic-ps hostfile --from hosts_address --slots 4 > hosts
  salloc --ntasks=9                          then, in the allocation:
  elastic-ps hostfile > hosts && mpirun -n 9 --hostfile hosts elastic-ps run job.yaml"""


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=98)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the cause first. argparse prints the longer usage before it."""
        cause = message.removeprefix("argument ")
        self.exit(2, f"error: {cause}\n`{self.prog} --help` explains the arguments\n")


def build_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        "elastic-ps", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=_Help
    )
    parser.add_argument("--version", action="version", version=f"elastic-ps {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    _add_run(commands)
    _add_train(commands)
    _add_status(commands)
    _add_scale(commands)
    _add_set(commands)
    _add_logs(commands)
    _add_stop(commands)
    _add_export(commands)
    _add_evaluate(commands)
    _add_drill(commands)
    _add_hostfile(commands)
    return parser


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run", help="run a job on this machine", description=RUN, epilog=RUN_EXAMPLES, formatter_class=_Help
    )
    run.add_argument("job", metavar="JOB", type=path, help="the job's YAML file, or a Python script")
    run.add_argument(
        "--workers",
        type=_number_of("workers"),
        metavar="N",
        help="start with N workers, whatever the file says",
    )
    run.add_argument(
        "--ps",
        type=_number_of("parameter servers"),
        metavar="N",
        help="start N parameter servers, each with a part of the model, whatever the file says",
    )
    run.add_argument(
        "--processes",
        type=_number_of("processes"),
        metavar="N",
        help="run N processes in each worker; they share its batches and send one sum of gradients",
    )
    run.add_argument(
        "--scale",
        type=_scale,
        action="append",
        default=[],
        metavar="VERSION:N",
        help="change to N workers at this version; may be repeated",
    )
    run.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="set a field of spec, as in worker.minReplicas=2, or metadata.name; may be repeated",
    )
    _add_running(run)


def _add_running(run: argparse.ArgumentParser) -> None:
    """Add the options for running a job on this machine."""
    run.add_argument(
        "--report", type=path, metavar="DIR", help="write run.json and run.png into DIR at the end"
    )
    run.add_argument(
        "--trace", type=path, metavar="FILE", help="write a Chrome trace of every process into FILE"
    )
    run.add_argument(
        "--resume", type=path, metavar="DIR", help="continue from the newest complete checkpoint in DIR"
    )
    run.add_argument(
        "--transport",
        choices=get_args(Scheme),
        help="how the processes talk to each other (default: the fastest way that works)",
    )
    run.add_argument(
        "--insecure",
        action="store_true",
        help="use no TLS: anyone who reaches a port of the job can read and change the model",
    )
    run.add_argument("--bind", action="store_true", help="bind each worker to cores of its own")
    run.add_argument(
        "--output",
        type=_output,
        default="worker-0",
        metavar="WHICH",
        help="whose output to show: worker-N, ps-N, standby-N, evaluator-0, all or none (default: worker-0)",
    )
    run.add_argument(
        "--detach",
        action="store_true",
        help="run the job in the background; the command returns as soon as the job runs",
    )


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = commands.add_parser(
        "train",
        help="train a network of the zoo, without a job file",
        description=train_flags.DESCRIPTION,
        epilog=train_flags.EXAMPLES,
        formatter_class=_Help,
    )
    train_flags.add_train(train)
    _add_running(train)
    train_flags.add_cluster(train)
    train.set_defaults(scale=[])


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = commands.add_parser(
        "status",
        help="show the progress of jobs",
        description="Show one job, or all jobs on this machine. If a job is not running, its last run is\n"
        "shown.",
        formatter_class=_Help,
    )
    status.add_argument("job", metavar="JOB", nargs="?", help="a job's name or its YAML file")
    status.add_argument("--json", action="store_true", help="print JSON, for programs")


def _add_scale(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    scale = commands.add_parser(
        "scale",
        help="change the number of workers of a running job",
        description="Change the number of workers while the job runs. New workers join at the current\n"
        "version. When the number is reduced, the workers with the highest indexes finish their step and\n"
        "leave. The other workers neither restart nor wait.",
        formatter_class=_Help,
    )
    scale.add_argument("job", metavar="JOB", help="the job's name or its YAML file")
    scale.add_argument(
        "--workers", type=_number_of("workers"), metavar="N", required=True, help="the new number of workers"
    )


def _add_set(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    changes = commands.add_parser(
        "set",
        help="change the settings of a running job",
        description="Change the consistency, the compression or the checkpoints of a job while it runs. The\n"
        "job continues from its current version. Workers keep running, and repeat the steps that they\n"
        "have not finished. If a change is not possible, the command says why, and the job stays as it\n"
        "is.",
        epilog=SET_EXAMPLES,
        formatter_class=_Help,
    )
    changes.add_argument("job", metavar="JOB", help="the job's name or its YAML file")
    changes.add_argument(
        "assignments",
        metavar="FIELD=VALUE",
        nargs="+",
        help="a field as in the YAML file, below spec; an empty value unsets it",
    )


def _add_logs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    logs = commands.add_parser(
        "logs",
        help="show what a job's processes print",
        description="Show the output of a job's last run, of one process or all.",
        formatter_class=_Help,
    )
    logs.add_argument("job", metavar="JOB", help="the job's name or its YAML file")
    logs.add_argument("-f", "--follow", action="store_true", help="keep printing until the job ends")
    which = logs.add_mutually_exclusive_group()
    which.add_argument("--worker", type=int, metavar="N", help="only worker N, counted from 0")
    which.add_argument("--ps", type=int, metavar="N", help="only parameter server N, counted from 0")
    which.add_argument("--evaluator", action="store_const", const=0, help="only the evaluator")
    which.add_argument("--standby", type=int, metavar="N", help="only the standby of parameter server N")


def _add_stop(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    stop = commands.add_parser(
        "stop",
        help="stop a running job",
        description="Stop a job. Its workers leave, and its parameter servers write a checkpoint. The\n"
        "command returns when all of the job's processes have ended. A second one kills them at once.",
        formatter_class=_Help,
    )
    stop.add_argument("job", metavar="JOB", help="the job's name or its YAML file")


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = commands.add_parser(
        "export",
        help="write a checkpoint's model as one file for plain PyTorch",
        description="Write the model of a checkpoint into one file, as a plain state_dict. The job may be\n"
        "running. Tables that grow become NAME.ids and NAME.values. To load the optimizer's\n"
        "state as well, use elastic_ps.load_checkpoint(DIR, model, optimizer) in Python.",
        epilog=EXPORT_EXAMPLES,
        formatter_class=_Help,
    )
    export.add_argument("directory", metavar="DIR", type=path, help="a job's checkpoint directory")
    export.add_argument(
        "out",
        metavar="OUT",
        type=path,
        help="the file to write, *.safetensors or *.pt, or a directory for adapters; replaced if it exists",
    )
    export.add_argument(
        "--version",
        type=_version,
        metavar="N",
        help="the version to write, or best: the one that the evaluator found best (default: the newest)",
    )


def _add_evaluate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="evaluate the checkpoints that a run has left",
        description="Evaluate the checkpoints of a directory, oldest first, and print the results. The\n"
        "evaluator is the one that the job had. For a job without one, name a function that loops over\n"
        "elastic_ps.checkpoints(). The command only reads the directory.",
        epilog=EVALUATE_EXAMPLES,
        formatter_class=_Help,
    )
    evaluate.add_argument("directory", metavar="DIR", type=path, help="a job's checkpoint directory")
    which = evaluate.add_mutually_exclusive_group()
    which.add_argument(
        "--job", type=path, metavar="FILE", help="take the evaluator of this job's YAML file (spec.evaluator)"
    )
    which.add_argument(
        "--entrypoint",
        metavar="MODULE:FUNCTION",
        help="the evaluator's function, which is called without arguments",
    )
    evaluate.add_argument("--version", type=int, metavar="N", help="only this version (default: all)")
    evaluate.add_argument("--json", action="store_true", help="print JSON, a line for each version")


def _add_drill(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    faults = "\n".join(f"  {kind:<20}{text}" for kind, text in DESCRIPTIONS.items())
    drill = commands.add_parser(
        "drill",
        help="run a job, inject faults, and check that nothing is lost",
        description=DRILL,
        epilog=f"faults:\n{faults}\n\n{DRILL_EXAMPLES}",
        formatter_class=_Help,
    )
    drill.add_argument("job", metavar="JOB", type=path, help="the job's YAML file")
    drill.add_argument("--seed", type=int, metavar="N", help="the schedule's seed (default: a random one)")
    drill.add_argument(
        "--faults",
        type=_faults,
        metavar="F,F,...",
        help="the faults to inject; a fault that you name twice is injected twice (default: kill-worker, "
        "kill-ps and stop-worker; without --histories also freeze-worker and corrupt-checkpoint)",
    )
    drill.add_argument(
        "--workers", type=_number_of("workers"), metavar="N", help="start N workers, whatever the file says"
    )
    drill.add_argument(
        "--report", type=path, metavar="DIR", help="write drill.json and the histories into DIR"
    )
    cluster = drill.add_argument_group("on a Kubernetes cluster (through kubectl)")
    cluster.add_argument(
        "--histories",
        metavar="CLAIM",
        help="run the job on the cluster; CLAIM is an existing PersistentVolumeClaim that all of its pods "
        "can mount",
    )
    cluster.add_argument(
        "-n", "--namespace", metavar="NS", help="the namespace (default: the one of kubectl's context)"
    )


def _add_hostfile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    hostfile = commands.add_parser(
        "hostfile",
        help="print a hostfile for mpirun",
        description="Print a hostfile for `mpirun --hostfile`. It lists the hosts that you name, or else\n"
        "the hosts of the Slurm allocation that the command runs in. The first host has rank 0, with the\n"
        "launcher and the parameter servers. Every other rank runs a worker.",
        epilog=HOSTFILE_EXAMPLES,
        formatter_class=_Help,
    )
    hostfile.add_argument(
        "hosts", metavar="HOST[:SLOTS]", nargs="*", help="a host, and how many ranks it may have"
    )
    hostfile.add_argument(
        "--from", dest="source", type=path, metavar="FILE", help="read the hosts from a file, one per line"
    )
    hostfile.add_argument(
        "--slots",
        type=_number_of("ranks"),
        default=1,
        metavar="N",
        help="the ranks of a host for which you give no number (default: 1)",
    )
    hostfile.add_argument(
        "--style",
        choices=["open-mpi", "mpich"],
        default="open-mpi",
        help="the MPI whose mpirun reads the file (default: open-mpi)",
    )


def _faults(text: str) -> list[Kind]:
    kinds: list[Kind] = []
    for word in text.split(","):
        known = [kind for kind in KINDS if kind == word.strip()]
        if not known:
            raise argparse.ArgumentTypeError(f"{word!r} is not a fault; expected one of {', '.join(KINDS)}")
        kinds += known
    return kinds


def _output(text: str) -> str:
    if not re.fullmatch(r"all|none|(ps|standby|worker|evaluator)-\d+", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the output of a process: try worker-0, all or none"
        )
    return text


def _version(text: str) -> str:
    if text != "best" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a version: expected a number, or best")
    return text


def _number_of(what: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what}: expected 1 or more")
        return int(text)

    return parse


def _scale(text: str) -> tuple[int, int]:
    version, colon, workers = text.partition(":")
    if not (colon and version.isdecimal() and workers.isdecimal() and int(workers) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form VERSION:N, as in 150:4")
    return int(version), int(workers)
