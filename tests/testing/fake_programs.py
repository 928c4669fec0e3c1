"""A parameter server and a worker without torch, to test the launcher with: they count and do not train.

They keep the process contract (environment variables, exit codes, lifeline, /status), and import almost
nothing, as tests start hundreds of them. A worker's step is a POST to the server. `spec.arguments` says
how the run goes:

    records: how many records there are (default: no data; each worker makes `steps` steps)
    pace: seconds for a step
    fail: {"<worker>": exit status}: that worker ends with it at its third step, each time it is started
    crash: {"<worker>": signal}: that worker dies of it before its first step, each time it is started
    stubborn: ignore SIGTERM
    durable: the version that the server says is on disk (default: none)
    apart: the worker with this index never joins
    stops: the worker with this index, one of the first two, stops itself (SIGSTOP) before its first step
    pair_from: from this version on no step counts before two workers, or `company`, have joined
    child: start a process in each worker that would outlive it
"""

from __future__ import annotations

import http.client
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from elastic_ps.contract import exits

BATCH = 8


def variable(name: str) -> str:
    return os.environ.get(f"ELASTIC_PS_{name}", "")


SPEC: dict[str, Any] = json.loads(variable("SPEC") or "{}")
ARGUMENTS: dict[str, Any] = SPEC.get("arguments", {})


class Alarm:
    """An event that a signal sets."""

    def __init__(self) -> None:
        self._awake, self._wake = os.pipe()

    def set(self) -> None:
        os.write(self._wake, b"!")

    def wait(self, seconds: float) -> bool:
        return bool(select.select([self._awake], [], [], seconds)[0])


def watch() -> None:
    def wait() -> None:
        os.read(int(variable("LIFELINE")), 1)
        os._exit(3)

    if variable("LIFELINE"):
        threading.Thread(target=wait, daemon=True).start()


class Server:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.expected: int | None = ARGUMENTS.get("records")
        self.progress: dict[str, Any] = {
            "version": 0,
            "recordsApplied": 0,
            "recordsExpected": self.expected,
            "epochs": 1,
            "durableVersion": ARGUMENTS.get("durable"),
            "finished": False,
        }
        if SPEC.get("consistency", {}).get("deterministic"):
            self.progress["openShares"] = [*range(SPEC["worker"]["replicas"])]
        self.members = list[dict[str, Any]]()
        self.status: dict[str, Any] = {
            "job": variable("JOB"),
            "shard": int(variable("INDEX")),
            "shards": SPEC.get("parameterServer", {}).get("replicas", 1),
            "term": 1,
            "ready": False,
            "progress": self.progress,
            "members": self.members,
            "valueBytes": ARGUMENTS.get("value_bytes", 0),
        }
        self.loss: list[tuple[int, float]] = []
        self.began = time.monotonic()

    def post(self, path: str, body: dict[str, int]) -> dict[str, Any]:
        with self.lock:
            if path == "/join":
                keep(0)  # before training begins; one that is killed cannot at its end
                self.status["ready"] = True
                member = {
                    "worker": body["worker"],
                    "pid": body["pid"],
                    "host": "localhost",
                    "incarnation": len(self.members),
                    "joinedVersion": self.progress["version"],
                    "state": "training",
                    "steps": 0,
                    "records": 0,
                }
                self.members.append(member)
                return {"incarnation": member["incarnation"]}
            member = self.members[body["incarnation"]]
            if path == "/leave":
                member |= {"state": "left", "leftVersion": self.progress["version"]}
            elif not self.progress["finished"] and not self.waits():
                self.step(member)
            return {"finished": self.progress["finished"]}

    def waits(self) -> bool:
        first, company = ARGUMENTS.get("pair_from"), ARGUMENTS.get("company", 2)
        return first is not None and self.progress["version"] >= first and len(self.members) < company

    def step(self, member: dict[str, Any]) -> None:
        version, applied = self.progress["version"] + 1, self.progress["recordsApplied"]
        count = min(BATCH, self.expected - applied) if self.expected else BATCH
        applied += count
        loss = 2.3 / (1 + 0.02 * version)
        self.loss.append((version, loss))
        self.progress |= {
            "version": version,
            "recordsApplied": applied,
            "loss": loss,
            "samplesPerSecond": applied / (time.monotonic() - self.began),
        }
        member["steps"] += 1
        member["records"] += count
        if self.expected:
            self.progress |= {"percent": 100 * applied // self.expected, "finished": applied >= self.expected}
            if self.progress["finished"]:
                self.progress |= {"epoch": 1, "metrics": {"test_accuracy": 0.975}}

    def serve(self) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with server.lock:
                    if self.path == "/status":
                        self.answer(json.dumps(server.status))
                    elif self.path == "/loss":
                        self.answer(json.dumps(server.loss))
                    else:
                        self.answer("ok")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(json.dumps(server.post(self.path, body)))

            def answer(self, text: str) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        host, _, port = variable("HTTP").rpartition(":")
        listener = ThreadingHTTPServer((host, int(port)), Handler)
        listener.daemon_threads = True
        threading.Thread(target=listener.serve_forever, daemon=True).start()


def run_server() -> int:
    stopped = Alarm()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    watch()
    if ARGUMENTS.get("server_fails"):
        print("the fake server cannot start", file=sys.stderr)
        return 4
    Server().serve()
    print("serving", variable("RESUME"), variable("DURABLE") or None, variable("CHECKPOINTS") or None)
    while not stopped.wait(1):
        pass
    keep(1)
    return 0


def keep(version: int) -> None:
    if variable("CHECKPOINTS"):
        checkpoint = Path(variable("CHECKPOINTS"), f"version-{version}")
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "manifest.json").write_text("{}")


def call(address: str, path: str, **body: int) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("POST", path, json.dumps(body))
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def join(address: str, index: int, leaving: Alarm) -> int:
    """The server may have to start first."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return int(call(address, "/join", worker=index, pid=os.getpid())["incarnation"])
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            if leaving.wait(0.02):
                sys.exit(exits.LEFT)


def run_worker() -> int:
    leaving = Alarm()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ARGUMENTS.get("stubborn") else lambda *_: leaving.set())
    watch()
    if ARGUMENTS.get("child"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    index, address = int(variable("INDEX")), variable("HTTP")
    if index == ARGUMENTS.get("apart"):
        while not leaving.wait(1):
            pass
        return exits.LEFT
    incarnation = join(address, index, leaving)
    print(f"worker {index} has {os.environ['OMP_NUM_THREADS']} threads")
    print(f"worker {index} runs on cores {sorted(os.sched_getaffinity(0))}")
    if variable("TRACE"):
        event = {"name": "step", "ph": "X", "ts": 1, "dur": 2, "pid": os.getpid(), "tid": 1}
        path = Path(variable("TRACE"), f"worker-{index}-{os.getpid()}.jsonl")
        path.write_text(json.dumps(event) + '\n{"cut')
    if (crash := ARGUMENTS.get("crash", {}).get(str(index))) is not None:
        signal.signal(crash, signal.SIG_DFL)
        os.kill(os.getpid(), crash)
    if index == ARGUMENTS.get("stops") and incarnation < 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    status, step = ARGUMENTS.get("fail", {}).get(str(index), 0), 0
    while not leaving.wait(0):
        step += 1
        if step == 3 and status:
            print(f"fake worker {index} ends with {status}", file=sys.stderr)
            return int(status)
        time.sleep(ARGUMENTS.get("pace", 0.01))
        finished = call(address, "/step", incarnation=incarnation)["finished"]
        if finished or step == ARGUMENTS.get("steps"):
            break
    if leaving.wait(0):
        call(address, "/leave", incarnation=incarnation)
        return exits.LEFT
    return 0


def check(entrypoint: str) -> int:
    module, _, function = entrypoint.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit):  # noqa: BLE001 - whatever a script does on import
        traceback.print_exc()
        return exits.INVALID
    return 0 if callable(found) else exits.INVALID


if __name__ == "__main__":
    if sys.argv[1:3] == ["worker", "--check"]:
        sys.exit(check(json.loads(sys.argv[3])["entrypoint"]))
    exits.print_stacks_on_request()
    status = run_server() if sys.argv[1] == "ps" else run_worker()
    sys.stdout.flush()
    os._exit(status)
