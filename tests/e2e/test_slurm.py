"""`srun elastic-ps run JOB`, as in docs/guides/mpi.md, with a real Slurm: three nodes on this machine.

Slurm's packages are unpacked into a directory and laid over /usr in a mount namespace, so nothing is
installed. A network namespace has its ports to itself, and with the PID namespace all its processes end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster.apt import fetch_binaries, require_debian
from tests.e2e.cluster.errors import ClusterUnavailable
from tests.e2e.cluster.shell import run
from tests.e2e.conftest import unavailable
from tests.testing import mpirun
from tests.testing.polling import LIMIT

pytestmark = pytest.mark.nightly

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"),
    *("libpmix2", "libevent-core-2.1-7", "libevent-pthreads-2.1-7", "libhwloc15", "libmunge2", "libnuma1"),
)
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={directory}/controller
SlurmctldPidFile={directory}/controller.pid
SlurmdSpoolDir={directory}/%n
SlurmdPidFile={directory}/%n.pid
TmpFS={directory}/%n
SlurmdParameters=config_overrides
NodeName=n[0-2] NodeHostname=localhost Port=[6820-6822] CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

INSIDE = """\
set -e
mount -t overlay overlay -o "lowerdir=$1/usr:/usr" /usr
ip link set lo up
ip link add eth0 type veth peer name eth1  # names are looked up, and MPI speaks, over more than the loopback
ip link set eth1 up
ip link set eth0 up
ip address add 10.77.0.1/24 dev eth0
export SLURM_CONF="$2/slurm.conf"
slurmctld -D > "$2/controller.log" 2>&1 &
for node in n0 n1 n2; do
    slurmd -D -N $node > "$2/$node.log" 2>&1 &
done
tries=0
until [ "$(sinfo --noheader --states=idle --format=%D)" = 3 ]; do
    tries=$((tries + 1))
    [ $tries -lt 300 ] || { tail -n 20 "$2"/*.log >&2; exit 1; }
    sleep 0.2
done
shift 2
exec "$@"
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a Slurm in it."""
    try:
        require_debian()
    except ClusterUnavailable as error:
        unavailable(error)
    directory = tmp_path_factory.mktemp("slurm")
    for package in fetch_binaries(PACKAGES, directory):
        run(["dpkg-deb", "-x", package, directory])
    programs = directory / "usr" / "sbin"
    for name in ("slurmctld", "slurmd", "slurmstepd"):
        (programs / name).symlink_to(f"{name}-wlm")  # as Debian's alternatives would be
    (library,) = directory.glob("usr/lib/*/pmix2/lib/libpmix.so.2")
    library.with_name("libpmix.so").symlink_to(library.name)  # as libpmix-dev has it; the plugin loads this
    return directory


def srun(slurm: Path, directory: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run `srun WORDS` on a Slurm that lives as long as this call."""
    for name in ("controller", "n0", "n1", "n2"):
        (directory / name).mkdir(exist_ok=True)
    (directory / "slurm.conf").write_text(CONFIGURATION.format(directory=directory))
    apart = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    return subprocess.run(
        [*apart, "sh", "-c", INSIDE, "sh", str(slurm), str(directory), "srun", *map(str, words)],
        env=mpirun.variables(directory),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        check=False,
    )


def test_srun_starts_a_job_on_three_nodes(slurm: Path, tmp_path: Path) -> None:
    job = {
        "apiVersion": "elastic-ps.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "under-slurm"},
        "spec": {
            "entrypoint": "tests.testing.scripts.steady:main",
            "arguments": {"records": 300, "widths": [6, 16, 1]},
        },
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    program = (sys.executable, "-m", "elastic_ps.cli", "run", "job.yaml", "--report", "out")
    done = srun(slurm, tmp_path, "--mpi=pmix", "--nodes=3", "--ntasks=4", *program)
    assert done.returncode == 0, done.stderr
    assert "300 of 300 in the model" in done.stdout
    report = json.loads((tmp_path / "out" / "run.json").read_text())
    assert report["phase"] == "Succeeded"
    assert {member["id"] for member in report["workers"]} == {0, 1, 2}


def test_the_hostfile_of_an_allocation_names_its_nodes(slurm: Path, tmp_path: Path) -> None:
    """With the variables as Slurm sets them; `--nodes=3 --ntasks=4` are 2, 1 and 1 tasks."""
    script = f"{sys.executable} -m elastic_ps.cli hostfile"
    done = srun(slurm, tmp_path, "--nodes=3", "--ntasks=4", "sh", "-c", f"[ $SLURM_PROCID != 0 ] || {script}")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert lines == ["n0 slots=2", "n1 slots=1", "n2 slots=1"]
