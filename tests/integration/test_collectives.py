"""`elastic_ps.collectives` among three processes: over torch.distributed, and over MPI with a real mpirun."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.testing import mpirun
from tests.testing.addresses import addresses
from tests.testing.scripts import together
from tests.testing.tiers import per_change

CHECKS = [name for name in vars(together) if name.startswith("check_")]
LIMIT = 300
"""Seconds that the processes may take; it only ends a test that has failed."""
MODULE = together.__name__
Found = list[dict[str, str]]
"""For each process, check -> its traceback, or ""."""


@pytest.fixture(scope="module", params=per_change(["torch", "mpi"], keep=["mpi"]))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What became of the checks; all of them run in one start of the processes."""
    directory = tmp_path_factory.mktemp("together")
    variables = {**mpirun.variables(directory), "OMP_NUM_THREADS": "1"}
    if request.param == "mpi":
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


@pytest.mark.parametrize("check", CHECKS)
def test_an_operation_gives_what_mpi_defines(found: Found, check: str) -> None:
    if all(check not in of for of in found):
        pytest.skip("an operation before it has failed")
    failed = {rank: text for rank, of in enumerate(found) if (text := of.get(check, "it was not called"))}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
