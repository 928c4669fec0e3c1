"""What remains of the speed while processes are killed, frozen and slowed: samples that count per second.

`python -m benchmarks.goodput` trains the same model for some minutes with elastic-ps in several modes, with
DistributedDataParallel under torchrun's elastic agent, and with torchft if that is installed (`pip install
torchft`). Faults strike all of them in the same way, at moments that follow from a seed: a worker is killed,
frozen, or computes more slowly for a while. Of elastic-ps the parameter server is killed, too; the others
have none. A sample counts if what it has changed is in the model at the end: what is trained again, because
the model went back to a checkpoint, counts once.

There are two settings. Without `--machines` a worker is a process on a healthy machine, and whoever has
started it starts it again at once. With `--machines` each worker is a machine of its own, as a spot node or a
pod: a fault kills all that runs on it, it is away for `--gone` seconds, and then begins with nothing in
memory. The others may train on meanwhile. What is the same for all systems then:

- The connections of a machine that is killed are closed at once. (Of one that loses its network, nobody hears
  anything until some time has passed; that is not measured here.)
- What the others need of it is not lost with it: the directory of checkpoints, the store of torchrun's
  rendezvous, torchft's lighthouse, and the launcher and parameter server of elastic-ps are elsewhere. Of
  these only the parameter server is struck, and is started again at once.
- A fault kills a machine that is there, whatever it does. It freezes or slows only the process that trains.

`benchmarks.goodput_torchrun` says how torchrun is called. It is measured with torch's own times, and as
"torchrun tuned" with the shortest ones that it takes. Of elastic-ps, `worker.leaseDuration` is 1.5 s; it
decides after a freeze, but not after a kill, of which the launcher tells the parameter server.

Each rate is shown beside the same system's without faults, and beside torchrun's (the faster one, if there
are two), with what a fault of each kind has cost, and the longest time in which no sample came to count. A
machine that is away, or a worker that is frozen, can train nothing, whatever the system. So it is shown for
how much of their time the workers were there, and for how long nobody was. In brackets is what a fault has
cost beside the work of those that were not there, and the longest standstill while somebody was there.

Of elastic-ps the recorded histories are checked afterwards: no record may be lost, or be in the model twice.
Of torchrun's it is shown how many samples were computed again, and whether agents have ended. Ctrl-C ends the
measurement, and what was found until then is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Event
from typing import TypeAlias, assert_never, get_args

from benchmarks.figures import Figure, write
from benchmarks.goodput_found import Fault, Mark, Measured, measured, rival, rows
from benchmarks.goodput_machines import ROOT, put, signal_to
from benchmarks.goodput_systems import CLEAN, Kind, System, modes, parameter_server, slow_file
from benchmarks.goodput_torchft import torchft
from benchmarks.goodput_torchrun import TUNED, on_machines, on_one_machine

LASTING = (1.0, 8.0)
"""Seconds that a worker is frozen or slow, at least and at most."""
GONE = 20.0
"""Seconds that a machine is away: about what a replaced pod takes on a node that has its image."""
EVERY = 10.0
"""Mean seconds between two faults."""
LOOK = 0.5
"""Seconds between two looks at how many samples count."""
LIMIT = 120.0
"""Seconds within which training must have begun, or go on."""
TORCHRUN, TORCHRUN_TUNED = "torchrun DDP", "torchrun tuned"

Open: TypeAlias = Callable[[Path], AbstractContextManager[System]]
"""Starts a system in a directory, and ends it."""


def schedule(
    seed: int,
    seconds: float,
    workers: int,
    every: float,
    *,
    lasting: tuple[float, float] = LASTING,
    kinds: Sequence[Kind] = get_args(Kind),
) -> list[Fault]:
    """Faults that follow from a seed, `every` so many seconds on average; none in the last tenth.

    Args:
        lasting: for how many seconds a worker is frozen or slow, at least and at most.
        kinds: what happens, each as often as the others.
    """
    chance = random.Random(seed)
    found: list[Fault] = []
    at = chance.expovariate(1 / every)
    while at < 0.9 * seconds:
        kind = chance.choice(kinds)
        found.append(Fault(at, kind, chance.randrange(workers), chance.uniform(*lasting)))
        at += chance.expovariate(1 / every)
    return found


def measure(
    open_: Open,
    seconds: float,
    faults: Sequence[Fault],
    interrupted: Event,
    *,
    workers: int,
    gone: float | None = None,
    limit: float = LIMIT,
) -> Measured:
    """Train for some seconds, from when the first samples count; or until that is `interrupted`.

    Args:
        gone: seconds that the machine of a worker which is killed is away; None if workers have none.
        limit: seconds to wait for samples that count, before and after.
    """
    directory = Path(tempfile.mkdtemp(prefix="elastic-ps-goodput-"))
    try:
        with open_(directory) as system:
            first = _await(system, interrupted, limit)
            began = time.monotonic()
            marks, seen = _strike(directory, system, faults, began + seconds, interrupted)
            last = _await(system, interrupted, limit)
            end = time.monotonic()
            marks.append(Mark(None, end, last))
            seen = [(began, first), *seen, (end, last)]
            audit = system.finish()
    except TimeoutError as error:
        raise TimeoutError(f"{error}; {_last_words(directory)}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return measured(seen, marks, audit, workers=workers, gone=gone or 0.0)


def _last_words(directory: Path) -> str:
    """The last line of the log that was written to last."""
    logs = [path for path in directory.rglob("*log*") if path.is_file() and path.stat().st_size]
    if not logs:
        return "there is no log"
    newest = max(logs, key=lambda path: path.stat().st_mtime)
    return f"{newest.name} ends with: {newest.read_text(errors='replace').splitlines()[-1]}"


def _await(system: System, interrupted: Event, limit: float) -> int:
    """How many samples count, when there are some; 0 if it is `interrupted` before."""
    deadline = time.monotonic() + limit
    while not (samples := system.samples()):
        if interrupted.is_set():
            return 0
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody says how many samples count, for {limit:g} s")
        time.sleep(0.05)
    return samples


def _strike(
    directory: Path, system: System, faults: Sequence[Fault], end: float, interrupted: Event
) -> tuple[list[Mark], list[tuple[float, int]]]:
    """Bring the faults about. Blocks until `end`.

    Returns:
        Those that found somebody to strike; and how many samples counted at which moments.
    """
    marks, seen, frozen = list[Mark](), list[tuple[float, int]](), dict[int, float]()
    began, due, samples = time.monotonic(), list(faults), 0
    while (now := time.monotonic()) < end and not interrupted.is_set():
        for thawed in [pid for pid, until in frozen.items() if now >= until]:
            del frozen[thawed]
            signal_to(thawed, signal.SIGCONT)
        if not seen or now - seen[-1][0] >= LOOK:
            samples = system.samples() or samples
            seen.append((now, samples))
        if due and now - began >= due[0].at:
            fault = due.pop(0)
            samples = system.samples() or samples
            if _strikes(directory, system, fault, frozen):
                marks.append(Mark(fault, now, samples))
        time.sleep(0.02)
    for thawed in frozen:
        signal_to(thawed, signal.SIGCONT)
    return marks, seen


def _strikes(directory: Path, system: System, fault: Fault, frozen: dict[int, float]) -> bool:
    """Bring a fault about; returns whether it found somebody. `frozen`: until when which process is."""
    until = time.monotonic() + fault.lasting
    match fault.kind:
        case "kill":
            return system.kill(fault.worker)
        case "kill-ps":
            return system.kill_server()
        case "slow":
            put(slow_file(directory, fault.worker), str(until))
            return True
        case "freeze":
            pid = system.pid(fault.worker)
            if pid is None or not signal_to(pid, signal.SIGSTOP):
                return False
            frozen[pid] = max(until, frozen.get(pid, until))
            return True
        case _:
            assert_never(fault.kind)


def systems(workers: int, gone: float | None = None) -> Mapping[str, Open]:
    """What can be measured, torchrun first. `gone`: each worker is a machine, which is away so long."""
    found: dict[str, Open] = {}
    if gone is None:
        found[TORCHRUN] = lambda directory: on_one_machine(directory, workers)
    else:
        found[TORCHRUN] = lambda directory: on_machines(directory, workers, gone)
        found[TORCHRUN_TUNED] = lambda directory: on_machines(directory, workers, gone, TUNED)
    if importlib.util.find_spec("torchft"):
        found["torchft DDP"] = lambda directory: torchft(directory, workers, gone or 0.0)
    for name, consistency in modes(workers).items():
        found[name] = lambda directory, c=consistency: parameter_server(directory, workers, c, gone)  # type: ignore[misc]
    return found


def chosen(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    """Those of the known names that begin as a wanted one does, in their order; all if nothing is wanted.

    Raises:
        ValueError: none begins so.
    """
    for each in wanted:
        if not any(name.startswith(each) for name in known):
            raise ValueError(f"there is no system that begins with {each!r}; there are {'; '.join(known)}")
    return [name for name in known if not wanted or name.startswith(tuple(wanted))]


def between(text: str) -> tuple[float, float]:
    """Two numbers of seconds, as in `1,8`. Raises argparse.ArgumentTypeError."""
    try:
        least, most = (float(word) for word in text.split(","))
    except ValueError:
        least, most = 0.0, -1.0
    if not 0 < least <= most < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} are no two numbers of seconds, the smaller one first; give them as in 10,30"
        )
    return least, most


def some_kinds(text: str) -> tuple[Kind, ...]:
    """Kinds of faults, as in `kill,slow`. Raises argparse.ArgumentTypeError."""
    wanted = [word.strip() for word in text.split(",")]
    for word in wanted:
        if word not in get_args(Kind):
            raise argparse.ArgumentTypeError(
                f"there is no kind of fault {word!r}; there are {', '.join(get_args(Kind))}"
            )
    return tuple(kind for kind in get_args(Kind) if kind in wanted)


def seconds_gone(text: str) -> float:
    """A number of seconds from 0. Raises argparse.ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds; give 0 or more, as in 20")
    return seconds


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults, for each system")
    parser.add_argument("--quiet", type=float, default=1.0, help="minutes without faults, for each system")
    parser.add_argument("--every", type=float, default=EVERY, help="mean seconds between two faults")
    parser.add_argument(
        "--lasting", type=between, default=LASTING, metavar="A,B", help="seconds of a freeze or slowness"
    )
    parser.add_argument(
        "--kinds", type=some_kinds, default=get_args(Kind), help="faults, as in kill,slow; all by default"
    )
    parser.add_argument(
        "--machines", action="store_true", help="each worker is a machine that comes and goes"
    )
    parser.add_argument(
        "--gone",
        type=seconds_gone,
        default=None,
        metavar="SECONDS",
        help=f"that a machine is away; {GONE:g} by default",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument(
        "--systems", default="", help="those that begin so, as in local,bounded,torchrun; all by default"
    )
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    return parser


def main(
    argv: Sequence[str] | None = None,
    *,
    offered: Callable[[int, float | None], Mapping[str, Open]] = systems,
    planned: Callable[..., Sequence[Fault]] = schedule,
    limit: float = LIMIT,
) -> int:
    """The command; returns its exit status: 1 if records were lost, came twice, or a system did not train.

    Args:
        offered, planned: give the systems and the faults.
        limit: see `measure`.
    """
    parser = make_parser()
    parsed = parser.parse_args(argv)
    if parsed.gone is not None and not parsed.machines:
        parser.error("--gone says how long a machine is away; it needs --machines")
    gone = (GONE if parsed.gone is None else parsed.gone) if parsed.machines else None
    known = offered(parsed.workers, gone)
    try:
        names = chosen([each.strip() for each in parsed.systems.split(",") if each.strip()], list(known))
    except ValueError as error:
        parser.error(f"--systems: {error}")
    os.chdir(ROOT)
    faults = planned(
        parsed.seed,
        60 * parsed.minutes,
        parsed.workers,
        parsed.every,
        lasting=parsed.lasting,
        kinds=parsed.kinds,
    )
    kinds = ", ".join(f"{sum(f.kind == kind for f in faults)} {kind}" for kind in parsed.kinds)
    of = "workers" if gone is None else f"machines, away for {gone:g} s"
    print(
        f"{parsed.workers} {of}, seed {parsed.seed}, {len(faults)} faults in "
        f"{parsed.minutes:g} minutes: {kinds}"
    )
    if not importlib.util.find_spec("torchft"):
        print("torchft is not installed, so it is left out; pip install torchft")
    print(f"{'samples that count':20} undisturbed  with faults  share  to torchrun  struck", flush=True)
    wanted = {name: known[name] for name in names}
    found, failed = measure_all(
        wanted, parsed.minutes, parsed.quiet, faults, workers=parsed.workers, gone=gone, limit=limit
    )
    ours = {name: each for name, each in found.items() if name in modes(parsed.workers)}
    if (theirs := rival(found)) is not None:
        figures = [
            Figure(name, disturbed.rate, theirs, "samples/s", "torchrun", more=True)
            for name, (_, disturbed) in ours.items()
        ]
        write(parsed.json, figures)
    clean = all(each.audit.endswith(CLEAN) for pair in ours.values() for each in pair)
    return 0 if clean and not failed else 1


def measure_all(
    wanted: Mapping[str, Open],
    minutes: float,
    quiet_minutes: float,
    faults: Sequence[Fault],
    *,
    workers: int,
    gone: float | None,
    limit: float,
) -> tuple[dict[str, tuple[Measured, Measured]], list[str]]:
    """Measure and print one system after the other, without faults and with them, until Ctrl-C.

    Returns:
        What was found of which; and which did not train.
    """
    found: dict[str, tuple[Measured, Measured]] = {}
    failed: list[str] = []
    with _interruptible() as interrupted:
        for name, open_ in wanted.items():
            try:
                quiet = measure(
                    open_, 60 * quiet_minutes, [], interrupted, workers=workers, gone=gone, limit=limit
                )
                if interrupted.is_set():
                    break
                disturbed = measure(
                    open_, 60 * minutes, faults, interrupted, workers=workers, gone=gone, limit=limit
                )
            except TimeoutError as error:
                print(f"{name:20} was not measured: {error}", flush=True)
                failed.append(name)
                continue
            found[name] = quiet, disturbed
            print(rows(name, quiet, disturbed, rival(found)), flush=True)
            if interrupted.is_set():
                print(f"interrupted: {name} had {disturbed.seconds:.0f} s of faults")
                break
    return found, failed


@contextmanager
def _interruptible() -> Iterator[Event]:
    """Set by the first Ctrl-C or SIGTERM, so that what was measured is told; the next one ends it at once."""
    interrupted = Event()

    def interrupt(number: int, _frame: object) -> None:
        interrupted.set()
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
