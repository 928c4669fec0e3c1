"""What a process does about its own life."""

from __future__ import annotations

import logging
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from elastic_ps.contract.env import ProcessEnvironment
from elastic_ps.errors import InvalidJob
from elastic_ps.process import lifecycle
from elastic_ps.process.lifecycle import import_own
from tests.testing import machine
from tests.testing.harness import make_spec
from tests.testing.polling import LIMIT


@pytest.mark.parametrize("failure", ["raise MemoryError('no room')", "raise RecursionError('no room')"])
def test_a_server_that_loses_a_thread_ends_and_says_which(failure: str) -> None:
    """Else it looks healthy and never answers again."""
    program = f"""
import threading
from elastic_ps.process import lifecycle
from elastic_ps.contract.env import ProcessEnvironment

def work():
    {failure}

lifecycle.end_if_a_thread_fails()
threading.Thread(target=work, name="ticker", daemon=True).start()
threading.Event().wait(60)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert ended.returncode == 1
    assert "in work" in ended.stderr, "the traceback"
    assert "error: the thread ticker has failed:" in ended.stderr
    assert "no room" in ended.stderr.splitlines()[-1]


def test_signals_that_interrupt_one_another_may_set_an_alarm() -> None:
    """With `threading.Event` in its place it waits for ever, after a thousand signals or so."""
    program = """
import signal, time
from elastic_ps.process.lifecycle import Alarm

alarm = Alarm()
heard = []
signal.signal(signal.SIGALRM, lambda *_: (alarm.set(), heard.append(1)))
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
while len(heard) < 5000:
    assert alarm.wait(60)
    alarm.clear()
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT)


LATE = """
import ctypes, sys
from elastic_ps.contract import exits
from elastic_ps.process import lifecycle
exits.print_stacks_on_request()
lifecycle.end_soon()
libc = ctypes.CDLL(None)
libc.on_exit(getattr(libc, "raise"), None)
sys.exit(10)
"""
"""Its exit status is also SIGUSR1's number, which C's `raise` gets when Python has ended, and sends."""


def test_a_process_on_its_way_out_is_not_killed_by_whoever_asks_where_it_is() -> None:
    assert int(signal.SIGUSR1) == 10
    assert subprocess.run([sys.executable, "-c", LATE], check=False).returncode == 10


def test_an_alarm_is_set_until_it_is_cleared() -> None:
    alarm = lifecycle.Alarm()
    assert not alarm.is_set()
    assert not alarm.wait(0.01)
    for _ in range(3):
        alarm.set()
        alarm.set()
        assert alarm.is_set()
        assert alarm.wait(60)
        assert alarm.wait(0)
        alarm.clear()
        assert not alarm.is_set()
        assert not alarm.wait(0.01)


def test_an_alarm_waits_no_longer_than_it_is_told() -> None:
    """Its thread may stand still until the time is over, at any moment of the wait."""

    def wait() -> None:
        for _ in range(1000):
            lifecycle.Alarm().wait(1e-6)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(LIMIT)
    assert not waiting.is_alive()


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        (None, 64),
        ("max 100000", 64),
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("10000 100000", 1),
        ("", 64),
    ],
)
def test_a_container_may_have_less_than_the_cores_of_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, cores: int
) -> None:
    machine.has_cores(monkeypatch, 64)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert lifecycle.usable_cores(tmp_path) == cores


def test_a_server_takes_the_descriptors_that_it_may_have() -> None:
    program = (
        "import resource\n"
        "from elastic_ps.process import lifecycle\n"
        "_, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))\n"
        "lifecycle.take_descriptors()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT)


@pytest.mark.parametrize(
    "text", ["raise SystemExit(0)", "import argparse; argparse.ArgumentParser().parse_args(['x'])"]
)
def test_a_module_that_ends_the_process_when_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """A training script without `if __name__ == "__main__"`. A server would end as if all were well."""
    name = f"a_script_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidJob, match=f"^the codec {name}:Codec cannot be imported: SystemExit: "):
        import_own(f"{name}:Codec", what="the codec", whose="the workers")


@pytest.mark.nightly
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_the_memory_of_freed_gradients_is_there_for_the_next_step() -> None:
    """Else the system fills it with zeros, page by page, in each step again."""
    program = """
import resource
import torch
from elastic_ps.process import lifecycle
from elastic_ps.contract.env import ProcessEnvironment

def step():
    gradients = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(40)]

lifecycle.keep_freed_memory()
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    environment = {name: value for name, value in os.environ.items() if not _sets_malloc(name)}
    faults = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=LIMIT, check=True, env=environment,
    )  # fmt: skip
    pages = 10 * (40 << 20) // resource.getpagesize()
    assert int(faults.stdout) < pages / 50


@pytest.mark.parametrize("variable", ["", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_a_users_settings_of_the_memory_stand(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in filter(_sets_malloc, list(os.environ)):
        monkeypatch.delenv(name)
    if variable:
        monkeypatch.setenv(variable, "4")
    library = Mock()
    # What is asked of the C library, which cannot say its settings.
    monkeypatch.setattr("ctypes.CDLL", lambda _: library)
    lifecycle.keep_freed_memory()
    assert library.mallopt.called != bool(variable)


def _sets_malloc(name: str) -> bool:
    return name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"


def test_a_full_disk_does_not_keep_a_process_from_what_it_has_to_do_before_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lifecycle.leave_reason("it was asked to end", tmp_path)  # which cannot be written to
    assert f"cannot write the reason of this end to {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_with_the_output_does_not_fail_the_script(unbuffered: str) -> None:
    here = ProcessEnvironment(job="job", spec=make_spec(), role="worker", index=3, addresses=("localhost:1",))
    script = (
        "from elastic_ps.contract import env; from elastic_ps.process import lifecycle; import sys\n"
        "lifecycle.begin(env.read())\n"
        "print('a step', flush=True); print('another step', file=sys.__stdout__)\n"
        "sys.stdout.buffer.write(b'bytes'); sys.stdout.buffer.flush()\n"
        "print('the end', file=sys.stderr)"
    )
    variables = {**os.environ, **here.to_variables(), "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], env=variables, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (0, "the end\n")


def test_a_script_sets_up_logging_as_under_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root, ours, file = logging.getLogger(), logging.getLogger("elastic_ps"), tmp_path / "own.log"
    levels = root.level, ours.level
    here = ProcessEnvironment(job="job", spec=make_spec(), role="worker", index=3, addresses=("localhost:1",))
    with monkeypatch.context() as patched:  # pytest has set up logging, too
        for logger in (root, ours):
            patched.setattr(logger, "handlers", [])
        patched.setattr(ours, "propagate", True)
        root.setLevel(logging.WARNING)
        lifecycle.begin(here)
        assert (root.handlers, root.level) == ([], logging.WARNING)
        logging.basicConfig(filename=file, level=logging.DEBUG, format="OWN %(message)s")
        logging.debug("a step")
        logging.getLogger("elastic_ps.worker.runtime.runtime").info("joined")
        root.handlers[0].close()
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    assert file.read_text() == "OWN a step\n"
    assert re.fullmatch(r"\S+ \S+ worker-3 INFO joined\n", capfd.readouterr().err)
