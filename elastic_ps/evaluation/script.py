"""`python -m elastic_ps.evaluation`: import the entrypoint of the job's evaluator and call it.

`python -m elastic_ps.evaluation DIR ENTRYPOINT ARGUMENTS [--version N] [--json]` evaluates the checkpoints of
a directory, for `elastic-ps evaluate`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import TextIO

from elastic_ps.contract import env, exits
from elastic_ps.errors import CheckpointError, UserError
from elastic_ps.process import entrypoint, lifecycle

FIELD = "spec.evaluator.arguments"


def main() -> int:
    """Run the evaluator's script; returns the exit status, see `elastic_ps.contract.exits`."""
    if len(sys.argv) > 1:
        return evaluate(sys.argv[1:])
    with lifecycle.importing():
        import torch  # noqa: F401 (now, while nothing looks for garbage)

        from elastic_ps.process import compiler
    try:
        environment = env.read()
        lifecycle.begin(environment)
        compiler.defer()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(exits.LEFT))  # and what it has fetched goes
        evaluator = environment.spec.evaluator
        if evaluator is None:
            raise UserError("the job has no spec.evaluator")
        with _settled():
            entrypoint.load(evaluator.entrypoint, evaluator.arguments, field=FIELD)()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        lifecycle.leave_reason(str(error))
        return exits.INVALID
    except Exception as error:  # noqa: BLE001 (the script's own failure)
        text = entrypoint.describe(error)
        print(text, end="", file=sys.stderr)
        lifecycle.leave_reason(text[-2000:])
        return exits.INVALID if isinstance(error, entrypoint.ALWAYS) else 1
    finally:
        lifecycle.end_soon()
    return 0


@contextlib.contextmanager
def _settled() -> Iterator[None]:
    """Run a script in the block. If it succeeds, its reports before it left a loop count."""
    from elastic_ps.evaluation import checkpoints

    try:
        yield
    except SystemExit as ended:
        checkpoints.settle(evaluated=not ended.code)  # not so after SIGTERM
        raise
    except BaseException:
        checkpoints.settle(evaluated=False)
        raise
    else:
        checkpoints.settle()


def evaluate(argv: list[str]) -> int:
    """Evaluate the checkpoints of a directory, and print what the script reports; returns the exit code."""
    parser = argparse.ArgumentParser("python -m elastic_ps.evaluation", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("entrypoint")
    parser.add_argument("arguments", type=json.loads)
    parser.add_argument("--version", type=int)
    parser.add_argument("--json", action="store_true")
    parsed = parser.parse_args(argv)
    from elastic_ps.evaluation import checkpoints, source

    out = sys.stdout

    class Printed(source.DirectorySource):
        begun = False

        def begin(self) -> source.Checkpoint | None:
            self.begun = True
            return super().begin()

        def finish(self, checkpoint: source.Checkpoint) -> None:
            if parsed.json:
                finite = {name: value for name, value in checkpoint.metrics.items() if isfinite(value)}
                told = {"version": checkpoint.version, "metrics": finite}
                print(json.dumps(told), file=out, flush=True)
                return
            values = [f"{name} {value:.4g}" for name, value in sorted(checkpoint.metrics.items())]
            print(f"version {checkpoint.version}: {', '.join(values) or 'nothing was reported'}", flush=True)

    try:
        checkpoints.use(printed := Printed(parsed.directory, parsed.version))
        # The script's own output is not JSON.
        with contextlib.redirect_stdout(sys.stderr) if parsed.json else contextlib.nullcontext(), _settled():
            entrypoint.load(parsed.entrypoint, parsed.arguments, field="the arguments")()
        if not printed.begun:
            raise UserError(
                f"{parsed.entrypoint} evaluated nothing of {parsed.directory}: an evaluator loops over "
                "elastic_ps.checkpoints(), called without a directory"
            )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _has_lost_its_reader(out):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        return 1
    return 0


def _has_lost_its_reader(out: TextIO) -> bool:
    """Return True if `out` is a pipe that nobody reads any more, as after `head`."""
    poll = select.poll()
    poll.register(out.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
