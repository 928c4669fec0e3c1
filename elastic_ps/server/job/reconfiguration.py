"""Changes the mutable fields of a running job, as a person or an objective of the job wants them.

New times of checkpoints take effect at once. A change of the consistency or the compression takes effect in a
new term: the present version is written to disk, with the new fields, and all shards and workers continue
from it, as they do when a shard has lost the model (docs/design/protocol.md). So steps under way are dropped,
and their records are handed out again. No message of the old term is taken for one of the new term. A
parameter server that is lost meanwhile continues with either the old fields or the new ones.

The process that started this one writes the wanted fields to a file.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

from elastic_ps.api.mutable import MutableFields, read_mutable
from elastic_ps.codec.optimizers import second_momentum
from elastic_ps.codec.plan import Plan
from elastic_ps.core import dataset, scales
from elastic_ps.core.objective import Objective, ways
from elastic_ps.core.progress import Distribution
from elastic_ps.core.stages import CourseEvent
from elastic_ps.errors import InvalidJob
from elastic_ps.server.job.commit import CommitCoordinator
from elastic_ps.server.job.state import JobState

logger = logging.getLogger(__name__)

PAUSE = timedelta(seconds=10)
"""The time between two attempts of a term to write a change to disk. Training waits during each."""


class Reconfiguration:
    """Carries out wanted changes. One thread calls `look`.

    Without checkpoints, only the times of checkpoints can change.

    Args:
        desired: reads the wanted fields; None if nobody can change the job.

    Attributes:
        asked: the number of the newest change; 0 for none.
        problem: why the newest change has no effect, in words; "" if it has, or is about to have one.
    """

    def __init__(self, commit: CommitCoordinator, desired: DesiredConfiguration | None) -> None:
        self.asked, self.problem = 0, ""
        self._job, self._commit, self._checkpoints = commit.job, commit, commit.checkpoints
        self._desired = desired
        self._objective = Objective()
        self._wanted: MutableFields | None = None
        self._not_before = 0, 0.0  # a term, and until when it makes no other attempt

    def look(self) -> None:
        """Carry out a change if one is wanted and possible now. Blocks while it is written."""
        job = self._job
        newest, unusable = self._read()
        with job.lock:
            state, before = job.state, job.mutable
            if newest is not None:
                self.asked, self.problem, self._wanted = newest.generation, "", newest.after(before)
                self._objective = Objective()
            if unusable:
                self._refuse(unusable)
                return
            self._wanted = wanted = self._wanted or self._moved(state, before)
            if wanted is None:
                return
            if not wanted.replaces(before):
                self.problem, self._wanted = "", None
                return
            refusal = before.refusal(wanted) or self._unreachable(wanted, state)
            if refusal:
                self._refuse(refusal)
                return
            if not wanted.needs_term(before):
                job.tune(wanted.model_copy(update={"since": before.since}))
                self._checkpoints.tune(wanted.checkpoint)
                self.problem, self._wanted = "", None
                return
            if state.finished or not self._may_begin(state):
                return
            job.note_course(CourseEvent.PAUSE)
            state.mutable = wanted.model_copy(update={"since": state.version})
        kept = self._checkpoints.write(amend=True)
        with job.lock:
            job.note_course(CourseEvent.RESUME)
            if job.state is not state:
                return  # the job has gone back meanwhile, and may have made versions since
            if kept:
                job.note_course(CourseEvent.ROLL_BACK)
            else:
                state.mutable = before
                self._not_before = state.term, job.clock() + PAUSE.total_seconds()
                self.problem = self._checkpoints.failure or "the current version could not be written to disk"
        if kept:
            for what, (now, then) in wanted.news(before).items():
                text = "from version %d on, %s is %s; before, it was %s"
                logger.info(text, state.version, what, now, then)
            self._commit.drive()

    def _read(self) -> tuple[MutableFields | None, str]:
        """The newly wanted fields, if any, and why they cannot be used. Imports what they name."""
        newest = None
        try:
            newest = self._desired.newest() if self._desired is not None else None
            if newest is not None:
                scales.check(newest.consistency.staleness_scale)
                Plan(newest.compression)
        except InvalidJob as error:
            return newest, str(error)
        return newest, ""

    def _moved(self, state: JobState, before: MutableFields) -> MutableFields | None:
        """The fields that the job's objective needs, if they differ from the present. The lock is held."""
        most = before.consistency.max_staleness_p99
        if most is None or state.results.recent.count < self._job.limits.window:
            return None
        p99, state.results.recent = state.results.recent.percentile(99), Distribution()
        known = ways(before.desired)
        at = known.index(before.consistency) if before.consistency in known else len(known) - 1
        step = self._objective.decide(p99, most)
        if not (step and 0 <= at + step < len(known)):
            return None
        if step > 0:
            self._objective.tried()
        text = "99 of 100 of the last %d steps were at most %d versions stale; maxStalenessP99 is %d"
        logger.info(text, self._job.limits.window, p99, most)
        return before.moved_to(known[at + step])

    def _may_begin(self, state: JobState) -> bool:
        """Whether a new term can begin from the present version. The lock is held."""
        job, rounds = self._job, state.rounds
        busy = job.closing or job.rolling_back or rounds.committing or rounds.decided
        term, until = self._not_before
        return state.initialised and not busy and (state.term != term or job.clock() >= until)

    def _unreachable(self, wanted: MutableFields, state: JobState) -> str:
        """Why no version could be made with the wanted fields; "" if no cause is known. The lock is held."""
        what = " and ".join(wanted.news(self._job.mutable))
        if not self._checkpoints.writes and what:
            return f"{what} cannot change in a job that writes no checkpoints"
        if self._job.spec.all_reduce and what:
            return (
                f"{what} cannot change in a job with strategy all-reduce, which is always sync, and where "
                "gradients travel as torch.distributed sends them"
            )
        if "compression" in wanted.news(self._job.mutable):
            sent = Plan(wanted.compression).momentum
            if problem := second_momentum(state.settings.groups, sent):
                return f"compression cannot change like this: {problem}"
        if state.ledger is None or not state.batch:
            return ""
        return dataset.too_small(state.ledger, state.batch, wanted.consistency, begins=True)

    def _refuse(self, reason: str) -> None:
        if reason != self.problem:
            logger.warning("the job is not changed: %s", reason)
        self.problem, self._wanted = reason, None


LIMIT = 1 << 20
"""Bytes of the file, at most."""


class DesiredConfiguration:
    """Reads the file of wanted fields when it was replaced. Not thread-safe.

    Args:
        path: the file; see `env.ProcessEnvironment.tuning`.
        run: the present run of the job.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._run = path, run
        self._text = ""

    def newest(self) -> MutableFields | None:
        """The wanted fields; None if they are those of the last call, or there is no file.

        Raises:
            InvalidJob: the file cannot be read, or is not valid. It is raised once for the same content.
        """
        try:
            with self._path.open(encoding="utf-8") as file:
                text = file.read(LIMIT)
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidJob(f"the requested change of the job cannot be read: {error}") from error
        if text == self._text or not text.strip():
            return None
        self._text = text
        return read_mutable(text, source=str(self._path)).model_copy(update={"run": self._run})
