"""A parameter server and a worker without torch, to test the launcher with: they count and do not train.

They keep the process contract (environment variables, exit codes, lifeline, /status). A worker's step is
a POST to the server. `spec.arguments` says how the run goes:

    records: how many records there are (default: no data; each worker makes `steps` steps)
    pace: seconds for a step
    fail: {"<worker>": exit status}: that worker ends with it at its third step, each time it is started
    crash: {"<worker>": signal}: that worker dies of it before its first step, each time it is started
    stubborn: ignore SIGTERM
    durable: the version that the server says is on disk (default: none)
    apart: the worker with this index never joins
    stops: the worker with this index, one of the first two, stops itself (SIGSTOP) before its first step
    pair_from: from this version on no step counts before two workers have joined
    child: start a process in each worker that would outlive it
"""

from __future__ import annotations

import http.client
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from elastic_ps.api.status import MemberStatus, Progress, ServerStatus
from elastic_ps.contract import env, exits
from elastic_ps.process.lifecycle import Alarm, end_now

BATCH = 8


def watch(lifeline: int | None) -> None:
    def wait() -> None:
        assert lifeline is not None
        os.read(lifeline, 1)
        os._exit(3)

    if lifeline is not None:
        threading.Thread(target=wait, daemon=True).start()


class Server:
    def __init__(self, environment: env.ProcessEnvironment) -> None:
        self.environment = environment
        self.lock = threading.Lock()
        arguments: Any = environment.spec.arguments
        self.expected: int | None = arguments.get("records")
        self.status = ServerStatus(
            job=environment.job,
            shard=environment.index,
            shards=environment.spec.parameter_server.replicas,
            term=1,
            ready=False,
            progress=Progress(
                records_expected=self.expected,
                epochs=1,
                durable_version=arguments.get("durable"),
            ),
            value_bytes=arguments.get("value_bytes", 0),
        )
        self.loss: list[tuple[int, float]] = []
        self.began = time.monotonic()

    def post(self, path: str, body: dict[str, int]) -> dict[str, Any]:
        with self.lock:
            progress = self.status.progress
            if path == "/join":
                keep(self.environment, 0)  # before training begins; one that is killed cannot at its end
                self.status.ready = True
                self.status.members.append(
                    MemberStatus(
                        worker=body["worker"],
                        incarnation=len(self.status.members),
                        pid=body["pid"],
                        host="localhost",
                        state="training",
                        joined_version=progress.version,
                    )
                )
                return {"incarnation": len(self.status.members) - 1}
            member = self.status.members[body["incarnation"]]
            if path == "/leave":
                member.state, member.left_version = "left", progress.version
            elif not progress.finished and not self.waits():
                self.step(member)
            return {"finished": progress.finished}

    def waits(self) -> bool:
        first: Any = self.environment.spec.arguments.get("pair_from")
        return first is not None and self.status.progress.version >= first and len(self.status.members) < 2

    def step(self, member: MemberStatus) -> None:
        progress = self.status.progress
        count = min(BATCH, self.expected - progress.records_applied) if self.expected else BATCH
        progress.version += 1
        progress.records_applied += count
        progress.loss = 2.3 / (1 + 0.02 * progress.version)
        progress.samples_per_second = progress.records_applied / (time.monotonic() - self.began)
        self.loss.append((progress.version, progress.loss))
        member.steps += 1
        member.records += count
        if self.expected:
            progress.percent = int(100 * progress.records_applied / self.expected)
            progress.finished = progress.records_applied >= self.expected
            if progress.finished:
                progress.epoch, progress.metrics = 1, {"test_accuracy": 0.975}

    def serve(self) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with server.lock:
                    if self.path == "/status":
                        self.answer(server.status.model_dump_json(by_alias=True))
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

        host, _, port = self.environment.http.rpartition(":")
        listener = ThreadingHTTPServer((host, int(port)), Handler)
        listener.daemon_threads = True
        threading.Thread(target=listener.serve_forever, daemon=True).start()


def run_server(environment: env.ProcessEnvironment) -> int:
    stopped = Alarm()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    watch(environment.lifeline)
    if environment.spec.arguments.get("server_fails"):
        print("the fake server cannot start", file=sys.stderr)
        return 4
    Server(environment).serve()
    print("serving", environment.resume, environment.durable, environment.checkpoints)
    while not stopped.wait(1):
        pass
    keep(environment, 1)
    return 0


def keep(environment: env.ProcessEnvironment, version: int) -> None:
    if environment.checkpoints is not None:
        checkpoint = environment.checkpoints / f"version-{version}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "manifest.json").write_text("{}")


def call(address: str, path: str, **body: int) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("POST", path, json.dumps(body))
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def join(address: str, index: int) -> int:
    """The server may have to start first."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return int(call(address, "/join", worker=index, pid=os.getpid())["incarnation"])
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def run_worker(environment: env.ProcessEnvironment) -> int:
    arguments: dict[str, Any] = environment.spec.arguments
    leaving = Alarm()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if arguments.get("stubborn") else lambda *_: leaving.set())
    watch(environment.lifeline)
    if arguments.get("child"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    index, address = environment.index, environment.http
    if index == arguments.get("apart"):
        while not leaving.wait(1):
            pass
        return exits.LEFT
    incarnation = join(address, index)
    print(f"worker {index} has {os.environ['OMP_NUM_THREADS']} threads")
    print(f"worker {index} runs on cores {sorted(os.sched_getaffinity(0))}")
    if environment.trace is not None:
        event = {"name": "step", "ph": "X", "ts": 1, "dur": 2, "pid": os.getpid(), "tid": 1}
        path = environment.trace / f"worker-{index}-{os.getpid()}.jsonl"
        path.write_text(json.dumps(event) + '\n{"cut')
    if (crash := arguments.get("crash", {}).get(str(index))) is not None:
        signal.signal(crash, signal.SIG_DFL)
        os.kill(os.getpid(), crash)
    if index == arguments.get("stops") and incarnation < 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    status, step = arguments.get("fail", {}).get(str(index), 0), 0
    while not leaving.is_set():
        step += 1
        if step == 3 and status:
            print(f"fake worker {index} ends with {status}", file=sys.stderr)
            return int(status)
        time.sleep(arguments.get("pace", 0.01))
        finished = call(address, "/step", incarnation=incarnation)["finished"]
        if finished or step == arguments.get("steps"):
            break
    if leaving.is_set():
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
    end_now((run_server if sys.argv[1] == "ps" else run_worker)(env.read()))
