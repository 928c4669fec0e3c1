"""What a starter says to a process is what that reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from elastic_ps.api.job import TrainingJobSpec, Worker
from elastic_ps.contract.env import ProcessEnvironment, read


def test_the_environment_of_a_process_says_which_one_it_is() -> None:
    spec = TrainingJobSpec(entrypoint="script:main", worker=Worker(processes=3))
    given = ProcessEnvironment(
        job="j", spec=spec, role="worker", index=1, addresses=("h:1",), local_rank=2, links=((5, 6),)
    )
    assert read(given.to_variables()) == given
    named = replace(given, hostname="pod")
    assert read(named.to_variables()) == named
    seen = replace(given, joined=Path("/tmp/joined"))
    assert read(seen.to_variables()) == seen
    crowded = replace(given, role="ps", crowded=True)
    assert read(crowded.to_variables()) == crowded
