"""The examples with other libraries, and with tables that grow, as jobs on a real cluster."""

from __future__ import annotations

import tomllib
from datetime import timedelta
from typing import Any

import pytest
import yaml

from tests.e2e.cluster import Cluster, build_image
from tests.e2e.cluster.shell import take_long
from tests.testing.operator_process import ROOT, TRAINING_IMAGE, Jobs

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("definition", "training_images", "operator")]

IMAGE = "localhost/elastic-ps-integrations:test"
EXTRAS = ("hf", "lightning", "data")


@pytest.fixture(scope="session")
def integrations(local_cluster: Cluster) -> str:
    """The training image with the libraries of the extras."""
    take_long()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = " ".join(package for extra in EXTRAS for package in extras[extra])
    build_image(ROOT / "Dockerfile", ROOT, IMAGE, {"PACKAGES": packages})
    local_cluster.load_image(IMAGE)
    return IMAGE


def trained(jobs: Jobs, name: str, **fields: Any) -> dict[str, Any]:
    """The status of an example's job that has succeeded."""
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples" / name / "job.yaml").read_text())
    job["spec"] |= {"image": jobs.image, **fields}
    jobs.cluster.apply(job, namespace=jobs.namespace)
    jobs.wait_status(name, phase="Succeeded", timeout=timedelta(minutes=10))
    status: dict[str, Any] = jobs.job(name)["status"]
    assert status["progress"]["recordsApplied"] == status["progress"]["recordsExpected"] > 0
    return status


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("transformers", {"output": "/tmp/model"}),
        ("peft", {"output": "/tmp/model"}),
        ("accelerate", {}),
        ("lightning", {"output": "/tmp/model"}),
        ("fabric", {"output": "/tmp/model"}),
        ("shards", {"folder": "/tmp/shards"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_scripts_of_other_libraries_train(
    local_cluster: Cluster, namespace: str, integrations: str, name: str, arguments: dict[str, Any]
) -> None:
    status = trained(Jobs(local_cluster, namespace, integrations), name, arguments=arguments)
    assert status["progress"]["metrics"]


def test_the_status_names_the_tables_that_grow(local_cluster: Cluster, namespace: str) -> None:
    jobs = Jobs(local_cluster, namespace, TRAINING_IMAGE)
    (table,) = trained(jobs, "clicks", parameterServer={"replicas": 1})["tables"]
    assert table["rows"] == table["admitted"] > 0
