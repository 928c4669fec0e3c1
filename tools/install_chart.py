"""Installs the chart, or removes it, with Helm's Python package: for those without the `helm` command.

The cluster is that of `$KUBECONFIG`, else of `~/.kube/config`. A release that is there already is upgraded,
with the values that it has. It is an ordinary release: the `helm` command and this script take turns as one
likes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from helm_python import Config, HelmError, HelmNotFoundError

from tools.render_install import CHART, NAMESPACE

RELEASE = "elastic-ps"
TIMEOUT = 180
"""Seconds that the operator's pod has to become ready."""

MANAGER = "helm"
"""The name under which the `helm` command applies what it installs."""


def install(config: Config) -> None:
    """Install or upgrade, and wait until the operator is ready.

    Raises:
        HelmError: the cluster cannot be reached, or the operator does not become ready in time.
    """
    try:
        config.status(RELEASE)
    except HelmNotFoundError:
        config.install(str(CHART), RELEASE, create_namespace=True, wait="watcher", timeout=TIMEOUT)
    else:
        config.upgrade(str(CHART), RELEASE, wait="watcher", timeout=TIMEOUT)


def be_helm() -> None:
    """Go on as a program of the name `helm`.

    The API server remembers who has applied which field, and refuses it to others. Helm's library takes for
    that the name of the program that it is in.
    """
    name = sys.orig_argv[0]
    if Path(name).name != MANAGER:
        # Beside Python's own name, where a virtual environment is found by it. No file has to be there.
        os.execv(sys.executable, [str(Path(sys.executable).with_name(MANAGER)), *sys.orig_argv[1:]])


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when done, 1 when Helm failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("install", "uninstall"))
    action = parser.parse_args(arguments).action
    try:
        with Config(namespace=NAMESPACE) as config:
            if action == "install":
                install(config)
                print(f"the operator runs in namespace {NAMESPACE}")
            else:
                config.uninstall(RELEASE, ignore_not_found=True)
                print("the operator is gone; the definition and the jobs stay")
    except HelmError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    be_helm()
    sys.exit(main())
