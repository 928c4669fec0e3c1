"""Run the unit tests with the oldest versions that pyproject.toml allows.

The versions are installed into an environment of their own, build/bounds, which is made again only when they
change. What the dependencies themselves need comes in its newest version, as for somebody who installs the
package today. torch and the tools of the tests come in the version of constraints.txt.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("report", "examples", "operator", "zstd", "blosc")
NOT_LOWEST = (
    "torch",
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "psutil",
    "helm-python-sdk",
    "kubernetes-validate",
    "cyclonedx-python-lib",
)
TESTS = ("tests/unit", "tests/integration/test_grpc.py", "tests/integration/test_transport.py")


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


def wanted() -> list[str]:
    """What the environment holds, as requirements for pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    pinned = lowest(text for text in requirements if Requirement(text).name not in NOT_LOWEST)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return pinned + [line for line in lines if line.partition("==")[0] in NOT_LOWEST]


def environment(requirements: list[str]) -> Path:
    """The Python of an environment that holds exactly these, made if it is not there."""
    folder = ROOT / "build" / "bounds"
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    if not (stamp.is_file() and stamp.read_text().splitlines() == requirements):
        venv.create(folder, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*pip, *requirements]).returncode:
            raise SystemExit("these versions cannot be installed together; raise a bound in pyproject.toml")
        stamp.write_text("\n".join(requirements))
    return python


def main() -> int:
    """The command; returns its exit status."""
    requirements = wanted()
    print("lowest versions:", *requirements, flush=True)
    python = environment(requirements)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *TESTS]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'operator'}"}
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
