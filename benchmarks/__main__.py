"""Run the benchmarks one after the other, and write what they find to a page of docs/reports with the date.

`python -m benchmarks` takes some 15 minutes, without those that train for long; nothing else should run
meanwhile. Names of benchmarks run those alone, and print the page; with a title, they write it.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import Figure, read

COMMAND = ("python", "-m", "benchmarks")
ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


class Benchmark(NamedTuple):
    """A script: its title on the page, what the reader has to know, and its arguments for this run.

    `script`: its name, if the benchmark has another one. `long`: it runs only if it is named.
    """

    title: str
    text: str
    arguments: Sequence[str] = ()
    script: str = ""
    long: bool = False


BENCHMARKS: Mapping[str, Benchmark] = {
    "datapath": Benchmark(
        "A step on one host",
        "The median step of the slowest worker, float32, mode `sync`, on batches that lie in memory.",
        ("--rounds", "2"),
    ),
    "shapes": Benchmark(
        "A step of models with an unusual shape",
        "50 parameter groups; 5,000 small tensors; 34 million parameters in bfloat16, of which the "
        "optimizer steps copies in float32.",
        ("groups", "tensors", "masters", "--rounds", "1"),
        "datapath",
    ),
    "datapath-tcp": Benchmark(
        "The same over the connection between hosts",
        "As above, but each process reaches the others over TCP, on loopback.",
        ("--rounds", "1", "--transport", "tcp"),
        "datapath",
    ),
    "network": Benchmark(
        "A step between hosts",
        "Four hosts (network namespaces) with links of 1 Gbit/s, with a worker and a shard each.",
        ("--rounds", "1", "--codec", "bf16", "--codec", "int8", "--codec", "topk"),
    ),
    "network-apart": Benchmark(
        "A step between hosts, with parameter servers on hosts of their own",
        "Four workers and four shards on eight hosts; DDP on four.",
        ("--rounds", "1", "--apart"),
        "network",
    ),
    "network-one": Benchmark(
        "A step of one worker",
        "With a parameter server on another host, beside the time that the bytes alone need, one way after "
        "the other. Without `drafts` nothing overlaps but backward.",
        ("--rounds", "1", "--workers", "1"),
        "network",
    ),
    "processes": Benchmark(
        "Workers of several processes",
        "Four processes on another host than the parameter server, as one worker beside four: bytes on the "
        "parameter server's link, its processor time, and the time of a step, with a link of 1 Gbit/s.",
    ),
    "tables": Benchmark(
        "A large embedding with sparse gradients",
        "The median step, beside DDP with dense gradients, one process, and a table four times as large.",
        ("--rounds", "2"),
    ),
    "tables-large": Benchmark(
        "A table that grows",
        "DeepFM on a table in which ten million rows are made before. DDP and one process have a million; of "
        "one process, as many steps as there are workers are compared. Then a table of twenty million rows "
        "beside one of a million, with as many rows in a batch.",
        ("--known", "10000000", "--batch", "2048", "--rounds", "1"),
        "tables",
    ),
    "transport": Benchmark(
        "Bodies between two processes", "Up and down, beside `sendall` and `recv_into` on a TCP socket."
    ),
    "server": Benchmark(
        "What a parameter server spends",
        "Processor time of a commit, beside a step of torch's optimizer; and of the parameter server for a "
        "step and worker, beside the same with one worker.",
    ),
    "rows": Benchmark(
        "Rows of a table that grows",
        "Look-ups and updates with Adagrad of a million rows of 16 values, one core, batches by Zipf's law, "
        "beside torch on the same rows, which has no hash table, and beside a dictionary of rows. Then the "
        "memory of 20 million rows.",
        ("--large", "20000000"),
    ),
    "memory": Benchmark(
        "Memory of a parameter server",
        "26.2 million parameters with Adam (values, state and one sum: 400 MiB), and a checkpoint every two "
        "seconds, beside a rank of DDP that writes none.",
    ),
    "gpt": Benchmark(
        "A whole job of a large model",
        "A GPT of 26 million parameters, AdamW, two workers: beginning, twelve steps, end, and the memory of "
        "all processes, beside DDP, which writes nothing to disk.",
        ("--small", "--writing"),
    ),
    "crowd": Benchmark(
        "A thousand workers",
        "Simulated ones: processor time of the parameter server for a join, and its share of a core while "
        "all leases are kept, beside what we allow ourselves.",
    ),
    "step": Benchmark(
        "Samples per second of a whole job", "An MLP of 0.8 million parameters.", ("--rounds", "2")
    ),
    "straggler": Benchmark(
        "One worker of three is slow",
        "Steps per second of the others, as a share of what they make when all are equal.",
        ("--rounds", "1"),
    ),
    "recovery": Benchmark(
        "A process is killed",
        "The time until training is further than before: the parameter server of ours, a rank of theirs.",
        ("--rounds", "2"),
    ),
    "startup": Benchmark("The first step", "From the command to the first step of two workers."),
    "newcomer": Benchmark(
        "One worker more",
        "From the command until a step is made with the new worker: `elastic-ps scale`, beside another agent "
        "of `torchrun`, after which all ranks start again.",
        ("--rounds", "2"),
    ),
    "modes": Benchmark(
        "Accuracy in every mode",
        "LeNet on the digits with each mode, outer rule and codec, and the defaults of all else: the lowest "
        "held-out accuracy of three orders of the records, beside what each has to reach.",
        ("--modes", "--seeds", "3"),
        "accuracy",
        long=True,
    ),
    "characters": Benchmark(
        "A language model in every mode",
        "Bits per byte of held-out text, of a GPT of a million parameters with AdamW and two workers.",
        long=True,
    ),
}


def command_of(name: str, benchmark: Benchmark) -> list[str]:
    """What a reader calls after `python`."""
    return ["-m", f"benchmarks.{benchmark.script or name}", *benchmark.arguments]


def run(name: str, benchmark: Benchmark) -> list[Figure]:
    """Run one. Raises RuntimeError if it fails; one that misses what it has to reach has figures, too."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "figures.json"
        command = [sys.executable, *command_of(name, benchmark), "--json", str(file)]
        status = subprocess.run(command, cwd=ROOT).returncode
        if status and not file.exists():
            raise RuntimeError(f"{' '.join(command)} failed")
        return read(file)


def page(found: Mapping[str, Sequence[Figure]], heading: str, command: str) -> str:
    """The page that a command writes, as Markdown."""
    lines = [
        f"# {heading}",
        "",
        f"`{command}` wrote this page. Timings depend on the machine: compare the ratios.",
        "",
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}.",
    ]
    for name, figures in found.items():
        benchmark = BENCHMARKS[name]
        command = " ".join(["python", *command_of(name, benchmark)])
        lines += ["", f"## {benchmark.title}", "", f"{benchmark.text} `{command}`", ""]
        lines += ["| what | elastic-ps | beside it | | ratio |", "| --- | --- | --- | --- | --- |"]
        for each in figures:
            ours, theirs = (f"{value:,.4g} {each.unit}" for value in (each.ours, each.theirs))
            lines.append(f"| {each.what} | {ours} | {theirs} | {each.competitor} | {each.ratio:.2f} |")
    return "\n".join(lines) + "\n"


def list_report(index: Path, name: str, heading: str) -> None:
    """Name a report in the index, above the earlier ones."""
    text, line = index.read_text(), f"- [{heading}]({name}.md)\n"
    if line not in text:
        index.write_text(text.replace("- [", f"{line}- [", 1))


def draw(found: Mapping[str, Sequence[Figure]], path: Path) -> None:
    """A bar for each ratio, the other way round where more is better, so that shorter is always better."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure as Canvas

    rows = [
        (
            f"{BENCHMARKS[name].title}: {each.what}, to {each.competitor}",
            each.ratio ** (-1 if each.more else 1),
        )
        for name, figures in found.items()
        for each in figures
    ]
    canvas = Canvas(figsize=(11, 1 + 0.26 * len(rows)), dpi=120, layout="constrained")
    axes = canvas.subplots()
    colours = ["tab:green" if ratio <= 1 else "tab:orange" for _, ratio in rows]
    axes.barh([name for name, _ in rows], [ratio for _, ratio in rows], color=colours, height=0.7)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    canvas.supxlabel("elastic-ps to the competitor (rates the other way round): less is better", fontsize=9)
    axes.tick_params(axis="y", labelsize=7.5)
    axes.spines[["top", "right"]].set_visible(False)
    canvas.savefig(path)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; all of them if none is named")
    parser.add_argument("--title", help="write the page of these benchmarks, too, under this title")
    parsed = parser.parse_args()
    names, title = parsed.names, parsed.title
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"there is no benchmark {unknown[0]!r}; expected one of {', '.join(BENCHMARKS)}")
    began = time.monotonic()
    found = {}
    for name in names or [name for name, each in BENCHMARKS.items() if not each.long]:
        print(f"=== {name}", flush=True)
        found[name] = run(name, BENCHMARKS[name])
    day = date.today().isoformat()
    heading = f"{title or 'Benchmarks'}, {day}"
    text = page(found, heading, shlex.join([*COMMAND, *names, *(["--title", title] if title else [])]))
    if names and not title:
        print(text)
        return
    name = f"{day}-{re.sub('[^a-z0-9]+', '-', (title or 'benchmarks').lower())}"
    draw(found, DOCS / "images" / f"{name}.png")
    report = DOCS / "reports" / f"{name}.md"
    report.write_text(f"{text}\n![Ratios](../images/{name}.png)\n")
    list_report(DOCS / "reports" / "index.md", name, heading)
    print(f"{report.relative_to(ROOT)} is written, after {(time.monotonic() - began) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
