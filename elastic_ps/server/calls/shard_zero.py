"""Shard 0, which leads the job: its parts, and the ticker thread."""

from __future__ import annotations

import threading
import time

from elastic_ps.api.mutable import describe
from elastic_ps.api.status import ServerStatus, TuningStatus
from elastic_ps.checkpoint.manifest import Manifest
from elastic_ps.core.stages import CourseEvent, OrderEvent, StandbyState
from elastic_ps.process.retrying import Patience
from elastic_ps.server.job import status
from elastic_ps.server.job.commit import CommitCoordinator
from elastic_ps.server.job.reconfiguration import DesiredConfiguration, Reconfiguration


class ShardZero:
    """Shard 0's part of a job, from `start` to `close`.

    Args:
        name: the job's name.
        commit: gives the shards their orders. `close` closes it, and its `checkpoints`.
        desired: reads the wanted mutable fields; None if nobody can change the job.

    Attributes:
        evaluation_queue: None if the job has no evaluator.
        history: records commits, joins and skipped records.
    """

    def __init__(
        self,
        name: str,
        commit: CommitCoordinator,
        *,
        desired: DesiredConfiguration | None = None,
    ) -> None:
        self._name, self.commit, self.job = name, commit, commit.job
        self.checkpoints, self.history = commit.checkpoints, commit.history
        self.evaluation_queue = self.checkpoints.evaluation_queue
        self._reconfiguration = Reconfiguration(commit, desired)
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)

    def start(self, found: Manifest | None, patience: Patience | None = None) -> None:
        """Begin, from the checkpoint `found` if there is one, or from later rounds that the standbys hold.

        Blocks while the shards load the checkpoint, and while the storage is unavailable. If it raises,
        everything is closed.
        """
        try:
            self.commit.start(found, patience or Patience())
        except BaseException:
            self.commit.abandon()
            self.checkpoints.close()
            raise
        self._ticker.start()

    def close(self, *, keep: bool) -> None:
        """Stop committing and end the threads. With `keep`, first write a last checkpoint. Blocks."""
        with self.job.lock:
            self.job.note_course(CourseEvent.CLOSE)
            self.job.ticking.notify_all()
        self._ticker.join()
        if keep and self.checkpoints.writes and self.commit.finish_round():
            self.checkpoints.write()
        self.commit.close()
        self.checkpoints.close()

    def _tick(self) -> None:
        """At each tick, and at the end of a grace period: drop silent members, and repeat failed orders.

        It also asks for parts of checkpoints, and looks whether another parameter server has taken over: a
        worker must not wait for records here then.
        """
        job = self.job
        while True:
            self.checkpoints.leads()
            self.checkpoints.give_up_late(job.clock())
            with job.lock:
                if not job.closing:
                    job.ticking.wait(job.until_next_look(job.limits.tick))
                if job.closing:
                    return
                if job.state.rounds.committing:
                    job.grace_until = None
                else:
                    job.drop_silent_and_hung(self.commit.queued)
                    job.hasten()
                if self.commit.asks_shards:
                    job.note_order(OrderEvent.CHANGE)
            self.commit.drive()
            self.checkpoints.keep_what_must_be(begun=True)
            self.commit.drive()  # the round may have waited for version 0
            self.checkpoints.order_late()
            self._reconfiguration.look()

    def status(self) -> ServerStatus:
        """The present progress and members."""
        job, checkpoints = self.job, self.checkpoints
        with job.lock:
            state, now = job.state, job.clock()
            durable = checkpoints.durable
            found = {
                "diverged": status.divergence(state, job.spec.compression),
                "evaluation": self.evaluation_queue.status() if self.evaluation_queue is not None else None,
            }
            progress = status.progress(state, now, durable).model_copy(update=found)
            return ServerStatus(
                job=self._name,
                shard=0,
                shards=len(self.commit.shards),
                term=state.term,
                ready=state.initialised,
                progress=progress,
                durable_age_seconds=None if durable is None else max(0.0, time.time() - durable[1]),
                problem=self.commit.problem or checkpoints.problem(state.version, now),
                checkpoint_pause_seconds=checkpoints.paused.total_seconds(),
                tuning=TuningStatus(
                    generation=job.mutable.generation,
                    consistency=describe(job.mutable.consistency),
                    compression=describe(job.spec.compression),
                    since=job.mutable.since,
                    asked=self._reconfiguration.asked,
                    problem=self._reconfiguration.problem,
                ),
                bucket_bytes=state.bucket_bytes,
                traffic=job.traffic,
                tables=self.commit.tables,
                standbys=[standing is StandbyState.WHOLE for standing in self.commit.standings],
                members=[status.member_status(state, member, now) for member in state.members.all()],
            )

    def last_version(self) -> int | None:
        """The newest version on disk if training is over and no other version follows; else None."""
        with self.job.lock:
            over = self.job.state.finished and self.checkpoints.is_kept()
            return self.checkpoints.durable_version if over else None

    def loss(self) -> list[tuple[int, float]]:
        """The loss curve: (version, sample-weighted mean of what the scripts reported)."""
        with self.job.lock:
            return list(self.job.state.results.loss.points)
