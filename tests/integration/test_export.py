"""What a run leaves for plain PyTorch: `load_checkpoint`, `elastic-ps export`, a submodule that is saved."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import elastic_ps
from elastic_ps import export as export_program
from elastic_ps.checkpoint.store import Store
from elastic_ps.codec.state import Stored
from elastic_ps.errors import CheckpointCorrupt, InvalidModel, ModelMismatch, UserError
from elastic_ps.worker.session import Session
from tests.testing.harness import running_job

SERVER = {"replicas": 2, "bucketBytes": 1024, "checkpoint": {"interval": "1h", "everyVersions": 4, "keep": 9}}
TOKENS = torch.randint(0, 50, (60, 8), generator=torch.Generator().manual_seed(1))


class Tied(torch.nn.Module):
    """A small language model: its embedding is its output layer, too; and it has all kinds of buffers."""

    def __init__(self, seed: int, width: int = 12) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = torch.nn.Embedding(50, width)
            self.body = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))
            self.temperature = torch.nn.Parameter(torch.rand(()))
            self.head = torch.nn.Linear(width, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.body(self.embedding(tokens).flatten(0, 1))
        return self.head(hidden) * self.temperature  # type: ignore[no-any-return]


def make_optimizer(model: Tied) -> torch.optim.Optimizer:
    slow: list[torch.nn.Parameter] = [model.temperature]
    fast: list[torch.nn.Parameter] = [p for p in model.parameters() if p is not model.temperature]
    groups: list[dict[str, Any]] = [{"params": fast}, {"params": slow, "lr": 1e-4}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))


class Trained:
    """A directory of checkpoints, and what the worker had at its end."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "checkpoints"
        self.submodule = 0

        def script(session: Session) -> None:
            model = Tied(seed=0)
            optimizer = session.optimizer(make_optimizer(model), model)
            data = torch.utils.data.TensorDataset(TOKENS)
            for (tokens,) in session.loader(data, 6):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(tokens), tokens.flatten())
                loss.backward()
                for group in optimizer.param_groups:
                    group["lr"] *= 0.9
                optimizer.step()
            self.values = {name: value.clone() for name, value in model.state_dict().items()}
            self.rates = [group["lr"] for group in optimizer.param_groups]
            saved = io.BytesIO()
            torch.save(model.body.state_dict(), saved)
            self.submodule = len(saved.getvalue())

        with running_job(root, checkpoints=self.directory, parameterServer=SERVER) as job:
            job.start(0, script)
            job.join()
        self.version = Store(self.directory).versions()[-1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


def same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def test_a_checkpoint_is_loaded_into_a_model_and_its_optimizer(trained: Trained) -> None:
    model = Tied(seed=5)
    optimizer = make_optimizer(model)
    assert elastic_ps.load_checkpoint(trained.directory, model, optimizer) == trained.version
    assert same(model.state_dict(), trained.values)
    assert model.head.weight is model.embedding.weight
    assert [group["lr"] for group in optimizer.param_groups] == trained.rates
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    state = optimizer.state[model.embedding.weight]
    assert state["step"] == trained.version
    assert state["exp_avg"].shape == model.embedding.weight.shape
    model(TOKENS).sum().backward()
    optimizer.step()
    assert state["step"] == trained.version + 1


def test_a_checkpoint_can_be_named_by_its_own_directory(trained: Trained) -> None:
    versions = Store(trained.directory).versions()
    assert len(versions) > 2
    first, second = Tied(seed=5), Tied(seed=6)
    for model, version in ((first, versions[1]), (second, versions[2])):
        elastic_ps.load_checkpoint(Store(trained.directory).path(version), model)
        with Store(trained.directory).open(version) as reader:
            whole = reader.value(0, 0, reader.manifest.specs[0].elements)
        assert torch.equal(whole, next(iter(model.parameters())).detach().flatten())
    assert not torch.equal(first.embedding.weight, second.embedding.weight)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_export_writes_a_plain_state_dict(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / name
    out.write_text("what was there before is replaced")
    assert export_program.main([str(trained.directory), str(out)]) == 0
    assert f"version {trained.version}, {len(trained.values)} tensors" in capsys.readouterr().out
    values = safetensors.torch.load_file(out) if name.endswith("s") else torch.load(out)
    assert same(values, trained.values), "the shared weight is there under both its names"
    Tied(seed=7).load_state_dict(values)
    assert [path.name for path in tmp_path.iterdir()] == [name]


PLAIN = """
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 12)
        self.body = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.BatchNorm1d(12))
        self.temperature = torch.nn.Parameter(torch.rand(()))
        self.head = torch.nn.Linear(12, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens).flatten(0, 1))) * self.temperature


model = Tied()
model.load_state_dict(load_file(sys.argv[1]))
model(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
for part in Path(sys.argv[2]).glob("*.safetensors"):
    assert load_file(part), "the checkpoint's own files are of this format, too"
assert not [name for name in sys.modules if name.startswith("elastic")]
print(sum(float(value.double().sum()) for value in load_file(sys.argv[1]).values()))
"""
"""A script that knows nothing of us."""


@pytest.mark.nightly
def test_a_script_without_our_library_trains_on(trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    command = [sys.executable, "-m", "elastic_ps.cli", "export", str(trained.directory), str(out)]
    subprocess.run(command, capture_output=True, check=True)
    (tmp_path / "plain.py").write_text(PLAIN)
    files = Store(trained.directory).path(trained.version)
    plain = [sys.executable, str(tmp_path / "plain.py"), str(out), str(files)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(plain, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = sum(float(value.double().sum()) for value in trained.values.values())
    assert float(done.stdout) == pytest.approx(expected)


def test_export_says_what_is_wrong(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(*arguments: str) -> str:
        assert export_program.main(arguments) == 2
        said = capsys.readouterr()
        assert said.out == ""
        return said.err

    directory, out = str(trained.directory), str(tmp_path / "model.pt")
    assert "ends with .safetensors or .pt" in export(directory, str(tmp_path / "model.bin"))
    assert "llama-3.1-lora; expected " in (named := export(directory, str(tmp_path / "llama-3.1-lora")))
    assert "for a directory of adapters, a name without a dot" in named
    assert "no checkpoint of version 7777 (a directory" in export(directory, out, "--version", "7777")
    for name in ("model.pt", "model.safetensors"):
        assert f"error: cannot write {tmp_path}/absent/{name}: " in export(
            directory, str(tmp_path / "absent" / name)
        )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert f"error: cannot write {tmp_path}/file/model.pt: " in export(
        directory, str(tmp_path / "file" / "model.pt")
    )


def test_an_interrupted_export_leaves_what_was_there(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object, path: Path) -> None:
        path.write_text("a part")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)  # no real one takes long enough to be interrupted
    out = tmp_path / "model.pt"
    out.write_text("before")
    assert export_program.main([str(trained.directory), str(out)]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_an_empty_directory_holds_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no checkpoint"):
        elastic_ps.load_checkpoint(tmp_path, Tied(seed=0))


class Other(Tied):
    def __init__(self) -> None:
        super().__init__(seed=0)
        self.more = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "make", "message"),
    [
        (Other(), make_optimizer, r"more\.weight is not in the checkpoint"),
        (Tied(0, width=13), make_optimizer, r"embedding\.weight has shape \[50, 13\], but \[50, 12\]"),
        (torch.nn.Linear(2, 2), None, r"embedding\.weight is not in the model"),
        (
            Tied(0),
            lambda m: torch.optim.SGD(m.parameters(), lr=1),
            r"a SGD, but the checkpoint was made with AdamW",
        ),
        (Tied(0), lambda m: torch.optim.AdamW(m.parameters()), r"1 parameter groups, but the"),
    ],
)
def test_another_model_or_optimizer_is_refused_and_stays_what_it_is(
    trained: Trained, model: torch.nn.Module, make: Any, message: str
) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ModelMismatch, match=message):
        elastic_ps.load_checkpoint(trained.directory, model, make and make(model))
    assert same(model.state_dict(), before)


class Probed(torch.nn.Module):
    """Each worker has a probe and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(3, 2)
        self.probe = torch.nn.Linear(2, 2)
        self.probe.bias = self.body.bias  # the body's, and trained
        self.probe.weight.requires_grad = False
        self.register_buffer("seen", torch.zeros(()))


def optimizer_of(model: Probed) -> torch.optim.Optimizer:
    """It has the probe, too, which it never steps."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_what_belongs_to_each_worker_keeps_its_values(tmp_path: Path) -> None:
    """No checkpoint has it, so `load_checkpoint` and an evaluator's `load` are told what it is."""
    directory = tmp_path / "checkpoints"
    trained = Probed()

    def script(session: Session) -> None:
        optimizer = session.optimizer(optimizer_of(trained), trained, own=["probe", "seen"])
        for (x,) in session.loader(torch.utils.data.TensorDataset(torch.randn(12, 3)), 6):
            optimizer.zero_grad()
            trained.body(x).square().mean().backward()
            optimizer.step()

    with running_job(tmp_path, checkpoints=directory) as job:
        job.start(0, script)
        job.join()

    model = Probed()
    model.get_buffer("seen").fill_(5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ModelMismatch, match=r"probe.weight is not in the .*passes own=\[\.\.\.\] to .*, pass it here, too"
    ):
        elastic_ps.load_checkpoint(directory, model)
    with pytest.raises(
        ModelMismatch, match=r"body\.weight is in the checkpoint, but own=\[\.\.\.\] names it"
    ):
        elastic_ps.load_checkpoint(directory, model, own=["body", "probe", "seen"])
    with pytest.raises(InvalidModel, match="own names 'sonde'"):
        elastic_ps.load_checkpoint(directory, model, own=["sonde"])
    assert same(model.state_dict(), before)

    kept = {name: before[name] for name in ("probe.weight", "seen")}
    expected = {**trained.state_dict(), **kept}
    optimizer = optimizer_of(model)
    elastic_ps.load_checkpoint(directory, model, optimizer, own=["probe", "seen"])
    assert same(model.state_dict(), expected)
    assert set(optimizer.state) == set(model.body.parameters())
    *_, last = elastic_ps.checkpoints(directory)
    evaluated = Probed()
    for checkpoint in elastic_ps.checkpoints(directory):
        checkpoint.load(evaluated, own=["probe", "seen"])
    assert last.version == 2
    assert same(evaluated.body.state_dict(), trained.body.state_dict())


def test_a_broken_checkpoint_is_said_so_and_left_where_it_is(trained: Trained, tmp_path: Path) -> None:
    """The directory may be that of a running job."""
    directory = tmp_path / "checkpoints"
    store = Store(directory)
    for version in Store(trained.directory).versions()[-2:]:
        store.path(version).mkdir(parents=True)
        for file in Store(trained.directory).path(version).iterdir():
            (store.path(version) / file.name).write_bytes(file.read_bytes())
    before, newest = store.versions()
    (store.path(newest) / "shard-0-of-2.safetensors").write_bytes(b"broken")
    with pytest.warns(RuntimeWarning, match=f"a newer checkpoint is damaged.*version-{newest:010d}"):
        assert elastic_ps.load_checkpoint(directory, Tied(seed=0)) == before
    with pytest.raises(CheckpointCorrupt):
        elastic_ps.load_checkpoint(directory, Tied(seed=0), version=newest)
    assert store.versions() == [before, newest]


@pytest.mark.nightly
def test_a_broken_checkpoint_is_not_exported(trained: Trained, tmp_path: Path) -> None:
    """Nothing is written; without a version, an older one that is whole is, and the command says so."""
    directory, out = tmp_path / "checkpoints", tmp_path / "model.pt"
    shutil.copytree(trained.directory, directory)
    store = Store(directory)
    *_, before, newest = store.versions()
    broken = store.path(newest) / "shard-0-of-2.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1])
    out.write_text("what was there before")

    command = [sys.executable, "-m", "elastic_ps.cli", "export", str(directory), str(out)]
    done = subprocess.run([*command, "--version", str(newest)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "error: " in done.stderr
    assert f"version-{newest:010d}" in done.stderr
    assert out.read_text() == "what was there before"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert f"version {before}," in done.stdout
    assert done.stderr.startswith("warning: a newer checkpoint is damaged, so an older one is used: ")
    assert len(done.stderr.splitlines()) == 1, "a sentence, and no line of code"
    assert not list(tmp_path.glob(".model*"))


def test_saving_a_submodule_writes_its_own_tensors_only(trained: Trained) -> None:
    body = Tied(seed=0).body
    saved = io.BytesIO()
    torch.save(body.state_dict(), saved)
    assert trained.submodule < 1.1 * len(saved.getvalue()), "not all of the flat memory that it lies in"


def test_what_is_written_is_read_by_the_library_of_the_format(tmp_path: Path) -> None:
    store = Store(tmp_path)
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8]
    dtypes += [torch.int16, torch.int32, torch.int64, torch.bool]
    tensors = [Stored(i, 0, "value", torch.ones(3 * i, dtype=dtype)) for i, dtype in enumerate(dtypes)]
    file = store.write_shard(store.next_term(), 0, 0, 1, iter(tensors))
    found = safetensors.torch.load_file(next(tmp_path.glob(f"partial-*/{file.file}")))
    assert same(found, {stored.name: stored.value for stored in tensors})
