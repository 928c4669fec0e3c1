"""`python -m tests.simulator`: run schedules, and say which broke a promise."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.simulator.cluster import Plan
from tests.simulator.explore import draw, each_death, listen, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--schedules", type=int, default=None, help="default: 100, or any number with --seconds"
    )
    parser.add_argument("--seconds", type=float, default=None, help="begin no schedule after this time")
    parser.add_argument(
        "--each-yield",
        type=int,
        metavar="N",
        help="the first seed, calm but for one death: at every N-th yield",
    )
    parser.add_argument("--first-yield", type=int, default=1, metavar="N", help="with --each-yield")
    parser.add_argument("--log", action="store_true", help="print what happened in each schedule")
    parser.add_argument("--stop", action="store_true", help="stop at the first that broke a promise")
    arguments = parser.parse_args()
    listen(loudly=arguments.log)
    started, broken = time.monotonic(), Counter[str]()
    count = 0
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(dir=base) as directory:
        most = arguments.schedules or (100 if arguments.seconds is None else sys.maxsize)
        plans: Iterator[Plan] = map(draw, range(arguments.seed, arguments.seed + most))
        if arguments.each_yield:
            first, every = arguments.first_yield, arguments.each_yield
            plans = each_death(arguments.seed, Path(directory), first=first, every=every)
        for plan in plans:
            if arguments.seconds is not None and time.monotonic() - started > arguments.seconds:
                break
            outcome = run(plan, Path(directory))
            count += 1
            if arguments.log:
                print(f"seed {plan.seed}: {outcome.plan}\n" + "\n".join(outcome.log))
                print(
                    f"{outcome.turns} turns, {outcome.points} points, {outcome.seconds:.1f} virtual seconds"
                )
            if outcome.problems:
                print(f"seed {plan.seed}: {outcome.plan}")
                for problem in outcome.problems[:6]:
                    print(f"    {problem[:400]}")
                broken[outcome.problems[0].partition(":")[0]] += 1
                if arguments.stop:
                    break
    took = time.monotonic() - started
    print(f"{count} schedules in {took:.1f} s; {sum(broken.values())} broke a promise: {dict(broken)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
