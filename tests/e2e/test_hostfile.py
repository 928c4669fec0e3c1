"""`elastic-ps hostfile` and `mpirun --hostfile`, as in docs/guides/mpi.md: hosts are network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.network import Hosts, address
from tests.testing import mpirun
from tests.testing.polling import LIMIT

ROOT = Path(__file__).parents[2]

ENTER = """#!/bin/sh
# Runs a command on a host: ENTER HOST COMMAND..., as ssh would.
host=$1
shift
exec ip netns exec {prefix}${{host#host}} unshare --uts --mount sh -c '
    hostname "$0" && mount --bind {names} /etc/hosts && exec sh -c "$*"' "$host" "$@"
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Three, with a link of their own to a switch."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces need root, and the programs ip and tc")
    made = Hosts(3, gbit=10)
    yield made
    made.close()


def written_by_command(slurm: dict[str, str]) -> str:
    """What `elastic-ps hostfile` prints in an allocation of Slurm."""
    command = [sys.executable, "-m", "elastic_ps.cli", "hostfile"]
    variables = {**os.environ, **slurm, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert "mpirun -n 4" in done.stdout
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize(("options", "way"), [("", "tcp"), ("--transport mpi", "mpi")])
def test_workers_on_other_hosts_train(hosts: Hosts, tmp_path: Path, options: str, way: str) -> None:
    names = [f"host{number}" for number in range(3)]
    known = tmp_path / "names"
    known.write_text("".join(f"{address(number)} {name}\n" for number, name in enumerate(names)))
    enter = tmp_path / "enter"
    enter.write_text(ENTER.format(prefix=hosts.namespace(0).removesuffix("0"), names=known))
    enter.chmod(0o755)
    hostfile = tmp_path / "hosts"
    hostfile.write_text(
        written_by_command({"SLURM_JOB_NODELIST": "host[0-2]", "SLURM_TASKS_PER_NODE": "1,2,1"})
    )
    job = {
        "apiVersion": "elastic-ps.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "hostfile"},
        "spec": {
            "entrypoint": "tests.testing.scripts.steady:main",
            "arguments": {"records": 300, "widths": [6, 16, 1]},
        },
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    program = Path(sys.executable).with_name("mpirun")
    start = f"-n 4 --hostfile {hostfile} --prtemca plm_ssh_agent {enter} -x PYTHONPATH -x XDG_STATE_HOME"
    command = f"{sys.executable} -m elastic_ps.cli run {tmp_path}/job.yaml --report {tmp_path}/out {options}"
    run = subprocess.Popen(
        [enter, "host0", f"{program} {start} {command}"],
        env=mpirun.variables(tmp_path),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = run.communicate(timeout=3 * LIMIT)
    finally:
        mpirun.end(run)
    assert run.returncode == 0, err
    assert "300 of 300 in the model" in out
    report = json.loads((tmp_path / "out" / "run.json").read_text())
    assert report["phase"] == "Succeeded"
    ways = {member["id"]: member["transport"] for member in report["workers"]}
    assert ways == dict.fromkeys(range(3), way)
