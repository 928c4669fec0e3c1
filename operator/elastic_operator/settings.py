"""The settings of the operator, from its command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from elastic_operator.permissions import Policy, read_policy
from elastic_operator.plan import Options
from elastic_ps.api.fields import parse_duration
from elastic_ps.errors import UsageError

_SHORTEST = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of the operator.

    Attributes:
        namespaces: the namespaces to serve; empty: all.
        kubeconfig: for an operator outside of the cluster; None: the pod's service account.
        health: `host:port` of /healthz, /readyz and /metrics.
        concurrency: the number of passes that run at the same time.
        resync: the time between two full listings, which are compared with the watches.
        watch_limit: the operator is unhealthy when a watch misses a change for this long.
        request_timeout: deadline of a request to the API server.
        status_timeout: deadline of a request to a parameter server.
        tls_secret: (namespace, name) of the Secret that signs the certificates of jobs; None: jobs that start
            now use no TLS.
        tls_secret_given: whether somebody else creates that Secret.
        lease: (namespace, name) of the Lease that this operator must hold to work; None: it works at once.
        lease_duration: the time after which another operator may take a lease that is not renewed.
        identity: this operator's name as a holder of the lease; empty: the host's name.
        fail_after_writes: end the process right after so many writes, as if it were killed (for tests).
    """

    namespaces: tuple[str, ...] = ()
    kubeconfig: Path | None = None
    health: tuple[str, int] = ("0.0.0.0", 8080)
    concurrency: int = 8
    resync: timedelta = timedelta(seconds=60)
    watch_limit: timedelta = timedelta(seconds=120)
    request_timeout: timedelta = timedelta(seconds=15)
    status_timeout: timedelta = timedelta(seconds=2)
    tls_secret: tuple[str, str] | None = None
    tls_secret_given: bool = False
    lease: tuple[str, str] | None = None
    lease_duration: timedelta = timedelta(seconds=15)
    identity: str = ""
    fail_after_writes: int | None = None
    log_level: str = "info"
    options: Options = field(default_factory=Options)


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line (the process's own if None). If it is wrong, print why and exit with 2."""
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="elastic-operator", description="Run TrainingJobs on Kubernetes.")
    add = parser.add_argument
    add("--namespace", action="append", default=[], help="serve only this namespace; may be repeated")
    add("--kubeconfig", type=Path, help="run outside of the cluster, with this kubeconfig")
    add("--health", type=_address, default=defaults.health, help="host:port of the probes and metrics")
    add(
        "--concurrency",
        type=_positive,
        default=defaults.concurrency,
        help="number of jobs that are reconciled at the same time",
    )
    add(
        "--resync",
        type=_duration,
        default=defaults.resync,
        help="time between two full listings of all objects",
    )
    add(
        "--watch-limit",
        type=_duration,
        default=defaults.watch_limit,
        help="time after which a watch that has missed a change makes the operator unhealthy",
    )
    add(
        "--poll",
        type=_duration,
        default=defaults.options.poll,
        help="time between two reads of a job's progress",
    )
    add(
        "--tls-secret",
        type=_place,
        help="namespace/name of the Secret that signs the certificates of jobs; it is created if it is "
        "missing, unless --tls-secret-given is set. Without this option, jobs use no TLS",
    )
    add(
        "--tls-secret-given",
        action="store_true",
        help="the Secret is somebody else's: if it is missing, no certificates are issued",
    )
    add(
        "--certificate-lifetime",
        type=_lifetime,
        default=defaults.options.certificate_lifetime,
        help="lifetime of the certificates of jobs; new ones are issued in its last third",
    )
    add(
        "--lease",
        type=_place,
        help="namespace/name of a Lease; of several operators, only the one that holds it works",
    )
    add(
        "--lease-duration",
        type=_duration,
        default=defaults.lease_duration,
        help="time after which another operator may take a lease that is not renewed",
    )
    add(
        "--identity",
        default="",
        help="this operator's name as a holder of the lease (default: the host's name)",
    )
    add(
        "--template-permissions",
        type=_policy,
        default=Policy(),
        metavar="JSON",
        help="permissions of jobs' templates beyond the defaults, by namespace (* for all)",
    )
    add(
        "--http-from",
        type=_peers,
        metavar="JSON",
        help="create a NetworkPolicy for each job; this list of NetworkPolicyPeers may reach its port 8080",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default=defaults.log_level)
    add("--fail-after-writes", type=int, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    return Settings(
        namespaces=tuple(given.namespace),
        kubeconfig=given.kubeconfig,
        health=given.health,
        concurrency=given.concurrency,
        resync=given.resync,
        watch_limit=given.watch_limit,
        tls_secret=given.tls_secret,
        tls_secret_given=given.tls_secret_given,
        lease=given.lease,
        lease_duration=given.lease_duration,
        identity=given.identity,
        fail_after_writes=given.fail_after_writes,
        log_level=given.log_level,
        options=Options(
            poll=given.poll,
            policy=given.template_permissions,
            http_from=given.http_from,
            secured=given.tls_secret is not None,
            certificate_lifetime=given.certificate_lifetime,
        ),
    )


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port, as in 0.0.0.0:8080")
    return host or "0.0.0.0", int(port)


def _place(text: str) -> tuple[str, str]:
    namespace, _, name = text.partition("/")
    if not namespace or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not namespace/name")
    return namespace, name


def _policy(text: str) -> Policy:
    try:
        return read_policy(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _peers(text: str) -> list[dict[str, Any]]:
    try:
        peers = json.loads(text)
    except ValueError:
        peers = None
    known = {"podSelector", "namespaceSelector", "ipBlock"}
    if not isinstance(peers, list) or not all(isinstance(peer, dict) and peer for peer in peers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of NetworkPolicyPeers")
    if unknown := {key for peer in peers for key in peer} - known:
        raise argparse.ArgumentTypeError(
            f"unknown fields {sorted(unknown)} in {text!r}; a peer has {sorted(known)}"
        )
    return peers


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _lifetime(text: str) -> timedelta:
    lifetime = _duration(text)
    if lifetime < _SHORTEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is too short: pods see a new certificate up to two minutes after it was issued; "
            f"expected {_SHORTEST.total_seconds():g}s at least"
        )
    return lifetime


def _duration(text: str) -> timedelta:
    try:
        duration = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not duration:
        raise argparse.ArgumentTypeError(f"{text!r} is too short; expected more than 0s, as in 10s")
    return duration
