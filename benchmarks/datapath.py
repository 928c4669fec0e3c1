"""What an exact `sync` step costs on one host: elastic-ps beside DistributedDataParallel over gloo.

`python -m benchmarks.datapath` trains each model twice, with as many processes that compute, on batches that
lie in memory: as a job of elastic-ps with one parameter server, and with DistributedDataParallel under
`torchrun`. Both compute with one thread in each process. It prints the median step of the slowest worker
and the processor time of a step, all processes together, and the ratio of the two. They take turns.
It also prints the share of the time of sending that backward hides. Of models with an unusual shape, `groups`
has 50 parameter groups, `tensors` 5,000 small tensors, and `masters` 34 million parameters in bfloat16, of
which the optimizer steps copies in float32. `alone` has one worker, so two cores are more than it needs.
With `--strategy all-reduce` the workers of the job add up gradients among themselves, as DDP's processes do.
With `--transport` they talk without TLS, as DDP's do; `--tls` turns it on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.figures import Figure, write
from benchmarks.recovery import ROOT, torchrun
from elastic_ps.contract.schemes import Scheme

LIMIT = 300.0
LOOK = 0.5
"""Seconds between two looks at what is measured."""
WARM = 0.25
"""Share of the steps that are not measured."""


class Case(NamedTuple):
    """What is trained: names of a model and an optimizer, the batch and how many processes compute."""

    model: str
    optimizer: str
    batch: int
    workers: int
    steps: int

    @property
    def name(self) -> str:
        """For a line of the table."""
        return f"{self.model}, {self.optimizer}, batch {self.batch}, {self.workers} workers"


CASES = {
    "small": Case("mlp-64-128-10", "SGD", 16, 2, 3000),
    "mlp": Case("mlp-10.5M", "SGD", 64, 2, 60),
    "mlp4": Case("mlp-10.5M", "SGD", 64, 4, 30),
    "plain4": Case("mlp-10.5M", "SGD without momentum", 64, 4, 30),
    "resnet": Case("resnet18", "SGD", 8, 2, 24),
    "adam": Case("mlp-10.5M", "Adam", 64, 2, 30),
    "groups": Case("50 groups, 3.3M", "AdamW, a group for each layer", 16, 2, 60),
    "tensors": Case("5,000 tensors, 0.7M", "AdamW", 16, 2, 30),
    "tensors-sgd": Case("5,000 tensors, 0.7M", "SGD", 16, 2, 30),
    "masters": Case("mlp-34M in bf16", "AdamW in float32", 1, 2, 6),
    "alone": Case("mlp-10.5M", "SGD", 64, 1, 60),
}
BY_NAME = ("groups", "tensors", "tensors-sgd", "masters", "alone")
"""Cases that are measured only if they are named."""


class Block(torch.nn.Module):
    """Two convolutions and a way around them (He et al. 2015, "Deep Residual Learning")."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        conv, norm = torch.nn.Conv2d, torch.nn.BatchNorm2d
        self.body = torch.nn.Sequential(
            conv(inputs, outputs, 3, stride, 1, bias=False),
            norm(outputs),
            torch.nn.ReLU(),
            conv(outputs, outputs, 3, 1, 1, bias=False),
            norm(outputs),
        )
        self.around: torch.nn.Module = torch.nn.Identity()
        if stride > 1 or inputs != outputs:
            self.around = torch.nn.Sequential(conv(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.around(x))


def make_model(name: str) -> tuple[torch.nn.Module, tuple[int, ...], int]:
    """The model, the shape of one record, and the number of classes."""
    torch.manual_seed(0)
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    if name == "mlp-64-128-10":
        return torch.nn.Sequential(linear(64, 128), relu(), linear(128, 10)), (64,), 10
    if name == "mlp-10.5M":
        layers = [linear(1024, 2048), relu(), linear(2048, 2048), relu(), linear(2048, 2048), relu()]
        return torch.nn.Sequential(*layers, linear(2048, 10)), (1024,), 10
    if name.startswith("50 groups"):
        layers = [module for _ in range(49) for module in (linear(256, 256), relu())]
        return torch.nn.Sequential(*layers, linear(256, 10)), (256,), 10
    if name.startswith("5,000 tensors"):
        return torch.nn.Sequential(*(linear(16, 16) for _ in range(2500))), (16,), 16
    if name.startswith("mlp-34M"):
        layers = [module for _ in range(2) for module in (linear(4096, 4096), relu())]
        return torch.nn.Sequential(*layers, linear(4096, 10)).to(torch.bfloat16), (4096,), 10
    stem = [torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(64), relu()]
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), linear(512, 10)]
    return torch.nn.Sequential(*stem, *(Block(*width) for width in widths), *head), (3, 32, 32), 10


class Masters(torch.optim.Optimizer):
    """Steps copies of a model's parameters in float32, and rounds the parameters from them.

    A parameter server does so by itself.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner, self._rounded = inner, [p for group in inner.param_groups for p in group["params"]]
        super().__init__(self._rounded, {})
        self._masters = [p.detach().float() for p in self._rounded]
        masters = iter(self._masters)
        for group in inner.param_groups:
            group["params"] = [next(masters) for _ in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 (none is given)
        for master, rounded in zip(self._masters, self._rounded, strict=True):
            master.grad = None if rounded.grad is None else rounded.grad.float()
        self._inner.step()
        for master, rounded in zip(self._masters, self._rounded, strict=True):
            master.grad = None
            rounded.copy_(master)


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name.endswith("for each layer"):
        groups = [
            {"params": list(layer.parameters()), "lr": 1e-4 / (1 + number)}
            for number, layer in enumerate(each for each in model.modules() if [*each.parameters(False)])
        ]
        return torch.optim.AdamW(groups, fused=True)
    if name.startswith("AdamW"):
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if name == "Adam":
        return torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    momentum = 0.9 if name == "SGD" else 0.0
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum, fused=True)


def make_batch(
    shape: tuple[int, ...], classes: int, batch: int, *, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, *shape).to(dtype), torch.randint(0, classes, (batch,))


class Batches(torch.utils.data.Dataset[Any]):
    """Records of which each batch is the one that lies in memory."""

    def __init__(self, batch: tuple[torch.Tensor, torch.Tensor], records: int) -> None:
        self.batch, self.records = batch, records

    def __len__(self) -> int:
        return self.records

    def __getitems__(self, _: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batch


def as_it_is(batch: Any) -> Any:
    return batch


class Timer:
    """Notes when steps end, and the processor time that this process took."""

    def __init__(self, steps: int, path: Path) -> None:
        self._ends: list[float] = []
        self._warm = int(steps * WARM)
        self._path = path
        self._cpu = 0.0

    def step(self) -> None:
        """A step has ended."""
        self._ends.append(time.perf_counter())
        if len(self._ends) == self._warm:
            self._cpu = cpu_seconds()

    def write(self) -> None:
        """After the last one."""
        ends = self._ends[self._warm - 1 :]
        steps = [after - before for before, after in itertools.pairwise(ends)]
        cpu = (cpu_seconds() - self._cpu) / len(steps)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"step": statistics.median(steps), "cpu": cpu}))
        partial.rename(self._path)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x).float(), y).backward()
    optimizer.step()


def train_with_parameter_server(case: str, directory: str, steps: int | None = None) -> None:
    """What a worker of the job runs. `steps`: as many as the case says, if it is not given."""
    import elastic_ps

    torch.set_num_threads(1)
    chosen = CASES[case]._replace(steps=steps or CASES[case].steps)
    session = elastic_ps.connect()
    model, shape, classes = make_model(chosen.model)
    optimizer = session.optimizer(make_optimizer(chosen.optimizer, model), model)
    batch = make_batch(shape, classes, chosen.batch, dtype=next(model.parameters()).dtype)
    data = Batches(batch, chosen.steps * chosen.batch * 16)
    timer = Timer(chosen.steps, Path(directory) / f"worker-{session.worker}.json")
    for number, (x, y) in enumerate(session.loader(data, chosen.batch, collate_fn=as_it_is)):
        train(model, optimizer, x, y)
        if number < chosen.steps:
            timer.step()
        if number == chosen.steps - 1:  # the others go on until they have as many
            timer.write()


def compress(model: torch.nn.parallel.DistributedDataParallel, hook: str) -> None:
    """Have DistributedDataParallel send its gradients in fewer bytes, with one of its own hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "bf16":
        # By its own name torch allows it with NCCL only, though gloo adds bfloat16 up, too.
        model.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


HOOKS = ("bf16", "powersgd")
"""DistributedDataParallel's own ways to send fewer bytes: see `compress`."""

BUCKET_MB = {"powersgd": 1024}
"""PowerSGD has three collectives a bucket, each begun when the one before has ended. With several buckets the
ranks begin them in different orders, and gloo mixes them up."""


def train_with_ddp(case: str, directory: Path, hook: str = "") -> None:
    """What `torchrun` runs in each rank. `hook`: one of `HOOKS`; "" for plain gradients."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    (directory / f"rank-{rank}.pid").write_text(str(os.getpid()))
    chosen = CASES[case]
    model, shape, classes = make_model(chosen.model)
    wrapped = torch.nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=BUCKET_MB.get(hook), gradient_as_bucket_view=True
    )
    compress(wrapped, hook)
    optimizer = make_optimizer(chosen.optimizer, model)
    dtype = next(model.parameters()).dtype
    if dtype is torch.bfloat16:
        optimizer = Masters(optimizer)
    x, y = make_batch(shape, classes, chosen.batch, dtype=dtype)
    timer = Timer(chosen.steps, directory / f"worker-{rank}.json")
    for _ in range(chosen.steps):
        train(wrapped, optimizer, x, y)
        timer.step()
    timer.write()
    torch.distributed.barrier()


@dataclass
class Measured:
    """Seconds a step, of the slowest worker; processor seconds a step, of all processes."""

    step: float
    cpu: float
    server: float = float("nan")
    """Processor seconds a step of the parameter server alone, which are in `cpu`, too."""
    hidden: float | None = None
    """The share of the time of sending that backward hides; None if nothing is sent there."""


def collect(directory: Path, workers: int, check: Callable[[], None]) -> Measured:
    """Wait for what the workers write."""
    deadline = time.monotonic() + LIMIT
    paths = [directory / f"worker-{index}.json" for index in range(workers)]
    while not all(path.exists() for path in paths):
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"no result within {LIMIT:.0f} s")
        time.sleep(LOOK)
    found = [json.loads(path.read_text()) for path in paths]
    return Measured(max(each["step"] for each in found), sum(each["cpu"] for each in found))


def server_cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_parameter_server(
    case: str,
    transport: Scheme | None = None,
    *,
    workers: int | None = None,
    strategy: str = "parameter-server",
    tls: bool = False,
) -> Measured:
    """`workers`: as many as the case says, if it is not given."""
    from elastic_ps.api.job import parse_job
    from elastic_ps.local import Launcher, Options
    from elastic_ps.local.poller import fetch_status

    chosen, count = CASES[case], workers or CASES[case].workers
    with tempfile.TemporaryDirectory() as name:
        spec = {
            "entrypoint": "benchmarks.datapath:train_with_parameter_server",
            "arguments": {"case": case, "directory": name},
            "strategy": strategy,
            "worker": {"replicas": count},
            "parameterServer": {"checkpoint": {"interval": "3600s"}},
            "data": {"shuffle": False},
        }
        document = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob"}
        job = parse_job({**document, "metadata": {"name": "benchmark"}, "spec": spec}, source="benchmark")
        seen: list[tuple[int, float]] = []
        hidden: float | None = None
        with Launcher(job, Options(root=Path(name) / "run", transport=transport, tls=tls)) as launcher:
            launcher.start()

            def look() -> None:
                nonlocal hidden
                status = launcher.status()
                if status.phase in ("Failed", "Succeeded"):
                    raise RuntimeError(f"the job has ended: {status.reason} {status.message}")
                server = fetch_status(status.http[0]) if status.http else None
                pid = next((p.pid for p in status.processes if p.role == "ps"), None)
                if server is not None and pid is not None and server.progress.version > chosen.steps * WARM:
                    seen.append((server.progress.version, server_cpu(pid)))
                    hidden = server.traffic.hidden_share

            measured = collect(Path(name), count, look)
            measured.hidden = hidden
            launcher.stop("measured", at_once=True)
            launcher.wait(timedelta(seconds=30))
    if not seen or seen[-1][0] == seen[0][0]:
        print(f"{case}: too short for the parameter server's processor time, which is left out", flush=True)
        return measured
    measured.server = (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])
    measured.cpu += measured.server
    return measured


def measure_ddp(case: str) -> Measured:
    workers = CASES[case].workers
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with torchrun(directory, workers, __file__, "--case", case):
            return collect(directory, workers, lambda: None)


def median(measured: list[Measured]) -> Measured:
    hidden = [m.hidden for m in measured if m.hidden is not None]
    return Measured(
        statistics.median(m.step for m in measured),
        statistics.median(m.cpu for m in measured),
        hidden=statistics.median(hidden) if hidden else None,
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; most if none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--ours", action="store_true", help="measure elastic-ps alone")
    parser.add_argument(
        "--transport", choices=("shm", "tcp", "grpc"), help="default: the fastest, within the host"
    )
    parser.add_argument("--strategy", choices=("parameter-server", "all-reduce"), default="parameter-server")
    parser.add_argument("--tls", action="store_true", help="encrypt what elastic-ps sends over a network")
    parser.add_argument("--ddp", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--hook", default="", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.ddp:
        train_with_ddp(parsed.case, parsed.ddp, parsed.hook)
        return
    for unknown in set(parsed.cases) - CASES.keys():
        parser.error(f"there is no case {unknown!r}; expected one of {', '.join(CASES)}")
    os.chdir(ROOT)
    figures = []
    print(f"{'':42} {'ours':>9} {'DDP':>9} {'ratio':>6}   processor time of a step")
    for name in parsed.cases or (name for name in CASES if name not in BY_NAME):
        ours, theirs = [], []
        for _ in range(parsed.rounds):
            ours.append(
                measure_parameter_server(name, parsed.transport, strategy=parsed.strategy, tls=parsed.tls)
            )
            theirs.append(Measured(float("nan"), float("nan")) if parsed.ours else measure_ddp(name))
        a, b = median(ours), median(theirs)
        case = CASES[name]
        figures.append(Figure(case.name, a.step * 1e3, b.step * 1e3, "ms", "DDP"))
        print(
            f"{case.name:42} {a.step * 1e3:6.1f} ms {b.step * 1e3:6.1f} ms {a.step / b.step:6.2f}   "
            f"{a.cpu * 1e3:.1f} / {b.cpu * 1e3:.1f} ms = {a.cpu / b.cpu:.2f}"
            + ("" if a.hidden is None else f", {a.hidden:.0%} of the sending hidden"),
            flush=True,
        )
    write(parsed.json, figures)


if __name__ == "__main__":
    main()
