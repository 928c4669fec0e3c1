"""What the operator reads from and writes to an API server, which here runs on localhost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elastic_operator import names
from elastic_operator.api import EXIT_TEST, Api, ApiError
from elastic_operator.authority import Authority
from elastic_operator.cluster import Cluster, difference
from elastic_operator.controller import Controller
from elastic_operator.documents import read_status
from elastic_operator.handlers import Passes
from elastic_operator.listings import Listings
from elastic_operator.metrics import Metrics
from elastic_operator.plan import Create, DeleteJob, DeletePod, Note, Observed, Options, Outcome
from elastic_operator.poller import ask
from elastic_operator.queue import Key
from elastic_operator.session import connection
from elastic_operator.settings import Settings
from elastic_operator.store import Store
from elastic_ps.api.status import Progress, ServerStatus, TrainingJobStatus
from elastic_ps.contract.env import DEFAULT_HTTP_PORT
from elastic_ps.errors import ConnectionLost, UsageError
from elastic_ps.server.job.status import StatusServer
from tests.testing.api_server import JOBS, ApiServer, Refusal, Request
from tests.testing.polling import LIMIT, eventually
from tests.testing.simulation import job_document
from tests.testing.talking import Server, Talk, dripping, saying

KEY: Key = ("default", "digits")
SERVER_ADDRESS = f"127.91.{os.getpid() // 250 % 250}.{os.getpid() % 250 + 1}"
"""Of the parameter server's pod; the port is a fixed one, so each run of the tests needs its own address."""


class Operator:
    """The operator without the framework, beside its API server."""

    def __init__(self, server: ApiServer, directory: Path, **settings: Any) -> None:
        self.server = server
        self.metrics = Metrics()
        settings.setdefault("status_timeout", timedelta(seconds=LIMIT))
        self.settings = Settings(kubeconfig=server.kubeconfig(directory), **settings)
        self.api = Api(self.settings, self.metrics)
        self.store = Store()
        secret, given = self.settings.tls_secret, self.settings.tls_secret_given
        self.now = 0.0
        authority = Authority(self.api, secret, given=given) if secret else None
        self.cluster = Cluster(self.api, self.store, authority, clock=lambda: self.now)
        listings = Listings(self.api, self.store, self.settings)
        self.monitors = listings.monitors
        self.controller = Controller(self.cluster, self.store, listings, self.settings, self.metrics)

    def count(self, name: str, **labels: str) -> float:
        """The value of one of the operator's counters."""
        return self.metrics.registry.get_sample_value(f"elastic_ps_operator_{name}", labels) or 0.0

    def turns(self, number: int = 1) -> timedelta | None:
        """So many passes over the job, each as it is by then; what the last one says."""
        again = None
        for _ in range(number):
            self.controller.list_all()
            again = self.turn()
        return again

    def turn(self) -> timedelta | None:
        """A pass over the job as it is known."""
        snapshot, address = self.controller.look(KEY)
        if snapshot is None:
            return None
        word = None
        if address is not None:
            limit = self.settings.status_timeout.total_seconds()
            word = asyncio.run(ask(address.host, DEFAULT_HTTP_PORT, address.job, timeout=limit))
        return self.controller.run_pass(KEY, snapshot, word)

    @property
    def status(self) -> TrainingJobStatus:
        return read_status(self.server.get(JOBS, "digits"))

    def messages(self) -> list[str]:
        """Those of the Events."""
        return [self.server.get("events", name)["message"] for name in self.server.names("events")]


@pytest.fixture
def server() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.close()


@pytest.fixture
def operator(server: ApiServer, tmp_path: Path) -> Operator:
    return Operator(server, tmp_path)


@pytest.fixture
def told() -> Iterator[Callable[[ServerStatus], None]]:
    """Makes the parameter server of the pod at `SERVER_ADDRESS` say this; it is the real HTTP server."""
    serving: list[StatusServer] = []

    def tell(status: ServerStatus) -> None:
        if serving:
            serving[0].show(lambda: status, list)
        else:
            serving.append(StatusServer(f"{SERVER_ADDRESS}:{DEFAULT_HTTP_PORT}", lambda: status, list))

    yield tell
    for each in serving:
        each.close()


def refusing(method: str, resource: str, refusal: Refusal) -> Callable[[Request], None]:
    """Refuses each request with this method of this resource."""

    def refuse(request: Request) -> None:
        if request.method == method and request.path.split("/")[-1] == resource:
            raise refusal

    return refuse


def test_a_job_gets_what_it_needs_and_a_status_and_events(server: ApiServer, operator: Operator) -> None:
    server.add_job(worker={"replicas": 2}, parameterServer={"checkpoint": {"volumeClaim": {}}})
    assert operator.turns() is not None
    assert server.names("pods") == ["digits-ps-0", "digits-worker-0", "digits-worker-1"]
    assert (server.names("services"), server.names("persistentvolumeclaims")) == (
        ["digits-servers"],
        ["digits-ps-0"],
    )
    assert operator.status.phase == "Pending"
    assert all(made.query == {"fieldValidation": "Strict"} for made in server.asked("POST", "pods"))
    (made,) = operator.messages()
    assert made.startswith(
        "Created service digits-servers: it gives the job's servers their addresses; persistentvolumeclaim "
    )
    assert made.endswith("; pod digits-worker-0, pod digits-worker-1: the job asks for 2 workers")
    operator.turns()
    before = len(server.objects), server.get(JOBS, "digits")["metadata"]["resourceVersion"]
    operator.turns(2)
    assert (len(server.objects), server.get(JOBS, "digits")["metadata"]["resourceVersion"]) == before


def test_a_pass_reads_nothing_and_knows_what_the_one_before_has_written(
    server: ApiServer, operator: Operator
) -> None:
    """No watch has told anything yet."""
    server.add_job(worker={"replicas": 2})
    operator.controller.list_all()
    before = len(server.requests)
    operator.turn()
    first = server.requests[before:]
    assert {request.method for request in first} == {"POST", "PATCH"}
    operator.turn()
    second = server.requests[before + len(first) :]
    assert [request.method for request in second] == ["PATCH"], "the pods are counted, and nothing is made"
    operator.turn()
    assert len(server.requests) == before + len(first) + len(second), "nothing has changed"


def test_a_pod_that_has_changed_since_is_not_deleted(server: ApiServer, operator: Operator) -> None:
    """The operator knows of one that cannot run, and of an edit that would mend it; but it runs by now."""
    job = server.add_job()
    operator.turns(2)
    mended = {**job, "spec": {**job["spec"], "image": "localhost/elastic-ps:mended"}}
    mended["metadata"] = {**server.get(JOBS, "digits")["metadata"], "generation": 2}
    server.put(JOBS, {**mended, "status": server.get(JOBS, "digits")["status"]})
    stuck = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}
    server.put("pods", {**server.get("pods", "digits-worker-0"), "status": stuck})
    server.put("pods", {**server.get("pods", "digits-ps-0"), "status": stuck})
    operator.controller.list_all()
    uids = {name: server.get("pods", name)["metadata"]["uid"] for name in server.names("pods")}
    for name in uids:
        server.start(name)
    assert operator.turn() == timedelta(milliseconds=100), "it looks again"
    assert {name: server.get("pods", name)["metadata"]["uid"] for name in server.names("pods")} == uids
    assert server.asked("DELETE", "pods")


def test_objects_of_a_job_of_the_same_name_are_neither_counted_nor_taken(
    server: ApiServer, operator: Operator
) -> None:
    """The job was deleted and created again, and what the old one had is not collected yet."""
    old = server.add_job()
    operator.turns()
    server.remove(JOBS, "digits")
    old["metadata"]["uid"] = "uid-of-the-next"
    server.put(JOBS, {**old, "status": {}})
    server.get("pods", "digits-ps-0")["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    operator.controller.list_all()
    snapshot, _ = operator.controller.look(KEY)
    assert snapshot is not None
    assert snapshot.observed == Observed()
    operator.turns()
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert (degraded.status, degraded.reason) == ("True", "NameTaken")
    assert "services/digits-servers exists already and does not belong to this job" in degraded.message
    assert "pods/digits-ps-0 belongs to an earlier job, and is still being deleted" in degraded.message


def test_the_last_valid_spec_stands_on_the_service_and_is_written_when_it_changes(
    server: ApiServer, operator: Operator
) -> None:
    job = server.add_job()
    operator.turns()

    def written() -> dict[str, Any]:
        annotations = server.get("services", "digits-servers")["metadata"]["annotations"]
        found: dict[str, Any] = json.loads(annotations[names.VALID_ANNOTATION])
        return found

    assert written() == job["spec"]
    assert not server.asked("PATCH", "services"), "it was created with that"
    found = server.get(JOBS, "digits")
    found["metadata"]["generation"] += 1
    found["spec"] = {**found["spec"], "worker": {"replicas": 3}}
    server.put(JOBS, found)
    operator.controller.list_all()
    operator.turns()
    assert written()["worker"] == {"replicas": 3}
    assert len(server.asked("PATCH", "services")) == 1


def edited(server: ApiServer, field: str, **annotations: str) -> None:
    """A person changes the templates, and may ask for a restart."""
    found = server.get(JOBS, "digits")
    found["metadata"]["generation"] += 1
    found["metadata"]["annotations"] = annotations
    template = {"template": {"spec": {field: {"a": "b"}}}}
    found["spec"] = {**found["spec"], "parameterServer": template, "worker": {"replicas": 2, **template}}
    server.put(JOBS, found)


def misspelt(refusal: Refusal) -> Callable[[Request], None]:
    """Refuses each pod with a misspelt field."""

    def refuse(request: Request) -> None:
        if request.path.endswith("/pods") and "nodeSelecter" in json.dumps(request.body):
            raise refusal

    return refuse


@pytest.mark.parametrize(("code", "reason"), [(400, "BadRequest"), (422, "Invalid")])
def test_an_edit_that_the_api_server_refuses_costs_no_pod(
    server: ApiServer, operator: Operator, code: int, reason: str
) -> None:
    server.add_job(worker={"replicas": 2})
    operator.turns()
    server.put("pods", {**server.get("pods", "digits-worker-0"), "status": {"phase": "Pending"}})
    server.refuse = misspelt(Refusal(code, reason, 'strict decoding error: unknown field "nodeSelecter"'))
    uids = {name: server.get("pods", name)["metadata"]["uid"] for name in server.names("pods")}
    edited(server, "nodeSelecter")
    operator.turns(3)
    assert {name: server.get("pods", name)["metadata"]["uid"] for name in server.names("pods")} == uids
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert (degraded.status, degraded.reason) == ("True", "InvalidSpec")
    assert degraded.message.startswith(
        "the job keeps its last valid spec until you correct this: spec.parameterServer.template does not "
        "make a valid pod digits-ps-0: strict decoding error"
    )
    server.remove("pods", "digits-worker-1")
    first = server.get("pods", "digits-ps-0")
    first["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"
    server.put("pods", first)
    edited(server, "nodeSelecter", **{names.RESTART_ANNOTATION: "2020-01-02T00:00:00Z"})
    operator.turns(2)
    assert server.names("pods") == [*uids], "they are made as the last valid spec says"
    assert server.get("pods", "digits-ps-0")["metadata"]["uid"] != uids["digits-ps-0"]
    edited(server, "nodeSelector")
    operator.turns(2)
    assert server.get("pods", "digits-worker-0")["spec"]["nodeSelector"] == {"a": "b"}
    (recorded,) = server.asked("PATCH", "services")
    assert "nodeSelector" in recorded.body["metadata"]["annotations"][names.VALID_ANNOTATION]


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(400, "", 'admission webhook "validate.kyverno.svc-fail" denied the request: image-tags'),
        Refusal(503, "", 'admission webhook "x" denied the request: another status'),
        Refusal(422, "Invalid", "pods \"x\" is forbidden: ValidatingAdmissionPolicy 'y' denied request: z"),
        Refusal(403, "Forbidden", 'pods "x" is forbidden: violates PodSecurity "restricted:latest"'),
        Refusal(403, "Forbidden", 'pods "x" is forbidden: failed quota: must specify limits.cpu'),
    ],
)
def test_an_edit_whose_pods_a_policy_denies_costs_no_pod(
    server: ApiServer, operator: Operator, refusal: Refusal
) -> None:
    server.add_job(worker={"replicas": 2})
    operator.turns()
    server.put("pods", {**server.get("pods", "digits-worker-0"), "status": {"phase": "Pending"}})
    server.refuse = misspelt(refusal)
    edited(server, "nodeSelecter")
    operator.turns(3)
    assert server.names("pods") == ["digits-ps-0", "digits-worker-0", "digits-worker-1"]
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert (degraded.status, degraded.reason) == ("True", "InvalidSpec")
    assert degraded.message == (
        "the job keeps its last valid spec until you correct this: the cluster denies the pod digits-ps-0 "
        "with the new image or template of spec.parameterServer (change it, or have the policy changed): "
        f"{refusal.message}"
    )
    assert not server.asked("PATCH", "services"), "the denied spec is not remembered"
    server.refuse = lambda _: None
    operator.turns()
    assert "digits-worker-0" not in server.names("pods"), "the policy was changed, so the edit is followed"


def test_a_failed_job_does_not_begin_again_with_its_old_template_where_the_new_one_is_denied(
    server: ApiServer, operator: Operator
) -> None:
    server.add_job(worker={"replicas": 2})
    operator.turns()
    job = server.get(JOBS, "digits")
    over = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "it has failed"}
    over["lastTransitionTime"] = "2020-01-01T00:00:00Z"
    ended = {"completionTime": "2020-01-01T00:00:00Z", "phase": "Failed", "conditions": [over]}
    server.put(JOBS, {**job, "status": {**job["status"], **ended}})
    pods = {name: server.get("pods", name)["metadata"]["uid"] for name in server.names("pods")}
    server.refuse = misspelt(Refusal(403, "Forbidden", 'pods "x" is forbidden: violates PodSecurity'))
    edited(server, "nodeSelecter", **{names.RESTART_ANNOTATION: "2020-01-02T00:00:00Z"})
    operator.turns(3)
    failed = next(c for c in operator.status.conditions if c.type == "Failed")
    assert (failed.status, failed.reason) == ("True", "InvalidSpec")
    assert "the cluster denies the pod digits-ps-0" in failed.message
    left = {name: server.get("pods", name)["metadata"]["uid"] for name in server.names("pods")}
    assert left.items() <= pods.items(), "none is new"
    assert not server.asked("PATCH", "services"), "the denied spec is not remembered"
    server.refuse = lambda _: None
    edited(server, "nodeSelector", **{names.RESTART_ANNOTATION: "2020-01-02T00:00:00Z"})
    operator.turns(3)
    assert server.get("pods", "digits-worker-0")["spec"]["nodeSelector"] == {"a": "b"}


@pytest.mark.parametrize(
    ("refusal", "waits"),
    [
        (Refusal(403, "Forbidden", "exceeded quota: pods=0"), False),
        (Refusal(403, "NamespaceTerminating", "it is being terminated"), False),
        (Refusal(500, "InternalError", 'failed calling webhook "x": no route to host'), False),
        (Refusal(400, "", 'admission webhook "x" does not support dry run'), False),
        (Refusal(503, "ServiceUnavailable", "etcd is away"), True),
    ],
)
def test_an_edit_is_followed_unless_its_pods_are_invalid(
    server: ApiServer, operator: Operator, refusal: Refusal, waits: bool
) -> None:
    server.add_job(worker={"replicas": 2})
    operator.turns()
    server.put("pods", {**server.get("pods", "digits-worker-0"), "status": {"phase": "Pending"}})
    server.refuse = misspelt(refusal)
    edited(server, "nodeSelecter")
    with pytest.raises(ApiError) if waits else contextlib.nullcontext():
        operator.turns()
    assert ("digits-worker-0" in server.names("pods")) is waits


def test_what_exists_already_and_is_the_jobs_is_as_good_as_created(
    server: ApiServer, operator: Operator
) -> None:
    job = server.add_job()
    operator.turns()
    pod = server.get("pods", "digits-worker-0")
    again = Create("Pod", "digits-worker-0", pod, "again")
    assert operator.cluster.execute(job, [again]) == Outcome()
    gone = {**pod, "metadata": {**pod["metadata"], "name": "digits-worker-9"}}
    server.refuse = refusing("POST", "pods", Refusal(409, "AlreadyExists"))
    again = Create("Pod", "digits-worker-9", gone, "")
    assert operator.cluster.execute(job, [again]) == Outcome(), "gone by now"


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (Refusal(403, "Forbidden", "exceeded quota: pods=0"), "QuotaExceeded"),
        (Refusal(403, "Forbidden", "no right to create pods"), "Forbidden"),
        (Refusal(422, "Invalid", "containers[0].image: required"), "InvalidSpec"),
        (Refusal(400, "BadRequest", "cannot be read"), "InvalidSpec"),
        (Refusal(400, "", 'admission webhook "x" denied the request: no label'), "Refused"),
        (Refusal(422, "Invalid", "it is forbidden: ValidatingAdmissionPolicy 'x' denied request"), "Refused"),
    ],
)
def test_what_the_api_server_refuses_for_good_is_said_in_the_status(
    server: ApiServer, operator: Operator, refusal: Refusal, reason: str
) -> None:
    server.add_job()
    server.refuse = refusing("POST", "pods", refusal)
    operator.turns()
    condition = "Failed" if reason == "InvalidSpec" else "Degraded"
    found = next(c for c in operator.status.conditions if c.type == condition)
    assert (found.status, found.reason) == ("True", reason)
    assert refusal.message in found.message
    if reason == "InvalidSpec":
        assert "spec.parameterServer.template does not make a valid pod digits-ps-0" in found.message
    assert "digits-ps-0" in found.message
    assert operator.count("api_request_errors_total", **_labels("create", "pods", refusal)) >= 1
    server.refuse = lambda _: None
    operator.turns()
    assert bool(server.names("pods")) is (condition == "Degraded"), "if the spec is not to blame"


@pytest.mark.parametrize(("resource", "waits"), [("services", True), ("persistentvolumeclaims", False)])
def test_the_spec_is_to_blame_only_for_what_it_decides_about(
    server: ApiServer, operator: Operator, resource: str, waits: bool
) -> None:
    server.add_job(parameterServer={"checkpoint": {"volumeClaim": {"storageClassName": "-"}}})
    server.refuse = refusing("POST", resource, Refusal(422, "Invalid", "it is not valid"))
    operator.turns()
    server.refuse = lambda _: None
    operator.turns()
    assert ("digits-ps-0" in server.names("pods")) is waits


def _labels(verb: str, resource: str, refusal: Refusal) -> dict[str, str]:
    return {"verb": verb, "resource": resource, "status": str(refusal.code), "reason": refusal.reason}


@pytest.mark.parametrize(
    ("method", "resource", "code", "reason"),
    [
        ("POST", "pods", 503, "ServiceUnavailable"),
        ("POST", "pods", 429, "TooManyRequests"),
        ("POST", "services", 504, "Timeout"),
        ("PATCH", "status", 500, "InternalError"),
    ],
)
def test_a_pass_that_the_api_server_is_not_well_for_is_made_again(
    server: ApiServer, operator: Operator, method: str, resource: str, code: int, reason: str
) -> None:
    server.add_job()
    server.refuse = refusing(method, resource, Refusal(code, reason, "etcd is away"))
    with pytest.raises(ApiError, match="etcd is away") as caught:
        operator.turns()
    assert (caught.value.status, caught.value.reason) == (code, reason)
    assert operator.count("reconciles_total", result="error") == 1
    server.refuse = lambda _: None
    operator.turns()
    assert operator.count("reconciles_total", result="ok") == 1
    assert "digits-worker-0" in server.names("pods")


def test_an_action_that_is_refused_keeps_neither_the_others_nor_the_status_back(
    server: ApiServer, operator: Operator
) -> None:
    server.add_job()

    def webhook(request: Request) -> None:
        if request.method == "POST" and request.body["metadata"]["name"] == "digits-ps-0":
            raise Refusal(500, "InternalError", "failed calling webhook")

    server.refuse = webhook
    assert operator.turns() == operator.settings.options.retry
    assert server.names("pods") == ["digits-worker-0"]
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert (degraded.status, degraded.reason) == ("True", "Refused")
    assert "digits-ps-0: failed calling webhook" in degraded.message
    server.refuse = lambda _: None
    operator.turns()
    assert server.names("pods") == ["digits-ps-0", "digits-worker-0"]


def test_no_pod_is_made_while_it_is_not_known_whether_it_is_protected(
    server: ApiServer, operator: Operator
) -> None:
    job = server.add_job()
    operator.turns()
    made = server.get("pods", "digits-worker-0")
    policy = {**made, "kind": "NetworkPolicy"}
    server.refuse = refusing("POST", "networkpolicies", Refusal(500, "InternalError"))
    again = Create("Pod", "another", {**made, "metadata": {**made["metadata"], "name": "another"}}, "")
    with pytest.raises(ApiError):
        operator.cluster.execute(job, [Create("NetworkPolicy", "digits", policy, ""), again])
    assert "another" not in server.names("pods")


def test_no_pod_is_made_without_a_policy_that_is_refused(server: ApiServer, operator: Operator) -> None:
    """A quota, an admission policy or an object of another owner may stand in the way of it."""
    job = server.add_job()
    operator.turns()
    made = server.get("pods", "digits-worker-0")
    policy = {**made, "kind": "NetworkPolicy"}
    server.refuse = refusing("POST", "networkpolicies", Refusal(403, "Forbidden", "exceeded quota: n=1"))
    again = Create("Pod", "another", {**made, "metadata": {**made["metadata"], "name": "another"}}, "")
    outcome = operator.cluster.execute(job, [Create("NetworkPolicy", "digits", policy, ""), again])
    assert [problem.reason for problem in outcome.refusals] == ["QuotaExceeded"]
    assert "another" not in server.names("pods")


def test_a_webhook_that_fails_for_each_pod_is_not_waited_for_a_hundred_times(
    server: ApiServer, operator: Operator
) -> None:
    server.add_job(worker={"replicas": 100})
    server.refuse = refusing("POST", "pods", Refusal(500, "InternalError", "failed calling webhook"))
    operator.turns()
    assert len(server.asked("POST", "pods")) == 3
    assert operator.status.phase == "Pending", "it is written"


@pytest.mark.parametrize("said", ["exceeded quota: pods=0", "a policy forbids it"])
def test_a_quota_that_is_used_up_is_not_tried_with_each_of_a_hundred_pods(
    server: ApiServer, operator: Operator, said: str
) -> None:
    server.add_job(worker={"replicas": 100})
    server.refuse = refusing("POST", "pods", Refusal(403, "Forbidden", said))
    operator.turns()
    assert len(server.asked("POST", "pods")) == 1 + 3, "the parameter server's, and three workers'"
    server.refuse = lambda _: None
    operator.turns()
    assert len(server.names("pods")) == 101


def test_a_job_that_changed_while_it_was_looked_at_is_looked_at_again_soon(
    server: ApiServer, operator: Operator
) -> None:
    job = server.add_job()

    def edit(request: Request) -> None:
        if request.method == "PATCH":
            server.refuse = lambda _: None
            server.put(JOBS, job)

    server.refuse = edit
    assert operator.turns() == timedelta(milliseconds=100)
    assert "status" not in server.get(JOBS, "digits")
    operator.turns()
    assert operator.status.phase == "Pending"


def test_a_job_that_changes_all_the_time_is_looked_at_less_and_less(
    server: ApiServer, operator: Operator
) -> None:
    job = server.add_job()

    def edit(request: Request) -> None:
        if request.method == "PATCH":
            server.put(JOBS, job)

    server.refuse = edit
    waited = [operator.turns() for _ in range(12)]
    assert waited[:4] == [timedelta(milliseconds=100 * 2**n) for n in range(4)]
    assert waited[-1] == timedelta(seconds=30)
    server.refuse = lambda _: None
    operator.turns()
    server.refuse = edit
    server.start("digits-ps-0")
    assert operator.turns() == timedelta(milliseconds=100), "it is forgotten once it has gone well"


def test_pods_are_deleted_by_uid_and_one_that_is_gone_is_none_to_worry_about(
    server: ApiServer, operator: Operator
) -> None:
    job = server.add_job()
    operator.turns()
    uid = server.get("pods", "digits-worker-0")["metadata"]["uid"]
    another = DeletePod("digits-worker-0", "the-one-before", "it has ended")
    assert operator.cluster.execute(job, [another]) == Outcome()
    assert "digits-worker-0" in server.names("pods")
    assert operator.cluster.execute(job, [DeletePod("digits-worker-7", uid, "it has ended")]) == Outcome()
    operator.cluster.execute(job, [DeletePod("digits-worker-0", uid, "it has ended")])
    assert "digits-worker-0" not in server.names("pods")
    assert "gracePeriodSeconds" not in server.asked("DELETE", "pods")[-1].body
    assert "Deleted pod digits-worker-0: it has ended" in operator.messages()
    events = operator.messages()
    operator.cluster.execute(job, [DeletePod("digits-worker-0", uid, "it is gone", force=True, told=True)])
    assert operator.messages() == events
    server.refuse = refusing("DELETE", "digits-ps-0", Refusal(403, "Forbidden", "a policy forbids it"))
    refused, made = DeletePod("digits-ps-0", uid, "it has ended"), server.get("pods", "digits-ps-0")
    again = {**made, "metadata": {**made["metadata"], "name": "digits-worker-0"}}
    [problem] = operator.cluster.execute(job, [refused, Create("Pod", "digits-worker-0", again, "")]).refusals
    assert (problem.reason, problem.message) == ("Forbidden", "digits-ps-0: a policy forbids it")
    assert "digits-worker-0" in server.names("pods"), "the other action is carried out"
    server.refuse = refusing("DELETE", "digits-ps-0", Refusal(503, "ServiceUnavailable"))
    with pytest.raises(ApiError):
        operator.cluster.execute(job, [DeletePod("digits-ps-0", uid, "it has ended")])


def test_a_pod_of_a_lost_node_is_struck_off_and_a_job_takes_what_it_owns_along(
    server: ApiServer, operator: Operator
) -> None:
    job = server.add_job()
    operator.turns()
    uid = server.get("pods", "digits-worker-0")["metadata"]["uid"]
    operator.cluster.execute(job, [DeletePod("digits-worker-0", uid, "lost", force=True)])
    assert server.asked("DELETE", "pods")[-1].body["gracePeriodSeconds"] == 0
    with pytest.raises(ApiError, match="the uid is another one"):
        operator.cluster.execute(job, [DeleteJob("another", "its time is over")])
    assert server.names(JOBS) == ["digits"]
    job = server.get(JOBS, "digits")
    operator.cluster.execute(job, [DeleteJob(job["metadata"]["uid"], "its time is over")])
    assert server.names(JOBS) == []
    assert server.asked("DELETE", JOBS)[-1].body["propagationPolicy"] == "Background"
    assert operator.turns() is None, "there is no job any more"


def test_a_status_is_written_only_if_it_differs(server: ApiServer, operator: Operator) -> None:
    server.add_job()
    operator.turns()
    job, status = server.get(JOBS, "digits"), operator.status
    written = len(server.asked("PATCH", JOBS))
    assert operator.cluster.write_status(job, status) is False
    assert len(server.asked("PATCH", JOBS)) == written
    assert operator.cluster.write_status(job, status.model_copy(update={"phase": "Running"})) is True
    assert operator.status.phase == "Running"


def test_many_of_a_kind_are_one_event(server: ApiServer, operator: Operator) -> None:
    server.add_job(worker={"replicas": 30})
    operator.turns()
    (workers,) = [message for message in operator.messages() if "worker" in message]
    assert workers.count("pod digits-worker-") == 20
    assert workers.endswith(" and 10 more: the job asks for 30 workers")


def test_an_event_is_made_once_and_one_that_cannot_be_made_ends_no_pass(
    server: ApiServer, operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    job = server.add_job()
    note = Note("key", "Warning", "WorkerFailed", "it exited with 1")
    operator.cluster.post(job, note)
    operator.cluster.post(job, note)
    assert server.counts()["events"] == 1
    assert not caplog.records
    server.refuse = refusing("POST", "events", Refusal(403, "Forbidden", "no right"))
    operator.turns()
    assert "no right" in caplog.text
    assert operator.status.phase == "Pending"


def test_what_the_parameter_server_says_is_in_the_status(
    server: ApiServer, operator: Operator, told: Callable[[ServerStatus], None]
) -> None:
    server.add_job()
    operator.turns()
    for name in server.names("pods"):
        server.start(name, address=SERVER_ADDRESS)
    operator.turns()
    assert operator.status.progress.version == 0, "it does not answer yet"
    progress = Progress(version=7, loss=0.25, records_applied=3, records_expected=10, percent=30)
    status = ServerStatus(job="digits", shard=0, shards=1, term=2, ready=True, progress=progress)
    told(status.model_copy(update={"job": "another"}))
    operator.turns()
    assert operator.status.progress.version == 0, "another job has its address"
    told(status)
    operator.turns()
    assert operator.status.progress == progress
    assert operator.status.parameter_server.term == 2
    assert operator.status.phase == "Running"
    summary = {"workers": "1/1", "progress": "30%", "loss": "0.25", "reason": ""}
    assert operator.status.summary.model_dump() == summary


@pytest.mark.parametrize(
    "talk",
    [
        dripping,
        saying(b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000),
        saying(b"HTTP/1.1 200 OK\r\n\r\n[1, 2]"),
        saying(b"HTTP/1.1 200 OK\r\n\r\n\xff"),
    ],
    ids=["dripping", "deep", "list", "bytes"],
)
def test_a_parameter_server_that_misbehaves_is_one_that_does_not_answer(
    server: ApiServer, tmp_path: Path, talk: Talk
) -> None:
    server.add_job()
    operator = Operator(
        server, tmp_path, status_timeout=timedelta(seconds=2.0 if talk is dripping else LIMIT)
    )
    operator.turns()
    for name in server.names("pods"):
        server.start(name, address=SERVER_ADDRESS)
    talking = Server(talk, (SERVER_ADDRESS, DEFAULT_HTTP_PORT))
    try:
        operator.turns(2)
        eventually(lambda: talking.asked == 2, "it is asked twice")
    finally:
        talking.close()
    assert operator.status.phase == "Running"


def test_the_counters_tell_how_jobs_start_and_end(
    server: ApiServer, operator: Operator, told: Callable[[ServerStatus], None]
) -> None:
    server.add_job(runPolicy={"backoffLimit": 0, "cleanPodPolicy": "None"})
    operator.turns(2)
    assert operator.count("jobs_total", event="started") == 1
    worker = server.get("pods", "digits-worker-0")
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}
    worker["status"] = {
        "phase": "Failed",
        "containerStatuses": [{"name": "worker", "state": {"terminated": ended}}],
    }
    server.put("pods", worker)
    operator.turns(3)
    assert operator.count("jobs_total", event="failed") == 1
    assert operator.count("jobs_total", event="succeeded") == 0
    assert operator.count("worker_restarts_total") == 1
    assert "digits-worker-0 exited with 1" in operator.messages()
    server.remove(JOBS, "digits")
    for name in server.names("pods"):
        server.remove("pods", name)
    again = job_document()
    again["metadata"]["uid"] = "uid-of-the-next"
    server.put(JOBS, again)
    operator.turns()
    for name in server.names("pods"):
        server.start(name, address=SERVER_ADDRESS)
    done = Progress(finished=True, records_applied=10, records_expected=10)
    told(ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=done))
    worker = server.get("pods", "digits-worker-0")
    worker["status"] = {"phase": "Succeeded"}
    server.put("pods", worker)
    operator.turns()
    assert operator.count("jobs_total", event="succeeded") == 1, "as soon as it is written"
    operator.turns(2)
    assert operator.count("jobs_total", event="succeeded") == 1
    assert operator.count("jobs_total", event="started") == 2
    assert operator.count("reconcile_seconds_count") == 9


def test_a_turn_of_the_phase_is_logged_once(
    server: ApiServer, operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="elastic_operator")
    server.add_job()
    operator.turns(3)
    for name in server.names("pods"):
        server.start(name)
    operator.turns(3)
    turned = [record.getMessage() for record in caplog.records if "->" in record.getMessage()]
    assert [line.split(" (")[0] for line in turned] == [
        "default/digits: Pending -> Pending",
        "default/digits: Pending -> Running",
    ]
    assert "1 of 1 workers and 1 of 1 parameter servers are ready" in turned[1]


def test_only_the_namespaces_that_are_served_are_listed(server: ApiServer, tmp_path: Path) -> None:
    for namespace in ("a", "b", "c"):
        server.add_job(namespace=namespace)
    every, some = Operator(server, tmp_path), Operator(server, tmp_path, namespaces=("a", "c"))
    for operator in (every, some):
        operator.controller.list_all()
    assert [*every.store.jobs()] == [(n, "digits") for n in "abc"]
    assert [*some.store.jobs()] == [("a", "digits"), ("c", "digits")]
    paths = {request.path for request in server.asked("GET", "pods")}
    assert paths == {"/api/v1/pods", "/api/v1/namespaces/a/pods", "/api/v1/namespaces/c/pods"}
    assert server.asked("GET", "pods")[0].query == {"labelSelector": names.JOB_LABEL, "limit": "250"}


def test_a_namespace_that_is_lost_keeps_no_other_one_from_being_served(
    server: ApiServer, tmp_path: Path
) -> None:
    def forbid(request: Request) -> None:
        if "/namespaces/b/" in request.path:
            raise Refusal(403, "Forbidden", "no Role there any more")

    for namespace in ("a", "b"):
        server.add_job(namespace=namespace)
    operator = Operator(server, tmp_path, namespaces=("a", "b"))
    operator.controller.list_all()
    server.refuse = forbid
    again = Operator(server, tmp_path, namespaces=("a", "b"))
    again.controller.wait_until_served(lambda _: pytest.fail("it waits for the namespace"))
    snapshot, _ = again.controller.look(("a", "digits"))
    assert snapshot is not None
    again.controller.run_pass(("a", "digits"), snapshot, None)
    assert ("pods", "a", "digits-worker-0") in server.objects
    operator.controller.list_all()
    assert [*operator.store.jobs()] == [("a", "digits")], "one that runs leaves it alone"
    server.refuse = lambda _: None
    operator.controller.list_all()
    assert [*operator.store.jobs()] == [("a", "digits"), ("b", "digits")], "and serves it again"
    only = Operator(server, tmp_path, namespaces=("b",))
    server.refuse = forbid
    with pytest.raises(ApiError, match="no Role there any more"):
        only.controller.list_all()


def test_what_a_status_says_of_a_jobs_end_is_known(server: ApiServer, operator: Operator) -> None:
    for name, kind in (("good", "Succeeded"), ("bad", "Failed"), ("on", "Running")):
        condition = {
            "type": kind,
            "status": "True",
            "reason": kind,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        server.put(JOBS, {**server.add_job(name), "status": {"conditions": [condition]}})
    operator.controller.list_all()
    assert operator.store.jobs() == {
        ("default", "bad"): True,
        ("default", "good"): True,
        ("default", "on"): False,
    }


def test_a_definition_that_was_there_and_is_gone_is_told_from_one_that_is_yet_to_come(
    server: ApiServer, operator: Operator
) -> None:
    controller = operator.controller
    waited: list[float] = []
    assert (controller.served, controller.definition_gone) == (False, False), "nobody has asked yet"

    def come_after(seconds: float) -> None:
        waited.append(seconds)
        assert not controller.served
        assert not controller.definition_gone
        if len(waited) == 9:
            server.refuse = lambda _: None

    server.refuse = refusing("GET", JOBS, Refusal(404, "NotFound"))
    controller.wait_until_served(come_after)
    assert controller.served
    assert waited[:3] == [1.0, 1.5, 2.25]
    assert waited[-1] == 15.0
    server.refuse = refusing("GET", JOBS, Refusal(500, "InternalError"))
    with pytest.raises(ApiError):
        controller.list_all()
    assert not controller.definition_gone
    server.refuse = refusing("GET", JOBS, Refusal(404, "NotFound"))
    with pytest.raises(ApiError):
        controller.list_all()
    assert controller.definition_gone
    server.refuse = lambda _: None
    controller.list_all()
    assert not controller.definition_gone


def test_it_waits_for_a_definition_that_is_served_and_that_kopf_would_not_find_yet(
    server: ApiServer, operator: Operator
) -> None:
    waited: list[float] = []
    named = server.discovery["/apis"]

    def name(seconds: float) -> None:
        waited.append(seconds)
        server.discovery["/apis"] = named

    server.discovery["/apis"] = {"groups": []}
    operator.controller.wait_until_served(name)
    assert waited == [1.0]


def test_the_age_of_what_a_watch_has_not_delivered_is_shown(server: ApiServer, operator: Operator) -> None:
    job = server.add_job()
    operator.turns()
    operator.controller.list_all()
    operator.monitors["trainingjobs"].delivered(server.get(JOBS, "digits"), gone=False)
    ages = operator.controller.watch_ages()
    assert ages["trainingjobs"] == 0.0
    assert ages["pods"] > 0.0
    assert operator.count("watch_age_seconds", resource="pods") == ages["pods"]
    assert operator.count("watch_age_seconds", resource="trainingjobs") == 0.0
    assert job["metadata"]["name"] == "digits"


def test_an_api_server_that_is_away_is_no_answer(server: ApiServer, operator: Operator) -> None:
    server.add_job()
    operator.controller.list_all()
    server.close()
    with pytest.raises(ConnectionLost, match=r"create .*/services"):
        operator.turn()
    assert operator.count("reconciles_total", result="error") == 1
    assert operator.count("api_requests_total", verb="create", resource="services") == 1


def test_without_a_way_to_a_cluster_the_operator_says_what_to_give(tmp_path: Path) -> None:
    wrong = tmp_path / "config"
    wrong.write_text("{}")
    for kubeconfig in (None, wrong):
        with pytest.raises(UsageError, match="set --kubeconfig"):
            Api(Settings(kubeconfig=kubeconfig), Metrics())


def test_requests_say_who_asks_and_what_they_carry(server: ApiServer, operator: Operator) -> None:
    server.add_job()
    operator.turns()
    for request in server.requests:
        assert request.headers["authorization"] == "Bearer secret"
        patched = request.method == "PATCH"
        kind = "application/merge-patch+json" if patched else "application/json"
        assert request.headers["content-type"] == kind
    info = connection(operator.api)
    assert (info.server, info.insecure) == (server.url, False)


def test_a_merge_patch_holds_what_differs_and_no_more() -> None:
    old = {"same": 1, "gone": 2, "deep": {"same": [1], "gone": 1, "other": 1}, "plain": {"a": 1}}
    new = {"same": 1, "deep": {"same": [1], "other": 2, "more": None}, "plain": 3, "more": {"a": 1}}
    assert difference(old, new) == {
        "gone": None,
        "deep": {"gone": None, "other": 2, "more": None},
        "plain": 3,
        "more": {"a": 1},
    }
    assert difference(new, new) == {}


class Ended(Exception):
    """What ends the process raises this instead."""


def test_an_operator_that_is_to_die_after_a_write_dies_right_after_it(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end-to-end tests kill it so at each of its writes, and see that nothing is lost or done twice."""

    def ended(code: int) -> None:
        raise Ended(code)

    # It would end the test.
    monkeypatch.setattr("elastic_operator.api.os._exit", ended)
    server.add_job()
    operator = Operator(server, tmp_path, fail_after_writes=2)
    with pytest.raises(Ended, match=str(EXIT_TEST)):
        operator.turns()
    assert len(server.asked("POST", "default")) == 2
    with pytest.raises(Ended):
        operator.turns()
    assert len(server.asked("POST", "default")) == 2, "it reads, and writes nothing more"


def test_a_role_that_is_too_old_is_asked_once_and_said(server: ApiServer, operator: Operator) -> None:
    """The operator's image was upgraded, and its chart was not. It may not write the spec down."""
    server.add_job(worker={"replicas": 1})
    operator.turns(2)
    for name in server.names("pods"):
        server.put("pods", {**server.get("pods", name), "status": {"phase": "Running"}})
    cannot = 'services "digits-servers" is forbidden: User "operator" cannot patch resource "services"'
    server.refuse = refusing("PATCH", "digits-servers", Refusal(403, "Forbidden", f"{cannot} in API group"))
    job = server.get(JOBS, "digits")
    for replicas in (2, 3):
        wanted = {**job["spec"], "worker": {"replicas": replicas}}
        server.put(JOBS, {**server.get(JOBS, "digits"), "spec": wanted})
        again = operator.turns(3)
    assert len(server.asked("PATCH", "digits-servers")) == 1
    assert "digits-worker-2" in server.names("pods"), "it keeps nothing else back"
    found = {c.type: c for c in operator.status.conditions}
    assert (found["Degraded"].status, found["Degraded"].reason) == ("True", "RoleTooOld")
    assert "in the namespace default. Upgrade the chart together with" in found["Degraded"].message
    assert found["Created"].status == "True"
    assert sum("Upgrade the chart together with the image" in message for message in operator.messages()) == 1
    assert again is not None
    assert again > operator.settings.options.retry
    operator.now += 601
    server.refuse = lambda _: None
    operator.turns()
    assert len(server.asked("PATCH", "digits-servers")) == 2
    assert next(c for c in operator.status.conditions if c.type == "Degraded").reason != "RoleTooOld"


def test_a_job_whose_parameter_server_is_ready_and_does_not_answer_says_so(
    server: ApiServer, tmp_path: Path
) -> None:
    options = Options(answer_limit=timedelta(microseconds=1))
    operator = Operator(server, tmp_path, options=options)
    server.add_job()
    operator.turns()
    for name in server.names("pods"):
        server.start(name, address=SERVER_ADDRESS)
    operator.controller.list_all()
    passes = Passes(operator.controller, operator.settings)
    asyncio.run(passes.make(KEY))
    passes.close()
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert (degraded.status, degraded.reason) == ("True", "NoAnswer")
    assert operator.status.phase == "Running"
