"""TRL's trainers train in a job as they do alone. The lowest versions of other libraries have no TRL."""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from elastic_ps.integrations.transformers import prepare_trainer
from elastic_ps.worker.session import Session
from tests.testing.harness import running_job
from tests.testing.oracle import assert_each_record_once, of_the_end
from tests.testing.trainers import have_workers_as_threads

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

# TRL gives and reads what transformers has named otherwise since.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")

EPOCHS, RECORDS, BATCH = 2, 30, 4


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    have_workers_as_threads(monkeypatch)


WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(40))]
LORA = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}


def texts(*columns: str) -> Any:
    """Records with texts of different lengths."""
    draw = random.Random(1)

    def text() -> str:
        return "".join(" " + draw.choice(WORDS[3:]) for _ in range(draw.randint(3, 9)))

    return datasets.Dataset.from_list([{name: text() for name in columns} for _ in range(RECORDS)])


def tokenizer() -> Any:
    known = {word: number for number, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {name: f"<{name[:3]}>" for name in ("pad_token", "eos_token", "unk_token")}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def model(kind: Any = LlamaForCausalLM, **options: Any) -> Any:
    """A new one with the same values: workers are threads, which draw from one generator of torch."""
    return copy.deepcopy(_first(kind, **options))


@functools.cache
def _first(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return kind(LlamaConfig(vocab_size=len(WORDS), **sizes, **heads, **special, **options)).double()


def arguments(kind: Any, directory: Path, **options: Any) -> Any:
    usual = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 0.01,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    return kind(output_dir=str(directory), **(usual | options))


def sft(directory: Path, given: Any = None, **options: Any) -> Any:
    return trl.SFTTrainer(
        model(),
        arguments(trl.SFTConfig, directory, **options),
        train_dataset=texts("prompt", "completion"),
        processing_class=tokenizer(),
        **(given or {}),
    )


def dpo(directory: Path, given: Any = None, **options: Any) -> Any:
    return trl.DPOTrainer(
        model(),
        args=arguments(trl.DPOConfig, directory, **options),
        train_dataset=texts("prompt", "chosen", "rejected"),
        processing_class=tokenizer(),
        **({"ref_model": model()} if given is None else given),
    )


def reward(directory: Path, **options: Any) -> Any:
    return trl.RewardTrainer(
        model(LlamaForSequenceClassification, num_labels=1),
        args=arguments(trl.RewardConfig, directory, **options),
        train_dataset=texts("chosen", "rejected"),
        processing_class=tokenizer(),
    )


TRAINERS: dict[str, Callable[[Path], Any]] = {
    "sft accumulates": lambda directory: sft(directory, gradient_accumulation_steps=2),
    "sft packs": lambda directory: sft(directory, packing=True, max_length=16),
    "sft of adapters": lambda directory: sft(directory, LORA),
    "dpo accumulates": lambda directory: dpo(directory, gradient_accumulation_steps=2),
    "dpo computes first": lambda directory: dpo(directory, precompute_ref_log_probs=True),
    "dpo of adapters": lambda directory: dpo(directory, LORA),
    "reward": reward,
}


@pytest.mark.parametrize("name", TRAINERS)
def test_the_model_and_the_curve_are_those_of_the_trainer_alone(tmp_path: Path, name: str) -> None:
    make = TRAINERS[name]
    alone = make(tmp_path / "alone")
    alone.train()
    trainers = list[Any]()

    def script(session: Session) -> None:
        trainer = prepare_trainer(make(tmp_path / "job"), session=session)
        trainer.train()
        trainers.append(trainer)

    with running_job(tmp_path / "job", data={"shuffle": False}) as job:
        job.run(script, workers=1)
        assert_each_record_once(job.commits(), records=len(alone.train_dataset), epochs=EPOCHS)
    ours = trainers[0]
    for a, b in zip(ours.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    losses = [[step["loss"] for step in each.state.log_history if "loss" in step] for each in (ours, alone)]
    assert losses[0] == pytest.approx(losses[1])
    assert len(set(losses[0])) > 1


@pytest.mark.parametrize("make", [sft, dpo, reward])
def test_two_workers_share_the_batches_of_the_trainer_alone(tmp_path: Path, make: Callable[..., Any]) -> None:
    """In between one of them is lost and joins again, the parameter server dies, and a third worker comes."""
    batch, options = 6, {"warmup_steps": 0, "max_grad_norm": 0.0}  # the last batch is as large as the others
    alone = make(tmp_path / "alone", per_device_train_batch_size=batch, **options)
    alone.train()
    trainers, lock, lost = list[Any](), threading.Lock(), threading.Event()

    class Losing(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 2 and not lost.is_set():
                lost.set()
                job.declare_gone(1)
                job.restart(0)
                job.start(2, script)

    def script(session: Session) -> None:
        with lock:  # `datasets` has no threads in mind
            made = make(tmp_path / "job", per_device_train_batch_size=batch // 2, **options)
        if session.worker == 1:
            made.add_callback(Losing())
        trainers.append(prepare_trainer(made, session=session))
        made.train()

    fields: dict[str, Any] = {"consistency": {"globalBatchSize": batch}, "data": {"shuffle": False}}
    with running_job(tmp_path / "job", checkpoints=tmp_path / "checkpoints", **fields) as job:
        job.run(script, workers=2)
        assert_each_record_once(of_the_end(job.commits()), records=RECORDS, epochs=EPOCHS)
    assert lost.is_set()
    assert len(trainers) == 3
    for trainer in trainers:
        for a, b in zip(trainer.model.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)  # the losses are computed in float32
