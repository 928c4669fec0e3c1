"""`python -m elastic_operator.submit`: create the TrainingJob on standard input, as a user of the cluster.

It takes the cluster, the user and the namespace from the current context of the kubeconfig ($KUBECONFIG, or
~/.kube/config). It is not part of the operator.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from kubernetes import config

from elastic_operator.api import Api, ApiError
from elastic_operator.metrics import Metrics
from elastic_operator.settings import Settings
from elastic_ps.api import manifest
from elastic_ps.api.job import GROUP, VERSION, parse_job
from elastic_ps.errors import ConnectionLost, UsageError, UserError

_contexts: Callable[..., Any] = config.list_kube_config_contexts

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
"""Matches a valid name of a namespace."""

_LAID_OUT_OTHERWISE = (
    "the file is not laid out as a kubeconfig: expected a mapping with current-context, and with the lists "
    "clusters, contexts and users"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Create the job. Returns 0 if it is created, 2 if it cannot be, 1 if the API server does not answer."""
    parser = argparse.ArgumentParser(prog="python -m elastic_operator.submit", description=__doc__)
    parser.add_argument("--namespace", help="default: the namespace of the context")
    given = parser.parse_args(arguments)
    try:
        print(submit(manifest.read(sys.stdin.read()), namespace=given.namespace))
    except (UserError, yaml.YAMLError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ConnectionLost as error:
        print(f"error: the API server does not answer: {error}", file=sys.stderr)
        return 1
    return 0


def submit(document: Mapping[str, Any], *, namespace: str | None) -> str:
    """Create a TrainingJob; returns a message for the user. Blocks for the API server's answer.

    Raises:
        UserError: no cluster is configured, the namespace is invalid, or the API server refuses the job.
        ConnectionLost: the API server does not answer.
    """
    job = parse_job(document, source="standard input")
    api, usual = _connect(os.environ.get("KUBECONFIG") or "~/.kube/config")
    namespace = usual if namespace is None else namespace
    if not re.fullmatch(_LABEL, namespace):
        raise UsageError(
            f"the namespace is {namespace!r}; expected at most 63 lower-case letters, digits and hyphens, "
            "with a letter or digit at both ends"
        )
    place = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/trainingjobs"
    try:
        body = {**document, "metadata": {**document["metadata"], "namespace": namespace}}
        api.request("create", "trainingjobs", place, body=body)
    except ApiError as error:
        raise UserError(_refused(error, job.name, namespace)) from error
    return f"trainingjob {job.name} is created\n  kubectl --namespace {namespace} get tj {job.name} --watch"


def _connect(files: str) -> tuple[Api, str]:
    """The cluster of the current context, and the namespace that the context names.

    Args:
        files: the kubeconfig, or several with a colon between them.

    Raises:
        UsageError: they name no cluster, or are not a kubeconfig.
    """
    try:
        _, context = _contexts(files)
        return Api(Settings(kubeconfig=Path(files)), Metrics()), context["context"].get(
            "namespace"
        ) or "default"
    except Exception as error:
        # The library passes on any error from reading, parsing and walking through a wrong file.
        cause = error.__cause__ if isinstance(error, UsageError) else error
        of_the_code = isinstance(cause, TypeError | AttributeError | LookupError)  # says nothing to a user
        why = _LAID_OUT_OTHERWISE if of_the_code else cause
        raise UsageError(
            f"no cluster is configured: {why}. The kubeconfig is {files}; set KUBECONFIG to another one, "
            "or correct it until `kubectl version` answers"
        ) from error


def _refused(error: ApiError, name: str, namespace: str) -> str:
    if error.status == 409:
        return (
            f"namespace {namespace} has a TrainingJob {name} already: delete it with `kubectl --namespace "
            f"{namespace} delete tj {name}`, or give the new one another name with --name"
        )
    if error.status == 404 and error.message.startswith("namespaces "):
        return (
            f"the cluster has no namespace {namespace}: create it with `kubectl create namespace "
            f"{namespace}`, or choose another one with --namespace"
        )
    if error.status == 404:
        return "the cluster does not know TrainingJobs: install the operator first"
    if error.status == 401:
        return "the API server does not know the user of the kubeconfig's context (401): log in again"
    if error.status == 403 and "cannot create resource" in error.message:
        return (
            f"you may not create TrainingJobs in namespace {namespace}: ask the cluster's administrator for "
            "the role edit there, or choose another namespace with --namespace. The API server says: "
            f"{error.message}"
        )
    return f"the API server refuses the job: {error}"


if __name__ == "__main__":
    sys.exit(main())
