"""`python -m elastic_operator.submit`: create the TrainingJob on standard input, as a user of the cluster.

It takes the cluster, the user and the namespace from the current context of the kubeconfig ($KUBECONFIG, or
~/.kube/config). It is not part of the operator.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from kubernetes import config
from kubernetes.config.config_exception import ConfigException

from elastic_operator.api import Api, ApiError
from elastic_operator.metrics import Metrics
from elastic_operator.settings import Settings
from elastic_ps.errors import ConnectionLost, UsageError, UserError
from elastic_ps.job import GROUP, VERSION, parse_job

_contexts: Callable[..., Any] = config.list_kube_config_contexts


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the job is created, 2 with a message if it cannot be, 1 if the API server is silent."""
    parser = argparse.ArgumentParser(prog="python -m elastic_operator.submit", description=__doc__)
    parser.add_argument("--namespace", help="default: that of the context")
    given = parser.parse_args(arguments)
    try:
        print(submit(yaml.safe_load(sys.stdin), namespace=given.namespace))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ConnectionLost as error:
        print(f"error: the API server does not answer: {error}", file=sys.stderr)
        return 1
    return 0


def submit(document: Mapping[str, Any], *, namespace: str | None) -> str:
    """Create a TrainingJob; returns what to tell the user. Blocks for the API server's answer.

    Raises:
        UserError: no cluster is configured, or the API server refuses the job.
        ConnectionLost: the API server does not answer.
    """
    job = parse_job(document, source="standard input")
    path = os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        _, context = _contexts(path)
    except ConfigException as error:
        raise UsageError(f"no cluster is configured: {error}; set KUBECONFIG") from error
    namespace = namespace or context["context"].get("namespace") or "default"
    api = Api(Settings(kubeconfig=Path(path)), Metrics())
    place = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/trainingjobs"
    try:
        body = {**document, "metadata": {**document["metadata"], "namespace": namespace}}
        api.request("create", "trainingjobs", place, body=body)
    except ApiError as error:
        raise UserError(_refused(error, job.name, namespace)) from error
    return f"trainingjob {job.name} is created\n  kubectl --namespace {namespace} get tj {job.name} --watch"


def _refused(error: ApiError, name: str, namespace: str) -> str:
    if error.status == 409:
        return (
            f"namespace {namespace} has a TrainingJob {name} already: delete it with `kubectl --namespace "
            f"{namespace} delete tj {name}`, or give the new one another name with --name"
        )
    if error.status == 404:
        return (
            f"the cluster does not know TrainingJobs, or has no namespace {namespace} ({error.message}); "
            "install the operator first"
        )
    return f"the API server refuses the job: {error}"


if __name__ == "__main__":
    sys.exit(main())
