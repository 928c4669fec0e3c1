"""What processes print, while it comes."""

from __future__ import annotations

from pathlib import Path

from elastic_ps.cli.tail import Tail


def test_each_line_is_shown_once_and_as_it_was_at_its_end(tmp_path: Path) -> None:
    log, tail = tmp_path / "worker-0.log", Tail(tmp_path, "worker-0.log")
    assert tail.shown() == []
    log.write_bytes(b"one\n 10 %\r 20 %\r")
    assert tail.shown() == ["one"]
    assert tail.shown() == []
    with log.open("ab") as file:
        file.write(b"100 %\ntwo")
    assert tail.shown() == ["100 %"]
    assert tail.shown(last=True) == ["two"]


def test_a_line_without_an_end_is_not_read_again_at_each_look(tmp_path: Path) -> None:
    log, tail = tmp_path / "worker-0.log", Tail(tmp_path, "worker-0.log")
    log.write_bytes(b"one\n 10 %\r")
    assert tail.shown() == ["one"]
    log.write_bytes(b"one\n 10 %\n")  # so that reading it again would find an end
    assert tail.shown() == []
    with log.open("ab") as file:
        file.write(b" 20 %\r")
    assert tail.shown() == []
    log.write_bytes(b"one\n 10 %\r 20 %\r 30 %\n")
    assert [*tail.new(last=False)] == [" 10 %\r 20 %\r 30 %"], "and it is whole in the end"


def test_lines_of_several_processes_say_whose_they_are(tmp_path: Path) -> None:
    tail = Tail(tmp_path, "*.log")
    for name in ("worker-10", "worker-2", "ps-0"):
        (tmp_path / f"{name}.log").write_text("hello\n")
    assert tail.shown() == ["ps-0      | hello", "worker-2  | hello", "worker-10 | hello"]
    (tmp_path / "worker-2.log").write_text("hello\n 10 %\r 20 %\n")
    assert tail.shown() == ["worker-2  |  20 %"]
