"""A few lines that behave like a cluster, for the operator's pure parts: state in, plan applied, state out.

It stands in for no API server in a test of the API: `api_server` does that, and in `tests/e2e` a real one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from elastic_operator import names, pods
from elastic_operator.cluster import difference
from elastic_operator.documents import over
from elastic_operator.plan import (
    Action,
    Certify,
    Create,
    DeleteJob,
    DeletePod,
    Observed,
    Options,
    Plan,
    Remember,
    ShareClaim,
    TellPod,
    stamp,
)
from elastic_operator.reconcile import reconcile
from elastic_operator.status import dump_status
from elastic_ps.api.status import MemberStatus, Progress, ServerStatus

START = datetime(2026, 1, 1, tzinfo=UTC)


def job_document(name: str = "digits", **spec: Any) -> dict[str, Any]:
    """A job as the API server holds it."""
    base = {"entrypoint": "examples.digits.train:main", "image": "localhost/elastic-ps:test"}
    return {
        "apiVersion": "elastic-ps.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "generation": 1},
        "spec": {**base, **spec},
    }


class Simulation:
    """One job and what belongs to it."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job: dict[str, Any] | None = copy.deepcopy(dict(job))
        self.pods: dict[str, dict[str, Any]] = {}
        self.services: set[str] = set()
        self.valid_spec = ""
        self.claims: set[str] = set()
        self.policies: set[str] = set()
        self.server: ServerStatus | None = None
        self.unanswered: timedelta | None = None
        self.now = START
        self.options = Options()
        self.made = 0
        self.writes = 0
        self.notes: dict[str, str] = {}
        self.secured = False
        self.certified: list[Certify] = []

    @property
    def status(self) -> dict[str, Any]:
        assert self.job is not None
        found: dict[str, Any] = self.job.get("status") or {}
        return found

    def edit(self, **changes: Any) -> None:
        """Change fields of the spec, as a person does."""
        assert self.job is not None
        self.job["spec"] = {**self.job["spec"], **changes}
        self.job["metadata"]["generation"] += 1

    def restart(self, when: datetime) -> None:
        """Ask for a restart, as `kubectl annotate` does."""
        assert self.job is not None
        self.job["metadata"].setdefault("annotations", {})[names.RESTART_ANNOTATION] = stamp(when)

    def scale(self, replicas: int) -> None:
        assert self.job is not None
        self.edit(worker={**(self.job["spec"].get("worker") or {}), "replicas": replicas})

    def observed(self) -> Observed:
        found = [pods.read(pod) for pod in self.pods.values()]
        return Observed(
            pods=tuple(pod for pod in found if pod is not None),
            service=bool(self.services),
            valid_spec=self.valid_spec if self.services else "",
            secured=self.secured,
            claims=frozenset(self.claims),
            policies=frozenset(self.policies),
            server=self.server,
            unanswered=self.unanswered,
        )

    def plan(self) -> Plan:
        assert self.job is not None
        return reconcile(self.job, self.observed(), self.now, self.options)

    def step(self, writes: int | None = None) -> Plan:
        """One pass of the operator, which is killed after so many writes (None: it is not)."""
        plan = self.plan()
        for action in plan.actions[:writes]:
            self.apply(action)
        if (
            plan.status is not None
            and self.job is not None
            and (writes is None or writes > len(plan.actions))
        ):
            for note in plan.notes:
                self.notes[note.key] = note.reason
            new = over(self.status, dump_status(plan.status))
            if difference(self.status, new):
                self.job["status"] = new
                self.writes += 1
        return plan

    def apply(self, action: Action) -> None:
        self.writes += 1
        if isinstance(action, Certify):
            self.certified.append(action)
        elif isinstance(action, DeleteJob):
            self.job, self.pods, self.services, self.claims = None, {}, set(), set()
        elif isinstance(action, DeletePod):
            self._delete(action)
        elif isinstance(action, TellPod):
            self.pods[action.name]["metadata"]["annotations"].update(action.annotations)
        elif isinstance(action, Remember):
            self.valid_spec = action.spec
        elif isinstance(action, ShareClaim):
            raise NotImplementedError("no claim is lent here")
        elif action.kind == "Service":
            metadata = action.manifest["metadata"]
            self.secured = self.secured or names.TLS_ANNOTATION in metadata["annotations"]
            self.valid_spec = metadata["annotations"].get(names.VALID_ANNOTATION) or self.valid_spec
            self.services.add(action.name)
        elif action.kind == "NetworkPolicy":
            self.policies.add(action.name)
        elif action.kind == "PersistentVolumeClaim":
            self.claims.add(action.name)
        elif action.name not in self.pods:
            self.made += 1
            pod = copy.deepcopy(dict(action.manifest))
            pod["metadata"]["uid"] = f"pod-{self.made}"
            pod["metadata"]["creationTimestamp"] = stamp(self.now)
            pod["status"] = {"phase": "Pending"}
            self.pods[action.name] = json.loads(json.dumps(pod))

    def _delete(self, action: DeletePod) -> None:
        metadata = self.pods.get(action.name, {}).get("metadata", {})
        if metadata.get("uid") != action.uid:
            return
        if not metadata.get("finalizers"):
            del self.pods[action.name]
            return
        metadata["deletionTimestamp"] = stamp(self.now)
        metadata["deletionGracePeriodSeconds"] = 0 if action.force else 60

    def settle(self, limit: int = 60) -> None:
        """Passes, with pods that start at once, until a pass has nothing to do."""
        for _ in range(limit):
            before = self.writes
            plan = self.step()
            if self.job is None:
                return
            started = self.start_pods()
            over = self.status.get("phase") in ("Succeeded", "Failed")
            waiting = not over and any(pod.over for pod in self.observed().pods)
            if before == self.writes and not started and not plan.actions and not waiting:
                return
            self.now += max(timedelta(seconds=61), plan.requeue or timedelta(0))
        raise AssertionError(f"the operator does not come to rest: {plan.actions}")

    def start_pods(self) -> bool:
        pending = [pod for pod in self.pods.values() if pod["status"]["phase"] == "Pending"]
        for pod in pending:
            if pod["status"].get("held"):
                continue
            running = {"running": {"startedAt": stamp(self.now)}}
            pod["status"] = {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{"name": pod["spec"]["containers"][0]["name"], "state": running}],
            }
        return bool(pending)

    def end(self, name: str, code: int, *, reason: str = "Error", message: str = "") -> bool:
        """The pod's container ends; whether there was one that ran."""
        pod = self.pods.get(name)
        if pod is None or pod["status"]["phase"] != "Running":
            return False
        end = {
            "exitCode": code,
            "reason": reason,
            "message": message,
            "startedAt": stamp(self.now - timedelta(minutes=5)),
            "finishedAt": stamp(self.now),
        }
        container = {"name": pod["spec"]["containers"][0]["name"], "state": {"terminated": end}}
        pod["status"] = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [container]}
        return True

    def workers(self) -> list[str]:
        return sorted(name for name in self.pods if "-worker-" in name)

    def condition(self, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = next((c for c in self.status["conditions"] if c["type"] == kind), {})
        return found


def running(**spec: Any) -> Simulation:
    """A job of this spec that runs."""
    simulation = Simulation(job_document(**spec))
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    return simulation


def named(plan: Plan) -> list[str]:
    """What the plan's actions are about."""
    return [action.name for action in plan.actions if isinstance(action, Create | DeletePod)]


def finish(simulation: Simulation, *, chief: int | None = None) -> None:
    """The parameter server says that every record is in the model, and who has to save."""
    progress = Progress(finished=True, records_expected=10, records_applied=10, percent=100, chief=chief)
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=progress)


def tell(simulation: Simulation, *members: MemberStatus) -> None:
    """The parameter server says that these were members."""
    simulation.server = ServerStatus(
        job="digits", shard=0, shards=1, term=1, ready=True, members=list(members)
    )
