"""TRL's trainers train in a job as they do alone. The lowest versions of other libraries have no TRL."""

from __future__ import annotations

import functools
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.worker.session import Session
from tests.testing.harness import running_job
from tests.testing.oracle import assert_each_record_once, of_the_end
from tests.testing.trained import asks

pytestmark = [
    pytest.mark.nightly,  # its import takes longer than its tests
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed"),
    # TRL gives and reads what transformers has named otherwise since.
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`trl_trainers`, which the other processes of pytest need not import."""
    from tests.testing import trl_trainers
    from tests.testing.trainers import have_workers_as_threads

    have_workers_as_threads(monkeypatch)
    return trl_trainers


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft accumulates": ("sft", {"gradient_accumulation_steps": 2}),
    "sft packs": ("sft", {"packing": True, "max_length": 16}),
    "sft of adapters": ("sft", {"adapters": True}),
    "dpo accumulates": ("dpo", {"gradient_accumulation_steps": 2}),
    "dpo computes first": ("dpo", {"precompute_ref_log_probs": True}),
    "dpo of adapters": ("dpo", {"adapters": True}),
    "reward": ("reward", {}),
}


@pytest.mark.parametrize(("kind", "options"), CASES.values(), ids=CASES)
def test_the_model_and_the_curve_are_those_of_the_trainer_alone(
    trl: Any, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    make = functools.partial(getattr(trl, kind), **options)
    alone = make(tmp_path / "alone")
    alone.train()
    trainers = list[Any]()

    def script(session: Session) -> None:
        trainer = trl.prepared(make(tmp_path / "job"), session)
        trainer.train()
        trainers.append(trainer)

    with running_job(tmp_path / "job", data={"shuffle": False}) as job:
        job.run(script, workers=1)
        assert_each_record_once(job.commits(), records=len(alone.train_dataset), epochs=trl.EPOCHS)
    ours = trainers[0]
    for a, b in zip(ours.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    losses = [[step["loss"] for step in each.state.log_history if "loss" in step] for each in (ours, alone)]
    assert losses[0] == pytest.approx(losses[1])
    assert len(set(losses[0])) > 1


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_two_workers_share_the_batches_of_the_trainer_alone(trl: Any, tmp_path: Path, kind: str) -> None:
    """In between one of them is lost and joins again, the parameter server dies, and a third worker comes."""
    make = getattr(trl, kind)
    batch, options = 6, {"warmup_steps": 0, "max_grad_norm": 0.0}  # the last batch is as large as the others
    alone = make(tmp_path / "alone", per_device_train_batch_size=batch, **options)
    alone.train()
    trainers, lock, lost = list[Any](), threading.Lock(), threading.Event()

    def lose() -> None:
        job.declare_gone(1)
        job.restart(0)
        job.start(2, script)
        lost.set()

    def script(session: Session) -> None:
        with lock:  # `datasets` has no threads in mind
            made = make(tmp_path / "job", per_device_train_batch_size=batch // 2, **options)
        if session.worker == 1:
            made.add_callback(losing)
        elif session.worker == 0:
            made.add_callback(trl.Losing(lambda: job.until(lambda: asks(job, 1), "worker 1 takes part")))
        trainers.append(trl.prepared(made, session))
        made.train()

    losing = trl.Losing(lose)
    fields: dict[str, Any] = {"consistency": {"globalBatchSize": batch}, "data": {"shuffle": False}}
    with running_job(tmp_path / "job", checkpoints=tmp_path / "checkpoints", **fields) as job:
        job.run(script, workers=2)
        assert_each_record_once(of_the_end(job.commits()), records=trl.RECORDS, epochs=trl.EPOCHS)
    assert lost.is_set()
    assert len(trainers) == 3
    for trainer in trainers:
        for a, b in zip(trainer.model.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)  # the losses are computed in float32
