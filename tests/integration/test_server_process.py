"""`python -m elastic_ps.server` from its start to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.api.status import Progress, ServerStatus
from elastic_ps.checkpoint.store import Store
from elastic_ps.contract import exits
from elastic_ps.contract.env import ProcessEnvironment
from tests.testing.addresses import addresses
from tests.testing.polling import LIMIT, eventually
from tests.testing.tiers import per_change

ROOT = Path(__file__).parents[2]


PROGRAM = ("-m", "elastic_ps.server")
MAIN = """
import sys
from pathlib import Path
from elastic_ps.process import lifecycle
from elastic_ps.server.__main__ import main
lifecycle.TERMINATION_LOG = Path(sys.argv[1])
sys.exit(main())
"""
AFTERWARDS = """
import sys, urllib.request
from elastic_ps.server.__main__ import main
status = main()
with urllib.request.urlopen(f"http://{sys.argv[1]}/healthz", timeout=60) as answer:
    print("afterwards:", answer.status, file=sys.stderr)
sys.exit(status)
"""
ASKED_AT_ONCE = """
import os, signal, sys
from elastic_ps.process import lifecycle
from elastic_ps.server.__main__ import main
lifecycle.importing = lambda: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(main())
"""


class Process:
    """A parameter server of its own, with its log in `directory`."""

    def __init__(
        self,
        directory: Path,
        bind: str = "",
        *,
        program: Sequence[str] = PROGRAM,
        checkpoints: Path | None = None,
    ) -> None:
        address, self._http = addresses(2)
        program = [part.replace("HTTP", self._http) for part in program]
        environment = ProcessEnvironment(
            job="job",
            spec=TrainingJobSpec.model_validate({"entrypoint": "train:main"}),
            role="ps",
            index=0,
            addresses=(address,),
            bind=bind or address,
            http=self._http,
            checkpoints=checkpoints,
        )
        self._log = directory / "log"
        with self._log.open("wb") as stream:
            self.child = subprocess.Popen(
                [sys.executable, *program],
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment.to_variables()},
                stderr=stream,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def page(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self._http}{path}", timeout=60) as answer:
            text: str = answer.read().decode()
            return text


@pytest.mark.parametrize("number", per_change([signal.SIGTERM, signal.SIGINT], keep=[signal.SIGTERM]))
def test_it_serves_until_it_is_asked_to_end(tmp_path: Path, number: signal.Signals) -> None:
    process = Process(tmp_path)
    try:
        eventually(lambda: "serves on" in process.said, f"it serves: {process.said}")
        assert 'elastic_ps_version{job="job"} 0' in process.page("/metrics")
        process.child.send_signal(number)
        assert process.child.wait(LIMIT) == 0
        assert "asked to stop" in process.said
    finally:
        process.child.kill()
        process.child.wait()


def test_it_answers_probes_as_long_as_the_process_lives(tmp_path: Path) -> None:
    """The kubelet writes a Warning event for each one that nobody answers."""
    process = Process(tmp_path, program=("-c", AFTERWARDS, "HTTP"))
    try:
        eventually(lambda: "serves on" in process.said, f"it serves: {process.said}")
        process.child.terminate()
        assert process.child.wait(LIMIT) == 0
        assert "afterwards: 200" in process.said
    finally:
        process.child.kill()
        process.child.wait()


def test_one_that_is_asked_to_end_while_it_imports_has_done_all_that_it_was_asked_to(tmp_path: Path) -> None:
    """Importing takes long. A worker or a person has nothing from it that could be lost."""
    process = Process(tmp_path, program=("-c", ASKED_AT_ONCE))
    assert process.child.wait(LIMIT) == 0
    assert "Traceback" not in process.said


def test_it_leaves_how_far_training_was_where_kubernetes_looks_for_it(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    process = Process(tmp_path, program=("-c", MAIN, str(log)))
    try:
        eventually(lambda: "serves on" in process.said, f"it serves: {process.said}")
        process.child.terminate()
        assert process.child.wait(LIMIT) == 0
    finally:
        process.child.kill()
        process.child.wait()
    words = ServerStatus.model_validate_json(log.read_text())
    assert (words.job, words.term, words.ready, words.progress) == ("job", 1, False, Progress())


def test_last_words_are_short_whatever_a_script_reports() -> None:
    progress = Progress(version=3, stopped="\N{SNOWMAN}" * 9000, metrics={f"m{i}": 1.0 for i in range(9000)})
    status = ServerStatus(
        job="j" * 52, shard=0, shards=1, term=1, ready=True, progress=progress, problem="x" * 9000
    )
    words = status.last_words()
    assert len(words.encode()) < 4096
    assert ServerStatus.model_validate_json(words).progress.version == 3


@pytest.mark.parametrize(
    ("bind", "message"),
    per_change(
        [
            ("rdma:host:1", "error: 'rdma:host:1' is not an address"),
            ("192.0.2.1:1", "error: cannot listen on 192.0.2.1:1"),
        ],
        keep=[("192.0.2.1:1", "error: cannot listen on 192.0.2.1:1")],
    ),
)
def test_where_it_cannot_listen_it_ends_with_a_sentence(tmp_path: Path, bind: str, message: str) -> None:
    process = Process(tmp_path, bind)
    assert process.child.wait(LIMIT) == exits.INVALID
    assert message in process.said
    assert "Traceback" not in process.said


def test_one_that_waits_for_its_disk_says_so_and_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    earlier = Store(checkpoints)
    earlier.claim("job", "an earlier run", adopt=True, wait=True)
    process = Process(tmp_path, checkpoints=checkpoints)
    try:
        eventually(lambda: "waiting: " in process.said, f"it waits: {process.said}")
        status = ServerStatus.model_validate_json(process.page("/status"))
        assert (status.ready, status.term) == (False, 0)
        assert status.problem.startswith(f"{checkpoints} is still used by an earlier run of job")
        process.child.send_signal(signal.SIGTERM)
        assert process.child.wait(LIMIT) == 0
        assert "asked to end while waiting" in process.said
    finally:
        process.child.kill()
        process.child.wait()
        earlier.close()


def test_one_whose_place_another_has_taken_ends_with_a_status_of_its_own(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    process = Process(tmp_path, checkpoints=checkpoints)
    try:
        eventually(lambda: "serves on" in process.said, f"it serves: {process.said}")
        Store(checkpoints).next_term()
        assert process.child.wait(LIMIT) == exits.FENCED
        assert "another parameter server has taken over" in process.said
    finally:
        process.child.kill()
        process.child.wait()
