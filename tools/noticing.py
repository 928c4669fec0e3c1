"""Which unit tests run which function, and whether they notice that it has changed.

Each run is a fork of this process, which has imported torch and the test tools already, on a copy of the
project. The first one writes down the functions that each test calls. A changed function is then shown only
to the tests that call it, the fastest first, and to those that start processes, which may call it there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest

TREE = (
    "benchmarks",
    "docs",
    "elastic_ps",
    "operator",
    "tests",
    "charts",
    "manifests",
    "tools",
    "pyproject.toml",
)
LIMIT = 30.0
"""Seconds that tests may take, and `SLACK` times as long as they took without a change; then they hang."""
SLACK = 4
DOUBTFUL = 10.0
"""Seconds after which a failure may come from a machine that does other things, too."""
PROCESSES = frozenset({"subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec"})
OPTIONS = (
    *("-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of what is imported before the fork
)
EVERY_TEST = ""

Outcome = Literal["alive", "noticed", "late"]


@dataclass(frozen=True)
class Run:
    """What became of a run: "alive" if all tests passed, "late" if they had not ended at the limit.

    `test` is the one that failed or hung after `of_test` seconds, "" if pytest did not come as far as a test.
    """

    outcome: Outcome
    test: str
    seconds: float
    of_test: float


@dataclass(frozen=True)
class Reach:
    """What the tests did without a change.

    Args:
        seconds: that each test took.
        callers: of the functions, by the line at which they begin, of each file. The name of a test file
            stands for all its tests, `EVERY_TEST` for all that there are.
        spawning: the tests that start processes.
    """

    seconds: dict[str, float]
    callers: dict[str, dict[int, set[str]]]
    spawning: set[str]

    def of(self, file: str, lines: Collection[int]) -> list[str]:
        """The tests that may notice a change of functions that begin in these lines, the fastest first."""
        functions = self.callers.get(file, {})
        calling = set().union(*(tests for line, tests in functions.items() if line in lines))
        found = [test for test in self.seconds if calling & {test, test.partition("::")[0], EVERY_TEST}]
        found += [test for test in self.spawning if test not in found]
        return sorted(found, key=lambda test: (test in self.spawning, self.seconds[test]))


class _Calls:
    """A pytest plugin that writes down which test calls which functions of the files below `tree`."""

    def __init__(self, tree: Path) -> None:
        self._below = f"{tree}/"
        self._now = EVERY_TEST  # what runs while tests are imported
        self._seen = set[tuple[str, str, int]]()
        self.seconds = dict[str, float]()
        self.spawning = set[str]()

    def trace(self, frame: FrameType, *_: object) -> None:
        """See sys.settrace."""
        code = frame.f_code
        if code.co_filename.startswith(self._below):
            self._seen.add((self._now, code.co_filename, code.co_firstlineno))

    def audit(self, event: str, *_: object) -> None:
        """See sys.addaudithook."""
        if event in PROCESSES:
            self.spawning.add(self._now)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now, began = item.nodeid, time.monotonic()
        result = yield
        self.seconds[item.nodeid] = time.monotonic() - began
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before = self._now
        if fixturedef.scope != "function":
            self._now = before.partition("::")[0]
        try:
            return (yield)
        finally:
            self._now = before

    def written(self, file: Path) -> None:
        """Write it down for the parent process."""
        callers: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for test, name, line in self._seen:
            callers[name.removeprefix(self._below)][line].append(test)
        found = {
            "seconds": self.seconds,
            "spawning": sorted(self.spawning & self.seconds.keys()),
            "callers": callers,
        }
        file.write_text(json.dumps(found))


class _Last:
    """A pytest plugin that writes down which test has begun last."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file.write_text(nodeid)


class Project:
    """A copy of the project, in which one file may differ."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._found, self._output = tree / "found", tree / "output"

    def reach(self, tests: Sequence[str]) -> Reach:
        """Run these test files on the copy as it is; raises SystemExit if one of them fails."""

        def traced() -> int:
            calls = _Calls(self._tree)
            sys.addaudithook(calls.audit)
            threading.settrace(calls.trace)
            sys.settrace(calls.trace)
            status = _pytest([], tests, calls)
            sys.settrace(None)
            calls.written(self._found)
            return status

        outcome = self._forked(traced, math.inf).outcome
        if outcome != "alive":
            raise SystemExit(f"{self._output.read_text()}\nthe unit tests fail without any change")
        found = json.loads(self._found.read_text())
        callers = {
            file: {int(line): set(names) for line, names in functions.items()}
            for file, functions in found["callers"].items()
        }
        return Reach(found["seconds"], callers, set(found["spawning"]))

    def run(self, tests: Sequence[str], limit: float) -> Run:
        """Run tests on the copy as it is, up to the first that fails."""
        return self._forked(lambda: _pytest(["-x"], tests, _Last(self._found)), limit)

    @contextlib.contextmanager
    def changed(self, file: str, source: str) -> Iterator[None]:
        """The file has this source meanwhile."""
        place = self._tree / file
        original = place.read_text()
        place.write_text(source)
        try:
            yield
        finally:
            place.write_text(original)

    def _forked(self, function: Callable[[], int], limit: float) -> Run:
        self._found.write_text("")
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            self._child(function)
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return self._ended("noticed" if status else "alive", began)
            if time.monotonic() - began > limit:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return self._ended("late", began)
            time.sleep(0.02)

    def _ended(self, outcome: Outcome, began: float) -> Run:
        """Now; the file of the last test is as old as that test."""
        ended = time.monotonic()
        of_test = time.time() - self._found.stat().st_mtime
        return Run(outcome, self._found.read_text(), ended - began, of_test)

    def _child(self, function: Callable[[], int]) -> None:
        os.setsid()
        os.chdir(self._tree)
        output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        paths = [str(self._tree), str(self._tree / "operator")]
        sys.path[:0] = paths
        # The processes that tests start import the copy, too.
        os.environ |= {"PYTHONPATH": ":".join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        code = 1
        try:
            code = function()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)


def _pytest(options: Iterable[str], tests: Iterable[str], plugin: object) -> int:
    return int(pytest.main([*OPTIONS, *options, *tests], [plugin]))


def noticed(
    project: Project, reach: Reach, file: str, plain: str, changed: str, lines: Collection[int]
) -> Outcome:
    """Whether the tests notice that `file` has the source `changed` instead of `plain`.

    A test that fails or hangs only because the machine does other things must not count. So one that failed
    late is run alone, on either source: it has noticed the change if it passes, and fails again.

    Args:
        lines: in which the changed function begins, as they are in the project.
    """
    tests = reach.of(file, lines)
    while tests:
        with project.changed(file, changed):
            run = project.run(tests, LIMIT + SLACK * sum(reach.seconds[test] for test in tests))
        if run.outcome == "alive" or not run.test or run.of_test < DOUBTFUL:
            return run.outcome
        with project.changed(file, plain):
            alone = project.run([run.test], math.inf)
        with project.changed(file, changed):
            again = project.run([run.test], LIMIT + SLACK * alone.seconds)
        if alone.outcome == "alive" != again.outcome:
            return again.outcome
        tests.remove(run.test)
    return "alive"


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Project]:
    """A copy of what the unit tests need."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name).resolve()
        for part in TREE:
            source, target = root / part, tree / part
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(tree / ".hypothesis")
        yield Project(tree)
