"""Pushes overlap with backward: seen in the trace that workers and parameter server write."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ps.codec import encoder
from elastic_ps.core.overlap import Overlap
from elastic_ps.core.partition import Layout
from elastic_ps.local.trace import merge_traces
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame
from elastic_ps.worker.session import Session
from elastic_ps.worker.strategies.push_pull import SENDERS
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.inside import flat_of
from tests.testing.oracle import mse
from tests.testing.polling import eventually
from tests.testing.trained import await_training
from tests.testing.transports import whole_jobs
from tests.testing.watched import Watched

Event = dict[str, Any]
WIDTHS = (6, *[320] * 10, 1)
"""Nine layers of 400 KB, and two small ones."""


def spans(traces: Path, process: str) -> list[Event]:
    """The spans that a process has written, in order of beginning."""
    (file,) = traces.glob(f"{process}-*.jsonl")
    events = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted((e for e in events if e["ph"] == "X"), key=lambda e: float(e["ts"]))


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["name"] == name]


@whole_jobs
def test_pushes_begin_while_backward_runs(tmp_path: Path, transport: str) -> None:
    layouts: list[Layout] = []
    begun: dict[int, int] = {}  # each worker's last step of which a push has begun
    drafts: dict[int, int] = {}  # each worker's newest version of which it has got a draft

    def hold(worker: int, method: str, frame: Frame) -> None:
        """A step's last push leaves after a draft has come, where there are drafts: for shards elsewhere."""
        if method == "Push":
            request = pb.PushRequest.FromString(frame.header)
            begun[worker] = request.step
            if transport != "shm" and request.bucket == layouts[0].pushed[-1].index:
                made = request.version + 1
                eventually(lambda: drafts.get(worker) == made, "values come while gradients are sent")

    def note(worker: int, method: str, header: bytes) -> None:
        if method == "Pull" and (reply := pb.PullReply.FromString(header)).draft:
            drafts[worker] = reply.version

    def script(session: Session) -> None:
        model = make_mlp(WIDTHS)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        layouts.append(flat_of(optimizer).layout)
        at = [0]

        def wait(gradient: torch.Tensor) -> None:
            eventually(lambda: begun.get(session.worker) == at[0], "a push begins before backward ends")

        next(model.parameters()).register_hook(wait)
        for step, (x, y) in enumerate(session.loader(Numbers(40 * 32), 32)):
            if not step:
                await_training(job, 0, 1)
            at[0] = step
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    traces = tmp_path / "traces"
    with running_job(tmp_path, transport=transport, traces=traces) as job:
        job.through = lambda worker, inner: Watched(
            inner, partial(hold, worker), answer=partial(note, worker)
        )
        job.run(script, workers=2)
        versions = job.version
    layout = layouts[0]
    assert len(layout.pushed) >= 6
    tensors = [piece.tensor for bucket in layout.pushed for piece in bucket.pieces]
    assert tensors == sorted(tensors, reverse=True), "buckets are filled from the last layer on"

    for worker in range(2):
        events = spans(traces, f"worker-{worker}")
        assert {"forward", "backward", "queue", "push", "pull", "wait"} <= {e["name"] for e in events}
        pushes: dict[int, list[Event]] = defaultdict(list)
        for event in named(events, "push"):
            pushes[event["args"]["step"]].append(event)
        backward = named(events, "backward")
        assert len(backward) == len(pushes) == len(named(events, "forward"))
        for step, end in enumerate(e["ts"] + e["dur"] for e in backward):
            buckets = [e["args"]["bucket"] for e in pushes[step]]
            wanted = [b.index for b in layout.pushed]
            assert sorted(buckets) == sorted(wanted)
            senders = {e["tid"] for e in pushes[step]}
            assert len(senders) <= SENDERS
            for sender in senders:
                places = [wanted.index(e["args"]["bucket"]) for e in pushes[step] if e["tid"] == sender]
                assert places == sorted(places), "in the reverse of the forward order, some at the same time"
            assert pushes[step][0]["ts"] < end
        pulled = [e for e in named(events, "pull") if e["args"].get("draft")]
        pulled.sort(key=lambda e: (e["args"]["version"], e["ts"]))
        for _, group in groupby(pulled, key=lambda e: e["args"]["version"]):
            order = [e["args"]["bucket"] for e in group]
            assert order == [b.index for b in layout.pushed][: len(order)], "drafts come as they can be made"
    assert len(named(spans(traces, "ps-0"), "apply")) == versions

    merged = tmp_path / "trace.json"
    merge_traces(traces, merged)
    check_chrome_trace(json.loads(merged.read_text()))


def test_the_share_of_sending_that_backward_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of a transport that takes a second for each bucket, and nothing else takes time."""
    layouts: list[Layout] = []
    sent: list[int] = []

    def slowly(method: str, _: Frame) -> None:
        if method == "Push":
            sent.append(1)

    def script(session: Session) -> None:
        model = make_mlp(WIDTHS)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        layouts.append(flat_of(optimizer).layout)
        early, steps = len(layouts[0].pushed) - 1, [0]

        def wait(gradient: torch.Tensor) -> None:
            wanted = steps[0] * (early + 1) + early
            eventually(lambda: len(sent) == wanted, "all buckets but the last are sent before backward ends")

        next(model.parameters()).register_hook(wait)
        for step, (x, y) in enumerate(session.loader(Numbers(4 * 32), 32)):
            steps[0] = step
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    clock = SimpleNamespace(monotonic=lambda: float(len(sent)), monotonic_ns=time.monotonic_ns)
    # It has no clock that can be given, and any real time depends on the machine.
    monkeypatch.setattr(encoder, "time", clock)
    with running_job(tmp_path) as job:
        job.through = lambda _, inner: Watched(inner, slowly)
        job.run(script, workers=1)
        traffic = job.status().traffic
    count = len(layouts[0].pushed)
    assert count >= 6
    assert len(sent) == 4 * count
    # The last step's last push tells of the pushes before it.
    told = (4 * count - 1, 4 * (count - 1))
    assert (traffic.push_seconds, traffic.hidden_seconds) == told
    assert traffic.hidden_share == round(told[1] / told[0], 4)


@pytest.mark.parametrize(
    ("setting", "overlap", "expected"),
    [
        ("auto", True, Overlap.ONE_BUCKET),
        ("always", True, Overlap.USED),
        ("always", False, Overlap.SCRIPT),
        ("never", True, Overlap.NEVER),
    ],
)
def test_a_job_says_whether_it_sends_during_backward(
    tmp_path: Path, setting: str, overlap: bool, expected: Overlap
) -> None:
    """A model of 2 KB trains the same with each."""
    changed: list[bool] = []

    def script(session: Session) -> None:
        model = make_mlp((6, 16, 16, 1))
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, overlap=overlap)
        for x, y in session.loader(Numbers(4 * 8), 8):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if not expected.in_hooks:
                gradient = next(model.parameters()).grad
                assert gradient is not None
                gradient.mul_(1.0)
                changed.append(True)
            optimizer.step()

    with running_job(tmp_path, parameterServer={"overlap": setting}) as job:
        job.run(script, workers=1)
        status = job.status()
    assert status.progress.version == 4
    assert status.traffic.overlap == str(expected)
    assert len(changed) == (0 if expected.in_hooks else 4)


def check_chrome_trace(document: dict[str, Any]) -> None:
    """The fields that chrome://tracing and Perfetto need, and a name for every row."""
    events = document["traceEvents"]
    named_rows = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert processes == {"ps-0", "worker-0", "worker-1"}
    for event in events:
        assert event["ph"] in "MX"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named_rows
