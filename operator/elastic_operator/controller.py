"""One pass over a job: look, ask its server, decide, carry out, report. Also the full listings.

A pass first carries out actions, then posts Events and writes the status. One that is interrupted is
repeated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from elastic_operator import names
from elastic_operator.api import ApiError
from elastic_operator.cluster import Cluster
from elastic_operator.desired import foreign_claim, untried
from elastic_operator.documents import read_status
from elastic_operator.listings import Listings
from elastic_operator.metrics import Metrics
from elastic_operator.plan import Outcome
from elastic_operator.poller import Server, server_of
from elastic_operator.queue import Key
from elastic_operator.reconcile import reconcile
from elastic_operator.renewal import begins_again
from elastic_operator.settings import Settings
from elastic_operator.status import holds
from elastic_operator.store import Snapshot, Store, is_over
from elastic_ps.api.status import ServerStatus, TrainingJobStatus
from elastic_ps.errors import ConnectionLost

logger = logging.getLogger(__name__)

_FIRST_CONFLICT, _LAST_CONFLICT = timedelta(milliseconds=100), timedelta(seconds=30)


class Controller:
    """The passes, without the framework that schedules them. Thread-safe; all methods but `look` block."""

    def __init__(
        self, cluster: Cluster, store: Store, listings: Listings, settings: Settings, metrics: Metrics
    ) -> None:
        self._cluster, self._store, self._listings = cluster, store, listings
        self._settings = settings
        self._metrics = metrics
        self._conflicts: dict[Key, int] = {}
        self.served = False
        """Whether the API server has answered a listing. Before that there is nothing to watch."""
        self.definition_gone = False
        """Whether the API server has forgotten TrainingJobs that it has served."""

    def look(self, key: Key) -> tuple[Snapshot | None, Server | None]:
        """The known state of the job, and the parameter server to ask, if there is one."""
        snapshot = self._store.snapshot(key)
        if snapshot is None or is_over(snapshot.job):
            return snapshot, None
        return snapshot, server_of(key[1], snapshot.observed)

    def run_pass(
        self,
        key: Key,
        snapshot: Snapshot,
        word: ServerStatus | None,
        unanswered: timedelta | None = None,
    ) -> timedelta | None:
        """One pass over the job; returns when to look again.

        `word`: its server's answer after the snapshot. `unanswered`: see `plan.Observed`.

        Raises:
            ApiError, ConnectionLost: try again later.
        """
        with self._metrics.duration.time():
            try:
                again = self._pass(key, snapshot, word, unanswered)
            except ApiError as error:
                self._metrics.reconciles.labels("error").inc()
                if error.status != 409:
                    raise
                # The job has changed meanwhile. Somebody may be writing to it all the time.
                count = self._conflicts[key] = self._conflicts.get(key, 0) + 1
                doublings = min(count - 1, 16)
                return min(_LAST_CONFLICT, _FIRST_CONFLICT * (1 << doublings))
            except ConnectionLost:
                self._metrics.reconciles.labels("error").inc()
                raise
        self._conflicts.pop(key, None)
        self._metrics.reconciles.labels("ok").inc()
        return again

    def _pass(
        self, key: Key, snapshot: Snapshot, word: ServerStatus | None, unanswered: timedelta | None
    ) -> timedelta | None:
        job, observed = snapshot.job, replace(snapshot.observed, server=word, unanswered=unanswered)
        now, options = datetime.now(UTC), self._settings.options
        if not is_over(job) or begins_again(job, read_status(job), now):
            pods = untried(job, observed, options.policy, secured=options.secured)
            claim = foreign_claim(job)
            lent = claim is not None and self._store.is_lent(key[0], claim, job["metadata"]["uid"])
            observed = replace(observed, rejected=self._cluster.check(job, pods), lent=lent)
        plan = reconcile(job, observed, now, options)
        outcome = self._cluster.execute(job, plan.actions)
        if outcome != Outcome():
            plan = reconcile(job, observed.with_outcome(outcome), now, options)
        if plan.status is None:
            return plan.requeue
        for note in plan.notes:
            self._cluster.post(job, note)
        if self._cluster.write_status(job, plan.status):
            self._report(key, read_status(job), plan.status)
        return plan.requeue

    def _report(self, key: Key, old: TrainingJobStatus, new: TrainingJobStatus) -> None:
        if old.phase != new.phase or not old.conditions:
            reasons = "; ".join(f"{c.type}: {c.message}" for c in new.conditions if c.status == "True")
            logger.info("%s/%s: %s -> %s (%s)", *key, old.phase, new.phase, reasons)
        if old.start_time is None and new.start_time is not None:
            self._metrics.jobs.labels("started").inc()
        if holds(new, "Succeeded") and not holds(old, "Succeeded"):
            self._metrics.jobs.labels("succeeded").inc()
        if holds(new, "Failed") and not holds(old, "Failed"):
            self._metrics.jobs.labels("failed").inc()
        self._metrics.restarts.inc(max(0, new.worker.restarts - old.worker.restarts))

    def list_all(self) -> None:
        """List everything, and compare the watches with it.

        Raises:
            ApiError, ConnectionLost: the API server cannot be asked.
        """
        for resource in self._listings.monitors:
            try:
                self._listings.list_all(resource)
            except ApiError as error:
                if resource == names.PLURAL:
                    self.definition_gone = self.served and error.status == 404
                raise
        self.served, self.definition_gone = True, False

    def wait_until_served(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Block until the API server answers and serves TrainingJobs."""
        delay = 1.0
        while True:
            try:
                self.list_all()
                self._listings.find()
                return
            except (ApiError, ConnectionLost) as error:
                logger.warning("cannot list TrainingJobs yet; trying again in %g s: %s", delay, error)
            sleep(delay)
            delay = min(15.0, delay * 1.5)

    def watch_ages(self) -> dict[str, float]:
        """The time by which each watch lags behind the listings, in seconds."""
        ages = self._listings.ages()
        for resource, age in ages.items():
            self._metrics.watch_age.labels(resource).set(age)
        return ages
