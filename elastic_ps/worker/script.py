"""`python -m elastic_ps.worker`: import the job's entrypoint and call it.

`python -m elastic_ps.worker --check SPEC` (in JSON) only imports it, to find out before anything is started
whether that works, whether it takes the job's arguments, and whether there are the codecs of
`spec.compression`, the optimizers of `spec.parameterServer`, and the function that
`consistency.stalenessScale` may name. The evaluator's entrypoint is tried likewise.
"""

from __future__ import annotations

import json
import sys

from elastic_ps import errors
from elastic_ps.api.job import parse_spec
from elastic_ps.contract import env, exits
from elastic_ps.process import entrypoint, lifecycle, siblings

_STATUSES = {
    errors.RefusalCode.HUNG: exits.HUNG,
    errors.RefusalCode.MODEL_LOST: exits.LOST,
    errors.RefusalCode.NOT_READY: exits.SILENT,
}
"""The exit status of a worker that was refused for such a reason."""


def status_of(error: Exception) -> int:
    """The exit status of a worker whose script has failed."""
    if isinstance(error, entrypoint.ALWAYS):
        return exits.INVALID
    if isinstance(error, errors.ConnectionLost | errors.DeadlineExceeded):
        return exits.SILENT
    return _STATUSES.get(error.code, 1) if isinstance(error, errors.Refused) else 1


def check(text: str) -> int:
    """Print what is wrong with the entrypoints, their arguments, codecs or optimizers; returns the status."""
    try:
        with lifecycle.importing():
            from elastic_ps.codec.optimizers import Optimizers
            from elastic_ps.codec.plan import Plan
            from elastic_ps.core import scales

            spec = parse_spec(json.loads(text), source="spec")
            entrypoint.load(spec.entrypoint, spec.arguments)
            if (evaluator := spec.evaluator) is not None:
                entrypoint.load(evaluator.entrypoint, evaluator.arguments, field="spec.evaluator.arguments")
            Plan(spec.compression)
            scales.check(spec.consistency.staleness_scale)
            Optimizers(spec.parameter_server.optimizers)
    except errors.InvalidJob as error:
        print(f"error: {error}", file=sys.stderr)
        return exits.INVALID
    lifecycle.end_soon()
    return 0


def main() -> int:
    """Run the script; returns the exit status, see `elastic_ps.contract.exits`."""
    if len(sys.argv) == 3 and sys.argv[1] == "--check":
        return check(sys.argv[2])
    if env.in_job() and (environment := env.read()).spec.worker.processes > 1 and not environment.links:
        return siblings.run(environment)
    with lifecycle.importing():
        from elastic_ps.process import compiler
        from elastic_ps.worker import current
        from elastic_ps.worker.model import checks
    from elastic_ps.worker.wire.local_world import Drained

    try:
        environment = env.read()
        lifecycle.begin(environment)
        lifecycle.keep_freed_memory()
        compiler.defer()
        lifecycle.handle_sigterm(current.drain)
        try:
            entrypoint.load(environment.spec.entrypoint, environment.spec.arguments)()
        except SystemExit as ending:
            if not ending.code:  # as `sys.exit(main())` ends a script that has done its work
                current.finish()
            elif current.came_late():
                return _late()
            else:
                current.close(failed=True)
            raise
        current.finish()
    except errors.UserError as error:
        current.close(failed=True)  # so that the cause is said last
        if current.came_late():
            print(f"error: {error}", file=sys.stderr)
            return _late()
        return _invalid(str(error))
    except Drained:
        return exits.LEFT
    except Exception as error:  # noqa: BLE001 (the script's own failure)
        if isinstance(error, errors.TransportError) and current.asked_to_leave():
            print(f"this worker left in the middle of a step: {error}", file=sys.stderr)
            return exits.LEFT
        was_open = current.close(failed=True)
        if left := checks.left_over(error):
            return _invalid(left)
        text = entrypoint.describe(error)
        print(text, end="", file=sys.stderr)
        if current.came_late():
            return _late()
        lifecycle.leave_reason(text[-2000:])
        status = status_of(error)
        return status if was_open or status != exits.SILENT else 1
    finally:
        current.close()
        lifecycle.end_soon()
    return 0


def _late() -> int:
    """Say that the failure of this worker's script does not matter; returns the status."""
    print("the training was over before this worker made a step: that is no failure", file=sys.stderr)
    return 0


def _invalid(problem: str) -> int:
    """Say what a person has to change; returns the status."""
    print(f"error: {problem}", file=sys.stderr)
    lifecycle.leave_reason(problem)
    return exits.INVALID
