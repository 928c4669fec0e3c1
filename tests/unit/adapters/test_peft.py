"""What a job with adapters of PEFT exports is what PEFT loads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.checkpoint.plain import export, load_checkpoint
from elastic_ps.errors import UserError
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, running_job
from tests.testing.trained import adam

peft = pytest.importorskip("peft")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.head = torch.nn.Linear(6, 16), torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.relu(self.read(x)))
        return result


def fit(session: Session, model: torch.nn.Module) -> None:
    optimizer = session.optimizer(adam(model), model, base="external")
    for x, y in session.loader(Numbers(32), 8):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("fields", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
def test_peft_loads_what_was_exported(tmp_path: Path, fields: dict[str, Any]) -> None:
    base, kept, out = Net(), tmp_path / "kept", tmp_path / "out"
    config = peft.LoraConfig(r=2, target_modules=["read"], modules_to_save=["head"], **fields)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    with running_job(tmp_path, checkpoints=kept) as job:
        job.start(0, lambda session: fit(session, model))
        job.join()
    version, tensors = export(kept, out)
    assert sorted(file.name for file in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (version, tensors) == (4, 5 if fields else 4)
    saved = json.loads((out / "adapter_config.json").read_text())
    assert (saved["r"], saved["inference_mode"]) == (2, True)
    model.save_pretrained(tmp_path / "theirs")
    theirs = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    assert {key: value for key, value in saved.items() if value != theirs.get(key)} == {}
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), out)
    again = peft.get_peft_model(copy.deepcopy(base), config)
    load_checkpoint(kept, again)
    x = torch.randn(5, 6)
    for other in (loaded, again):
        torch.testing.assert_close(other.eval()(x), model.eval()(x))
    assert not torch.equal(model(x), base(x))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("VeraConfig", {"r": 2, "target_modules": ["read"]}),
        ("VBLoRAConfig", {"r": 2, "vector_length": 2, "num_vectors": 8, "target_modules": ["read"]}),
        ("IA3Config", {"target_modules": ["read"], "feedforward_modules": []}),
    ],
)
def test_peft_loads_what_was_exported_or_it_is_refused(
    tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    base, kept, out = Net(), tmp_path / "kept", tmp_path / "out"
    model = peft.get_peft_model(copy.deepcopy(base), getattr(peft, kind)(**fields))
    with running_job(tmp_path, checkpoints=kept) as job:
        job.start(0, lambda session: fit(session, model))
        job.join()
    if kind == "IA3Config":
        export(kept, out)
    else:
        with pytest.raises(UserError, match=r"only PEFT can write .*call model\.save_pretrained"):
            export(kept, out)
        assert not out.exists()
        trained = peft.get_peft_model(copy.deepcopy(base), getattr(peft, kind)(**fields))
        load_checkpoint(kept, trained)
        trained.save_pretrained(out)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), out)
    x = torch.randn(5, 6)
    torch.testing.assert_close(loaded.eval()(x), model.eval()(x))


def test_a_directory_is_for_adapters(tmp_path: Path) -> None:
    kept = tmp_path / "kept"

    def script(session: Session) -> None:
        model = Net()
        model.read.requires_grad_(False)
        fit(session, model)

    with running_job(tmp_path, checkpoints=kept) as job:
        job.start(0, script)
        job.join()
    with pytest.raises(UserError, match=r"name without a dot is that of a directory for adapters"):
        export(kept, tmp_path / "out")
