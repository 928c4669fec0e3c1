"""`elastic-ps drill`: inject faults into a job, and report the results."""

from __future__ import annotations

import argparse
import json
import random
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic_ps.api import manifest
from elastic_ps.api.job import TrainingJob, load_job
from elastic_ps.cli.run import signals_end_the_process
from elastic_ps.drill.cluster import run_on_cluster
from elastic_ps.drill.faults import Fault, Kind, schedule
from elastic_ps.drill.report import build_report
from elastic_ps.drill.runner import Drill, Injection, run
from elastic_ps.errors import UserError
from elastic_ps.local import JobDirectory, Options, Programs, preflight, script
from elastic_ps.local.state import write_atomically

DEFAULT: tuple[Kind, ...] = ("kill-worker", "kill-ps", "freeze-worker", "stop-worker", "corrupt-checkpoint")
CLUSTER_DEFAULT: tuple[Kind, ...] = ("kill-worker", "kill-ps", "stop-worker")
STATE_STYLES = {"recovered": "green", "unavailable": "yellow"}


def drill(parsed: argparse.Namespace, programs: Programs | None) -> int:
    """Run the drill; returns the exit code."""
    if script.is_script(parsed.job):
        raise UserError(
            f"a drill takes a job's YAML file, but {parsed.job} is a script. Write a job file whose "
            "entrypoint is a function of the script, as in entrypoint: train:main"
        )
    job = load_job(parsed.job)
    if parsed.workers is not None:
        job.spec.worker.replicas = parsed.workers
    if parsed.namespace is not None and parsed.histories is None:
        raise UserError("--namespace is for a drill on a cluster; give --histories CLAIM, too")
    history = None if parsed.report is None else parsed.report / "history"
    if history is not None:
        preflight.prepare_directory(parsed.report, option="--report")
        if history.exists() and not (parsed.report / "drill.json").exists():
            raise UserError(
                f"--report {parsed.report}: a drill replaces {history}, but no drill.json is beside it, so "
                "it is not from a drill. Remove it, or name another directory"
            )
    seed = random.SystemRandom().randrange(10_000) if parsed.seed is None else parsed.seed
    default = CLUSTER_DEFAULT if parsed.histories else DEFAULT
    kinds: Sequence[Kind] = parsed.faults or default
    command = _command(parsed, seed, kinds)
    faults = schedule(seed, kinds, workers=job.spec.worker.replicas)
    console = Console(highlight=False)

    def tell(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    def report(content: dict[str, Any]) -> None:
        if parsed.report is not None:
            write_atomically(parsed.report / "drill.json", json.dumps(content, indent=2) + "\n")

    def announce() -> None:
        tell(f"Seed {seed}: " + ", ".join(str(fault) for fault in faults))
        report({"passed": False, "seed": seed, "command": command})  # in case it is interrupted

    with signals_end_the_process("the drill is not complete"):
        if parsed.histories:
            result = _on_cluster(parsed, job, faults, history, announce, tell)
        else:
            options = Options(programs=programs or Programs())
            JobDirectory(job.name, root=options.root).refuse_if_running()
            preflight.check_workers(job, ())
            preflight.check_checkpoints(job, None)
            preflight.check_entrypoint(job, options.programs)
            announce()
            result = run(job, faults, options=options, history=history, tell=tell)
    show(console, result)
    console.print(Text("Again: ", style="dim").append(command, style="not dim"), soft_wrap=True)
    report(build_report(result, seed=seed, command=command))
    return 0 if result.passed else 1


def _on_cluster(
    parsed: argparse.Namespace,
    job: TrainingJob,
    faults: Sequence[Fault],
    history: Path | None,
    announce: Callable[[], None],
    tell: Callable[[str], None],
) -> Drill:
    if job.spec.image is None:
        raise UserError(f"{parsed.job}: a job on a cluster needs spec.image")
    document = manifest.read(parsed.job.read_text(encoding="utf-8"))
    worker = document["spec"].get("worker") or {}
    document["spec"]["worker"] = {**worker, "replicas": job.spec.worker.replicas}
    announce()
    with tempfile.TemporaryDirectory(prefix="elastic-ps-drill-") as temporary:
        return run_on_cluster(
            job,
            document,
            faults,
            namespace=parsed.namespace or document["metadata"].get("namespace"),
            claim=parsed.histories,
            history=history or Path(temporary),
            tell=tell,
        )


def _command(parsed: argparse.Namespace, seed: int, kinds: Sequence[Kind]) -> str:
    words = ["elastic-ps", "drill", str(parsed.job), "--seed", str(seed), "--faults", ",".join(kinds)]
    if parsed.workers is not None:
        words += ["--workers", str(parsed.workers)]
    if parsed.histories is not None:
        words += ["--histories", parsed.histories]
    if parsed.namespace is not None:
        words += ["--namespace", parsed.namespace]
    return shlex.join(words)


def show(console: Console, result: Drill) -> None:
    """The table, the violations and the verdict.

    The table has the seconds to recover, the versions that were undone and repeated, and the records that are
    missing in the model or in it more than once.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for column in ("fault", "when", "outcome"):
        table.add_column(column, no_wrap=True)
    for column in ("seconds", "redone", "lost", "twice"):
        table.add_column(column, justify="right")
    for each in result.injections:
        table.add_row(*_row(each))
    console.print(table)
    for violation in result.violations[:20]:
        console.print(Text(str(violation), style="red"), soft_wrap=True)
    if len(result.violations) > 20:
        console.print(f"and {len(result.violations) - 20} more", style="red")
    ended = result.result
    console.print(f"{ended.job} {ended.phase.lower()}: {ended.message}", soft_wrap=True, markup=False)
    if result.passed:
        text = f"Nothing was lost: {result.records:,} records, each in the model exactly once."
        console.print(Text(text, style="bold green"), soft_wrap=True)
    else:
        if not result.commits or {each.state for each in result.injections} == {"unavailable"}:
            console.print("No fault has struck a job that trains, so the drill proves nothing.")
        console.print(Text("The drill did not pass.", style="bold red"))


def _row(each: Injection) -> list[str | Text]:
    if each.seconds is None or each.version is None:
        when = "" if each.at is None else f"{each.at:.1f} s"
        outcome = Text(each.state, style=STATE_STYLES.get(each.state, "red"))
        return [each.fault.kind, when, outcome, "", "", "", ""]
    return [
        each.fault.kind,
        f"{each.at:.1f} s, version {each.version}",
        Text(each.state, style=STATE_STYLES.get(each.state, "red")),
        f"{each.seconds:.1f}",
        str(each.redone),
        str(each.lost),
        str(each.twice),
    ]
