"""Pushes overlap with backward: seen in the trace that workers and parameter server write."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from elastic_ps.core.partition import Layout
from elastic_ps.local.trace import merge_traces
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame
from elastic_ps.worker.push_pull import SENDERS
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.inside import flat_of
from tests.testing.oracle import mse
from tests.testing.polling import eventually
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
