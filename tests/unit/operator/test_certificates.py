"""The certificates of jobs: when they are issued, into what, and that no other Secret is read or written."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa

from elastic_operator import builders, names
from elastic_operator.certificates import REFUSED, Issued, room, secrets
from elastic_operator.plan import Certify, Create, Options, Outcome, Remember, stamp
from elastic_operator.pods import Problem, parse_time
from elastic_operator.reconcile import reconcile
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.api.status import CertificatesStatus
from elastic_ps.contract import env
from elastic_ps.contract.certificates import identity_of, issue, make_authority, validity_of
from elastic_ps.contract.identity import Identity
from tests.testing.api_server import JOBS, ApiServer, Refusal, Request
from tests.testing.simulation import Simulation, job_document
from tests.unit.contract.test_certificates import root_of
from tests.unit.operator.test_cluster import Operator

SECURED = Options(secured=True)
SEED_PLACE = ("system", "authority")
DAY = timedelta(days=1)


@pytest.fixture
def server() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.close()


def operator_of(server: ApiServer, tmp_path: Path, **settings: Any) -> Operator:
    return Operator(server, tmp_path, tls_secret=SEED_PLACE, options=SECURED, **settings)


def secured(**spec: Any) -> Simulation:
    """A job that runs, and was started with TLS."""
    simulation = Simulation(job_document(**spec))
    simulation.options = SECURED
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    return simulation


def file(server: ApiServer, secret: str, key: str) -> bytes:
    text: str = server.get("secrets", secret)["stringData"][key]
    return text.encode()


def test_the_service_says_so_before_there_is_anything_else_and_secrets_are_there_before_pods() -> None:
    simulation = Simulation(job_document())
    simulation.options = SECURED
    kinds = [a.kind if isinstance(a, Create) else type(a).__name__ for a in simulation.plan().actions]
    assert kinds == ["Service", "Certify", "Pod", "Pod"]
    simulation.step(writes=1)
    simulation.options = Options()
    simulation.settle()
    assert len(simulation.certified) == 1, "also if the operator dies after that, and is another one then"
    for pod in simulation.pods.values():
        assert "elastic-ps-tls" in {volume["name"] for volume in pod["spec"]["volumes"]}


def test_a_pass_that_changes_nothing_issues_nothing() -> None:
    simulation = secured(worker={"replicas": 2})
    assert len(simulation.certified) == 1
    assert simulation.plan().actions == ()
    simulation.scale(4)
    simulation.settle()
    assert len(simulation.certified) == 1, "there is room for as many"


def test_more_workers_than_there_are_certificates_for() -> None:
    simulation = secured(worker={"replicas": 2})
    simulation.scale(5)
    noted, first, *others = simulation.plan().actions
    assert isinstance(noted, Remember)
    assert isinstance(first, Certify)
    assert first.processes == {"ps": 1, "worker": 8}
    assert len(others) == 3, "the pods come after the Secrets that they mount"
    simulation.settle()
    assert simulation.status["certificates"]["workers"] == 8


@pytest.mark.parametrize(
    ("workers", "enough"), [(1, 4), (4, 4), (5, 8), (33, 64), (64, 64), (65, 128), (300, 320)]
)
def test_there_is_room_to_grow(workers: int, enough: int) -> None:
    assert room(workers) == enough


def test_new_certificates_come_in_the_last_third() -> None:
    simulation = secured()
    begin = simulation.now
    issued = simulation.status["certificates"]
    simulation.now = begin + 59 * DAY
    assert simulation.plan().actions == ()
    assert simulation.plan().requeue is not None, "though nothing else happens"
    simulation.now = begin + 61 * DAY
    simulation.step()
    assert len(simulation.certified) == 2
    assert simulation.status["certificates"]["expires"] > issued["expires"]
    assert simulation.plan().actions == ()


def test_every_role_has_its_own_and_a_job_without_standbys_none_for_them() -> None:
    claim = {"volumeClaim": {"storage": "1Gi"}}
    server = {"replicas": 2, "durability": "standby", "checkpoint": claim}
    simulation = secured(parameterServer=server, evaluator={"entrypoint": "a:b"})
    processes = {"ps": 2, "worker": 4, "standby": 2, "evaluator": 1}
    assert simulation.certified[0].processes == processes


def test_what_was_refused_is_tried_again_and_told() -> None:
    simulation = Simulation(job_document())
    simulation.options = SECURED
    simulation.step(writes=1)
    somebodys = Outcome(refusals=(Problem(REFUSED, "the Secret is somebody else's"),))
    refused = simulation.observed().with_outcome(somebodys)
    assert simulation.job is not None
    plan = reconcile(simulation.job, refused, simulation.now, simulation.options)
    assert plan.status is not None
    assert plan.status.certificates == CertificatesStatus(), "none are noted"
    assert plan.requeue is not None
    assert plan.requeue <= simulation.options.retry
    degraded = next(c for c in plan.status.conditions if c.type == "Degraded")
    assert (degraded.status, degraded.reason) == ("True", REFUSED)


def test_a_job_whose_workers_would_not_encrypt_what_they_add_up_is_refused_unless_it_says_so() -> None:
    simulation = Simulation(job_document(strategy="all-reduce"))
    simulation.options = SECURED
    simulation.settle()
    failed = simulation.condition("Failed")
    assert failed["reason"] == "InvalidSpec"
    assert failed["message"].startswith("spec.strategy: with strategy all-reduce the workers speak")
    assert "set unencryptedAllReduce: true" in failed["message"]
    assert not simulation.pods

    allowed = secured(strategy="all-reduce", unencryptedAllReduce=True)
    assert allowed.status["phase"] == "Running"
    without = Simulation(job_document(strategy="all-reduce"))
    without.settle()
    assert without.pods, "nothing is encrypted in this job"


def test_a_job_that_was_started_without_tls_stays_without() -> None:
    """Its processes would not understand a new one."""
    simulation = Simulation(job_document())
    simulation.settle()
    simulation.options = SECURED
    del simulation.pods["digits-worker-0"]
    simulation.settle()
    assert simulation.certified == []
    assert "certificates" not in simulation.status
    volumes = simulation.pods["digits-worker-0"]["spec"]["volumes"]
    assert "elastic-ps-tls" not in {volume["name"] for volume in volumes}


@pytest.mark.parametrize("runs_with", [True, False])
def test_a_job_whose_service_was_deleted_stays_as_it_is(runs_with: bool) -> None:
    simulation = Simulation(job_document())
    simulation.options = Options(secured=runs_with)
    simulation.settle()
    simulation.services.clear()
    del simulation.pods["digits-worker-0"]
    simulation.options = Options(secured=not runs_with)
    simulation.settle()
    volumes = {volume["name"] for volume in simulation.pods["digits-worker-0"]["spec"]["volumes"]}
    assert ("elastic-ps-tls" in volumes) is runs_with


@pytest.mark.parametrize("field", ["issued", "expires"])
@pytest.mark.parametrize("written", ["soon", "2126-01-01T00:00:00", "2126-01-01", ""])
def test_a_status_that_somebody_has_written_into(field: str, written: str) -> None:
    simulation = secured()
    assert simulation.job is not None
    simulation.job["status"]["certificates"][field] = written
    simulation.settle()
    assert len(simulation.certified) == (2 if field == "expires" else 1), (
        "new ones, and a status that is right"
    )


def test_there_are_certificates_up_to_the_highest_index_though_indexes_have_holes() -> None:
    simulation = secured(worker={"replicas": 6})
    for name in simulation.workers()[:5]:
        simulation.pods[name]["status"] = {"phase": "Pending", "held": True}
    simulation.scale(1)
    simulation.settle()
    assert simulation.workers() == ["digits-worker-5"]
    assert simulation.status["certificates"]["workers"] == 8
    simulation.now += Options().certificate_lifetime
    simulation.step()
    assert simulation.certified[-1].processes["worker"] == 8


def test_a_pod_that_waits_for_a_lost_secret_gets_another_one_once() -> None:
    simulation = secured()
    simulation.now += DAY
    del simulation.pods["digits-worker-0"]
    simulation.step()
    pod = simulation.pods["digits-worker-0"]
    pod["spec"]["nodeName"] = "node"
    plan = simulation.plan()
    assert plan.actions == (), "it may be about to start"
    assert plan.requeue == Options().start_limit, "no event would say that it has not started"
    simulation.now += plan.requeue
    simulation.step()
    assert len(simulation.certified) == 2
    simulation.now += timedelta(minutes=20)
    assert simulation.plan().actions == ()


def test_a_pod_mounts_the_files_of_its_own_process_and_of_no_other() -> None:
    job = job_document()
    spec = TrainingJobSpec.model_validate(job["spec"])
    pod = builders.pod(job, spec, "worker", 300, secured=True)
    (volume,) = (v for v in pod["spec"]["volumes"] if "secret" in v)
    assert volume["secret"]["secretName"] == names.certificates("digits", "worker", 256)
    assert volume["secret"]["defaultMode"] == 0o400
    files = {item["key"]: item["path"] for item in volume["secret"]["items"]}
    assert files == {"ca.crt": "ca.crt", "300.crt": "tls.crt", "300.key": "tls.key"}
    (container,) = pod["spec"]["containers"]
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == volume["name"])
    assert mount["readOnly"] is True
    told = env.read({item["name"]: item.get("value", "") for item in container["env"]})
    assert str(told.tls) == mount["mountPath"]


def test_secrets_hold_what_pods_mount(server: ApiServer, tmp_path: Path) -> None:
    operator = operator_of(server, tmp_path)
    server.add_job(worker={"replicas": 2})
    operator.turns(2)
    uid = server.get(JOBS, "digits")["metadata"]["uid"]
    assert server.names("secrets") == ["authority", "digits-tls-ps-0", "digits-tls-worker-0"]
    for pod in ("digits-ps-0", "digits-worker-1"):
        manifest = server.get("pods", pod)
        (volume,) = (v["secret"] for v in manifest["spec"]["volumes"] if "secret" in v)
        held = server.get("secrets", volume["secretName"])
        assert {item["key"] for item in volume["items"]} <= held["stringData"].keys()
        assert held["metadata"]["ownerReferences"][0]["uid"] == uid, "it goes with the job"
        assert not [key for key in held["stringData"] if key.startswith("ca") and key != "ca.crt"]
    found = identity_of(file(server, "digits-tls-worker-0", "1.crt"))
    assert found == Identity(uid, "worker", 1)
    leaf = x509.load_pem_x509_certificate(file(server, "digits-tls-ps-0", "0.crt"))
    san = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "digits-ps-0.digits-servers" in san.get_values_for_type(x509.DNSName)
    server.requests.clear()
    operator.turn()
    assert server.requests == []


def test_a_secret_has_room_for_the_chain_of_an_issuer() -> None:
    """Else a large job could not start: Kubernetes refuses a Secret of more than 1 MiB."""
    certify = Certify({"worker": room(1000)}, DAY, "")
    one = Issued(b"c" * (1100 + 4 * 3000), b"k" * 240, b"r" * 3000, datetime.now(UTC))
    made = list(secrets(job_document(), certify, {("worker", i): one for i in range(room(1000))}))
    assert sum(len(each["stringData"]) - 1 for each in made) == 2 * room(1000)
    for secret in made:
        assert sum(len(key) + len(value) for key, value in secret["stringData"].items()) < 1 << 20


def test_another_operator_issues_what_the_processes_trust_already(server: ApiServer, tmp_path: Path) -> None:
    """It knows the authority of a job, though that is written nowhere; and it reads no Secret of the job."""
    server.add_job(worker={"replicas": 1})
    operator_of(server, tmp_path).turns(2)
    before = x509.load_pem_x509_certificate(file(server, "digits-tls-worker-0", "ca.crt"))
    first = file(server, "digits-tls-worker-0", "0.crt")
    server.get(JOBS, "digits")["status"]["certificates"]["expires"] = "2026-01-01T00:00:00Z"
    another = operator_of(server, tmp_path)
    another.turns(1)
    again = file(server, "digits-tls-worker-0", "0.crt")
    assert again != first
    x509.load_pem_x509_certificate(again).verify_directly_issued_by(before)
    read = [r.path for r in server.requests if r.method == "GET" and "/secrets" in r.path]
    assert set(read) == {"/api/v1/namespaces/system/secrets/authority"}


def test_two_jobs_have_different_authorities() -> None:
    now = datetime.now(UTC)
    made = [make_authority(job, now=now, lifetime=DAY, seed=b"s" * 32) for job in ("one", "two", "one")]
    keys = [pair.key for pair in made]
    assert keys[0] == keys[2] != keys[1]
    assert make_authority("one", now=now, lifetime=DAY, seed=b"t" * 32).key != keys[0]


def test_a_secret_of_somebody_else_is_not_written_over(server: ApiServer, tmp_path: Path) -> None:
    foreign = {
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {"name": "digits-tls-ps-0", "namespace": "default"},
        "data": {"password": "c2VjcmV0"},
    }
    server.put("secrets", foreign)
    operator = operator_of(server, tmp_path)
    server.add_job()
    operator.turns(2)
    assert server.get("secrets", "digits-tls-ps-0")["data"] == {"password": "c2VjcmV0"}
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert degraded.reason == REFUSED
    assert "immutable" in degraded.message
    server.remove("secrets", "digits-tls-ps-0")
    operator.turns(2)
    assert operator.status.certificates is not None


def test_a_webhook_that_fails_for_secrets_is_told_and_no_certificates_are_noted(
    server: ApiServer, tmp_path: Path
) -> None:
    def webhook(request: Request) -> None:
        if request.method == "POST" and request.path.endswith("/default/secrets"):
            raise Refusal(500, "InternalError", "failed calling webhook")

    operator = operator_of(server, tmp_path)
    server.add_job()
    server.refuse = webhook
    operator.turns()
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert (degraded.reason, degraded.message) == (REFUSED, "failed calling webhook")
    assert operator.status.certificates == CertificatesStatus()


def test_a_job_keeps_tls_though_everything_that_says_so_is_refused_at_first(
    server: ApiServer, tmp_path: Path
) -> None:
    def forbid(request: Request) -> None:
        if request.method == "POST" and request.path.split("/")[-1] in ("services", "secrets"):
            raise Refusal(403, "Forbidden", "not yet")

    operator = operator_of(server, tmp_path)
    server.put("secrets", encoded(seed=b"s" * 32))
    server.add_job()
    server.refuse = forbid
    operator.turns()
    assert operator.status.start_time, "the job has started"
    server.refuse = lambda _: None
    operator.turns()
    service = server.get("services", "digits-servers")
    assert service["metadata"]["annotations"][names.TLS_ANNOTATION] == "true"
    assert {"digits-tls-ps-0", "digits-tls-worker-0"} <= {*server.names("secrets")}
    assert operator.status.certificates is not None
    assert operator.status.certificates.issued


def test_the_secrets_of_an_orphaned_job_are_left_to_its_pods(server: ApiServer, tmp_path: Path) -> None:
    """It was deleted with `--cascade=orphan`, and its processes go on; then there is one of the same name."""
    operator = operator_of(server, tmp_path)
    job = server.add_job()
    operator.turns()
    before = file(server, "digits-tls-ps-0", "0.crt")
    server.remove(JOBS, "digits")
    job["metadata"]["uid"] = "uid-of-the-next"
    server.put(JOBS, {**job, "status": {}})
    operator.controller.list_all()
    operator.turns()
    assert file(server, "digits-tls-ps-0", "0.crt") == before
    assert operator.status.certificates == CertificatesStatus(), "it is to have some, and has none"
    server.remove("services", "digits-servers")
    operator.controller.list_all()
    operator.turns()
    assert file(server, "digits-tls-ps-0", "0.crt") != before
    (owner,) = server.get("secrets", "digits-tls-ps-0")["metadata"]["ownerReferences"]
    assert owner["uid"] == "uid-of-the-next"


def encoded(**data: bytes) -> dict[str, Any]:
    named = {key.replace("_", "."): base64.b64encode(value).decode() for key, value in data.items()}
    metadata = {"name": SEED_PLACE[1], "namespace": SEED_PLACE[0]}
    return {"kind": "Secret", "metadata": metadata, "data": named}


@pytest.mark.parametrize("kind", ["ecdsa", "rsa"])
def test_an_issuer_signs_in_the_place_of_the_operators_own(
    server: ApiServer, tmp_path: Path, kind: str
) -> None:
    now = datetime.now(UTC)
    if kind == "rsa":
        root = root_of(rsa.generate_private_key(65537, 2048), until=now + 30 * DAY)
    else:
        root = make_authority("root", now=now, lifetime=30 * DAY)
    server.put("secrets", encoded(tls_crt=root.certificate, tls_key=root.key))
    operator = operator_of(server, tmp_path)
    server.add_job()
    operator.turns(1)
    assert file(server, "digits-tls-ps-0", "ca.crt") == root.certificate
    ca = x509.load_pem_x509_certificate(root.certificate)
    leaf = file(server, "digits-tls-ps-0", "0.crt")
    x509.load_pem_x509_certificate(leaf).verify_directly_issued_by(ca)
    assert validity_of(leaf)[1] <= ca.not_valid_after_utc


def test_a_secret_that_somebody_else_creates_is_not_made(server: ApiServer, tmp_path: Path) -> None:
    operator = operator_of(server, tmp_path, tls_secret_given=True)
    server.add_job()
    operator.turns(2)
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert (degraded.reason, degraded.message) == (
        REFUSED,
        "the Secret system/authority is missing; create it",
    )
    assert server.names("secrets") == []
    server.put("secrets", encoded(seed=b"s" * 32))
    operator.turns(2)
    assert server.names("secrets") == ["authority", "digits-tls-ps-0", "digits-tls-worker-0"]


def test_the_owners_key_signs_also_where_an_older_operator_has_left_a_seed(
    server: ApiServer, tmp_path: Path
) -> None:
    root = make_authority("root", now=datetime.now(UTC), lifetime=30 * DAY)
    server.put("secrets", encoded(seed=b"s" * 32, tls_crt=root.certificate, tls_key=root.key))
    operator = operator_of(server, tmp_path, tls_secret_given=True)
    server.add_job()
    operator.turns(1)
    assert file(server, "digits-tls-ps-0", "ca.crt") == root.certificate


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "has neither seed nor tls.crt and tls.key"),
        ({"seed": b"short"}, "seed has 5 bytes; expected at least 32"),
        ({"tls_crt": b"no", "tls_key": b"no"}, "cannot be read"),
    ],
)
def test_a_secret_that_signs_nothing_is_told_until_it_is_corrected(
    server: ApiServer, tmp_path: Path, data: dict[str, bytes], words: str
) -> None:
    server.put("secrets", encoded(**data))
    operator = operator_of(server, tmp_path)
    server.add_job()
    operator.turns(2)
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert (degraded.reason, words in degraded.message) == (REFUSED, True), degraded.message
    server.put("secrets", encoded(seed=b"s" * 32))
    operator.turns(2)
    assert operator.status.certificates is not None
    assert operator.status.certificates.issued, "the Secret is corrected"


def test_certificates_are_renewed_before_an_authority_ends_that_ends_soon(
    server: ApiServer, tmp_path: Path
) -> None:
    now = datetime.now(UTC)
    root = make_authority("root", now=now, lifetime=30 * DAY)
    server.put("secrets", encoded(tls_crt=root.certificate, tls_key=root.key))
    operator = operator_of(server, tmp_path)
    server.add_job()
    operator.turns()
    known = operator.status.certificates
    assert known is not None
    ends = validity_of(file(server, "digits-tls-ps-0", "0.crt"))[1]
    assert parse_time(known.expires) == ends
    assert ends <= now + 30 * DAY
    first = file(server, "digits-tls-ps-0", "0.crt")
    operator.turns(2)
    assert file(server, "digits-tls-ps-0", "0.crt") == first, "two thirds of their time are left"
    job = server.get(JOBS, "digits")
    times = {"issued": stamp(now - 21 * DAY), "expires": stamp(now + 9 * DAY)}
    job["status"]["certificates"] |= times
    server.put(JOBS, job)
    operator.turns()
    assert file(server, "digits-tls-ps-0", "0.crt") != first


def test_an_authority_that_has_ended_is_told(server: ApiServer, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    root = make_authority("root", now=now - DAY, lifetime=DAY - timedelta(hours=2))
    server.put("secrets", encoded(tls_crt=root.certificate, tls_key=root.key))
    operator = operator_of(server, tmp_path)
    server.add_job()
    assert operator.turns() is not None
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert (degraded.reason, "the authority expired at" in degraded.message) == (REFUSED, True)


def test_an_intermediate_needs_its_root(server: ApiServer, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    root = make_authority("root", now=now, lifetime=30 * DAY)
    leaf = issue(root, Identity("a", "worker"), now=now, lifetime=DAY)
    server.put("secrets", encoded(tls_crt=leaf.certificate, tls_key=leaf.key))
    operator = operator_of(server, tmp_path)
    server.add_job()
    operator.turns(2)
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert "add the root as ca.crt" in degraded.message


@pytest.mark.parametrize(
    ("authority", "trusted", "said"),
    [
        ("leaf", "root", "the authority's certificate may not sign others"),
        ("leaf", "other", "no certificate of ca.crt has issued tls.crt"),
    ],
)
def test_a_secret_that_no_process_would_accept_is_refused(
    server: ApiServer, tmp_path: Path, authority: str, trusted: str, said: str
) -> None:
    now = datetime.now(UTC)
    made = {name: make_authority(name, now=now, lifetime=30 * DAY) for name in ("root", "other")}
    made["leaf"] = issue(made["root"], Identity("a", "worker"), now=now, lifetime=DAY)
    data = {"tls_crt": made[authority].certificate, "tls_key": made[authority].key}
    server.put("secrets", encoded(**data, ca_crt=made[trusted].certificate))
    operator = operator_of(server, tmp_path)
    server.add_job()
    operator.turns(2)
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert (degraded.reason, said in degraded.message) == (REFUSED, True), degraded.message
