"""`elastic_ps.collectives` among three processes: over torch.distributed, and over MPI with a real mpirun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing import mpirun
from tests.testing.addresses import addresses
from tests.testing.scripts import together
from tests.testing.tiers import per_change

LIMIT = 300
"""Seconds that the processes may take; it only ends a test that has failed."""
MODULE = together.__name__
Found = list[dict[str, str]]
"""For each process, check -> its traceback, or ""."""


def run(directory: Path, way: str) -> Found:
    """What became of the checks, which run one after the other."""
    variables = {**mpirun.variables(directory), "OMP_NUM_THREADS": "1"}
    if way == "mpi":
        commands = [(mpirun.command(together.SIZE, MODULE, directory), variables)]
    else:
        (address,) = addresses(1)
        host, _, port = address.partition(":")
        group = {"WORLD_SIZE": str(together.SIZE), "MASTER_ADDR": host, "MASTER_PORT": port}
        commands = [
            ([sys.executable, "-m", MODULE, str(directory)], {**variables, **group, "RANK": str(rank)})
            for rank in range(together.SIZE)
        ]
    running = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, env in commands
    ]
    try:
        printed = [process.communicate(timeout=LIMIT)[0] for process in running]
    finally:
        for process in running:
            mpirun.end(process)
    files = sorted(directory.glob("[0-9].json"))
    assert len(files) == together.SIZE, os.linesep.join(printed)
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("way", per_change(["torch", "mpi"], keep=["mpi"]))
def test_an_operation_gives_what_mpi_defines(tmp_path: Path, way: str) -> None:
    """One test for all operations: only one process of pytest starts the ranks."""
    found = run(tmp_path, way)
    expected = [name for name in vars(together) if name.startswith("check_")]
    failed = [
        f"rank {rank}, {check}: {text}" for rank, of in enumerate(found) for check, text in of.items() if text
    ]
    assert not failed, "\n".join(failed)
    assert [sorted(of) for of in found] == [sorted(expected)] * together.SIZE


def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("""
from elastic_ps import collectives
world = collectives.world()
if world.rank:
    raise ValueError("no such file")
world.barrier()
""")
    command = mpirun.command(2, "failing")
    process = subprocess.Popen(
        command, env=mpirun.variables(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        printed = process.communicate(timeout=LIMIT)[0]
    finally:
        mpirun.end(process)
    assert process.returncode
    assert "ValueError: no such file" in printed


def test_an_mpirun_of_another_mpi_is_noticed(tmp_path: Path) -> None:
    """MPI connects no process with another then, and each would do all of the work alone."""
    (tmp_path / "alone.py").write_text("from elastic_ps import collectives\ncollectives.world()\n")
    of_another = {"PMI_RANK": "0", "PMI_SIZE": "4"}  # MPICH's, which Open MPI does not read
    done = subprocess.run(
        [sys.executable, "-m", "alone"],
        env=mpirun.variables(tmp_path) | of_another,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode
    assert "mpirun has started 4 processes, but MPI connects this one with no other" in done.stderr
