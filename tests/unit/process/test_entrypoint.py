"""What a worker runs, and what is refused before."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest

from elastic_ps.contract import exits
from elastic_ps.errors import ConnectionLost, DeadlineExceeded, InvalidJob, RefusalCode, Refused
from elastic_ps.process.entrypoint import describe, load
from elastic_ps.worker.script import status_of

CALLED: list[tuple[Any, ...]] = []


def main(epochs: int, lr: float = 0.1, *, name: str = "x") -> None:
    CALLED.append((epochs, lr, name))


def anything(**arguments: Any) -> None:
    CALLED.append(tuple(arguments.items()))


def annotated(
    epochs: int = 1,
    lr: float | None = None,
    name: str = "",
    quick: bool = False,
    sizes: list[int] | None = None,
    either: Optional[int] = None,  # noqa: UP045 - as scripts write it
) -> None:
    CALLED.append((epochs, lr, name, quick, sizes, either))


def unreadable(epochs: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    CALLED.append((epochs,))


def _converted(function: Callable[[int], None]) -> Callable[[str], None]:
    @functools.wraps(function)
    def call(epochs: str) -> None:
        function(int(epochs))

    return call


@_converted
def converting(epochs: int) -> None:
    CALLED.append((epochs,))


def implicit(limit: int = None) -> None:  # type: ignore[assignment]  # noqa: RUF013 - as scripts write it
    CALLED.append((limit,))


NOT_A_FUNCTION = 3


def test_the_arguments_are_passed_by_name() -> None:
    CALLED.clear()
    load(f"{__name__}:main", {"epochs": 3, "name": "y"})()
    load(f"{__name__}:anything", {"a": 1})()
    assert CALLED == [(3, 0.1, "y"), (("a", 1),)]


def test_arguments_may_be_what_their_annotations_say() -> None:
    CALLED.clear()
    load(f"{__name__}:annotated", {"lr": 1, "sizes": [1], "either": 2})()
    load(f"{__name__}:annotated", {"lr": None, "quick": True, "sizes": "anything"})()
    load(f"{__name__}:unreadable", {"epochs": "3"})()
    load(f"{__name__}:converting", {"epochs": "3"})()
    load(f"{__name__}:implicit", {"limit": None})()
    assert CALLED == [(1, 1, "", False, [1], 2), (1, None, "", True, "anything", None), ("3",), (3,), (None,)]


def test_the_traceback_of_a_script_begins_in_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Public names of Python, which the script changes: they are as before after this test.
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "train.py"
    path.write_text("def train():\n    raise ValueError('no')\n\ntrain()\n")
    with pytest.raises(ValueError, match="no") as failed:
        load("elastic_ps.process.entrypoint:run_script", {"path": str(path)})()
    assert failed.value.__traceback__ is not None
    text = describe(failed.value.with_traceback(failed.value.__traceback__.tb_next))  # without this test
    first, *_ = (line for line in text.splitlines() if line.startswith("  File "))
    assert first == f'  File "{path}", line 4, in <module>'
    assert text.endswith("ValueError: no\n")


def test_where_modules_are_looked_for_is_said_if_the_entrypoints_own_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "needing.py").write_text("import not_there_either\n")
    with pytest.raises(InvalidJob, match=f"in the current directory, {tmp_path}"):
        load("not_there.train:main", {})
    with pytest.raises(InvalidJob) as refused:
        load("needing:main", {})
    assert "current directory" not in str(refused.value)


def test_a_module_may_parse_the_arguments_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of `--check JOB`, and of `elastic-ps evaluate DIR`, are not for it: a worker has none."""
    monkeypatch.chdir(tmp_path)
    Path("parses_at_import.py").write_text(
        "import argparse\nargparse.ArgumentParser().parse_args()\nmain = dict\n"
    )
    monkeypatch.setattr(sys, "argv", ["script", "--check", "{}"])
    load("parses_at_import:main", {})


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        (
            "main",
            {"epochs": 1, "learning_rate": 1},
            "unexpected keyword argument 'learning_rate'. Given:",
        ),
        ("main", {}, "missing a required argument: 'epochs'. Given: none"),
        ("main", {"epochs": "3"}, r'spec.arguments: epochs has to be int, .* it is "3"'),
        ("annotated", {"epochs": 1.5}, "epochs has to be int, .* it is 1.5"),
        ("annotated", {"lr": "1e-3"}, 'lr has to be float or null, .* it is "1e-3"'),
        ("annotated", {"name": 3}, "name has to be str, .* it is 3"),
        ("annotated", {"quick": "yes"}, 'quick has to be bool, .* it is "yes"'),
        ("annotated", {"either": "1"}, 'either has to be int or null, .* it is "1"'),
        ("NOT_A_FUNCTION", {}, "must be a function; it is of type int"),
        ("missing", {}, "has no 'missing'"),
    ],
)
def test_what_cannot_be_called_is_refused(name: str, arguments: dict[str, Any], said: str) -> None:
    CALLED.clear()
    with pytest.raises(InvalidJob, match=said):
        load(f"{__name__}:{name}", arguments)
    assert CALLED == []


def test_a_folder_and_a_builtin_module_are_named_where_a_function_is_missing() -> None:
    for name in ("docs", "sys"):
        said = f"{name}:main does not exist: {name}, which comes from no file, has no"
        with pytest.raises(InvalidJob, match=said):
            load(f"{name}:main", {})


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModuleNotFoundError("No module named 'pandas'"), exits.INVALID),
        (ImportError("cannot import name 'f'"), exits.INVALID),
        (SyntaxError("invalid syntax"), exits.INVALID),
        (RuntimeError("out of memory"), 1),
        (Refused(RefusalCode.HUNG, "too late"), exits.HUNG),
    ],
)
def test_a_script_that_would_fail_alike_each_time_is_not_started_again(error: Exception, status: int) -> None:
    assert status_of(error) == status


@pytest.mark.parametrize(
    "error",
    [ConnectionLost("silent"), DeadlineExceeded("late"), Refused(RefusalCode.NOT_READY, "no model yet")],
)
def test_a_worker_whose_parameter_server_stays_away_has_not_failed(error: Exception) -> None:
    """Else an outage would fail each job with more workers than `backoffLimit`, though nothing is lost."""
    assert status_of(error) == exits.SILENT
