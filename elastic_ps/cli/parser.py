"""The command line's options and its help; nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path

from elastic_ps.drill.faults import DESCRIPTIONS, KINDS, Kind

DESCRIPTION = """\
Train a PyTorch model with a parameter server and workers that come and go.

A job is described in a YAML file (kind: TrainingJob). On this machine, `run` starts its parameter
servers and workers as processes and watches over them; the other commands look at a job that runs,
or change it, from any terminal."""

EXAMPLES = """\
examples:
  elastic-ps run job.yaml                    train, with live progress; Ctrl-C stops it orderly
  elastic-ps run job.yaml --workers 4        with another number of workers than the file says
  elastic-ps run job.yaml --scale 150:4 --scale 400:2 --report out
                                             grow to 4 workers at version 150, shrink to 2 at 400;
                                             leave numbers and a picture in out/
  elastic-ps run job.yaml --detach           in the background; then:
  elastic-ps status digits                   how it is doing
  elastic-ps scale digits --workers 4        more or fewer workers; those who train go on
  elastic-ps logs digits -f --worker 0       what worker 0 prints
  elastic-ps stop digits                     stop it; a checkpoint is written
  elastic-ps drill job.yaml --seed 7         break it on purpose; is anything lost?

A version is the number of optimizer steps that the model has taken.

exit codes:
  0    done; for run: the job succeeded
  1    the job failed
  2    bad input: the message says what to change; trying again as it is would be no use
  130  stopped by Ctrl-C (129 SIGHUP, 143 SIGTERM)"""

RUN = """\
Run a job as processes on this machine until it has succeeded, failed or been stopped.

The file is checked first, and the entrypoint is imported once, so that mistakes cost nothing. Then the
parameter servers start, then the workers. A worker that is killed is replaced; one whose script fails
is replaced until runPolicy.backoffLimit is exceeded. The first Ctrl-C lets the workers leave and the
parameter servers write a checkpoint, a second one kills them."""

RUN_EXAMPLES = """\
examples:
  elastic-ps run job.yaml --report out       out/run.json and out/run.png tell how it went
  elastic-ps run job.yaml --trace trace.json then open it in https://ui.perfetto.dev
  elastic-ps run job.yaml --resume DIR       go on from the newest checkpoint in DIR"""


DRILL = """\
Run a job on this machine and break it on purpose: processes are killed and frozen, checkpoints damaged,
as a schedule says that follows from the seed. Both sides record what they did; at the end the histories
are compared, and every record of every epoch must be in the model exactly once.

The job has to be long enough for the faults: each waits until the job has recovered from the one before.
Faults happen at shares of the records, so with one seed the same faults come in the same order."""

DRILL_EXAMPLES = """\
examples:
  elastic-ps drill job.yaml                  five common faults, with a new seed
  elastic-ps drill job.yaml --seed 7 --faults kill-ps,kill-ps,freeze-worker --report out

exit codes:
  0    the job succeeded, every possible fault happened, nothing was lost
  1    otherwise; the table says what"""


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=98)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "elastic-ps", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=_Help
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    _add_run(commands)
    _add_status(commands)
    _add_scale(commands)
    _add_logs(commands)
    _add_stop(commands)
    _add_drill(commands)
    return parser


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run", help="run a job on this machine", description=RUN, epilog=RUN_EXAMPLES, formatter_class=_Help
    )
    run.add_argument("job", metavar="JOB", type=Path, help="the job's YAML file")
    run.add_argument(
        "--workers", type=_positive, metavar="N", help="start with N workers instead of the file's"
    )
    run.add_argument(
        "--scale",
        type=_scale,
        action="append",
        default=[],
        metavar="VERSION:N",
        help="at that version, change to N workers; may be given several times",
    )
    run.add_argument(
        "--report", type=Path, metavar="DIR", help="write run.json and run.png into DIR at the end"
    )
    run.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a Chrome trace of every process into FILE"
    )
    run.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on from the newest whole checkpoint in DIR"
    )
    run.add_argument("--detach", action="store_true", help="return as soon as the job runs")


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = commands.add_parser(
        "status",
        help="show how jobs are doing",
        description="Show one job, or all jobs of this machine: those that run and the last run of others.",
        formatter_class=_Help,
    )
    status.add_argument("job", metavar="JOB", nargs="?", help="a job's name or its YAML file")
    status.add_argument("--json", action="store_true", help="as JSON, for programs")


def _add_scale(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    scale = commands.add_parser(
        "scale",
        help="change the number of workers of a running job",
        description="Change the number of workers while the job runs. New workers join at the current "
        "version; the highest numbers leave after their step. Nobody else restarts or waits.",
        formatter_class=_Help,
    )
    scale.add_argument("job", metavar="JOB", help="the job's name or its YAML file")
    scale.add_argument("--workers", type=_positive, metavar="N", required=True, help="how many workers")


def _add_logs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    logs = commands.add_parser(
        "logs",
        help="show what a job's processes print",
        description="Show what the processes of a job's last run have printed: all, or one of them.",
        formatter_class=_Help,
    )
    logs.add_argument("job", metavar="JOB", help="the job's name or its YAML file")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    which = logs.add_mutually_exclusive_group()
    which.add_argument("--worker", type=int, metavar="N", help="only worker N, counted from 0")
    which.add_argument("--ps", type=int, metavar="N", help="only parameter server N, counted from 0")
    which.add_argument("--standby", type=int, metavar="N", help="only the standby of parameter server N")


def _add_stop(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    stop = commands.add_parser(
        "stop",
        help="stop a running job",
        description="Stop a job: its workers leave, its parameter servers write a checkpoint. "
        "Returns when nothing of it runs any more.",
        formatter_class=_Help,
    )
    stop.add_argument("job", metavar="JOB", help="the job's name or its YAML file")


def _add_drill(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    faults = "\n".join(f"  {kind:<20}{text}" for kind, text in DESCRIPTIONS.items())
    drill = commands.add_parser(
        "drill",
        help="run a job and break it on purpose",
        description=DRILL,
        epilog=f"faults:\n{faults}\n\n{DRILL_EXAMPLES}",
        formatter_class=_Help,
    )
    drill.add_argument("job", metavar="JOB", type=Path, help="the job's YAML file")
    drill.add_argument("--seed", type=int, metavar="N", help="of the schedule; a random one if not given")
    drill.add_argument(
        "--faults", type=_faults, metavar="F,F,...", help="which faults; one named twice happens twice"
    )
    drill.add_argument(
        "--workers", type=_positive, metavar="N", help="start with N workers instead of the file's"
    )
    drill.add_argument(
        "--report", type=Path, metavar="DIR", help="write drill.json and the histories into DIR"
    )


def _faults(text: str) -> list[Kind]:
    kinds: list[Kind] = []
    for word in text.split(","):
        known = [kind for kind in KINDS if kind == word.strip()]
        if not known:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(KINDS)}")
        kinds += known
    return kinds


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _scale(text: str) -> tuple[int, int]:
    version, colon, workers = text.partition(":")
    if not (colon and version.isdecimal() and workers.isdecimal() and int(workers) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not VERSION:N, such as 150:4")
    return int(version), int(workers)
