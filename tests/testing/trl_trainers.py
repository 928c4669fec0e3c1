"""What tests of TRL's trainers share. Importing it takes seconds, so only a test that needs it does."""

from __future__ import annotations

import copy
import functools
import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import tokenizers
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

trl: Any = importlib.import_module("trl")

EPOCHS, RECORDS, BATCH = 2, 30, 4

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


def sft(directory: Path, *, adapters: bool = False, **options: Any) -> Any:
    return trl.SFTTrainer(
        model(),
        arguments(trl.SFTConfig, directory, **options),
        train_dataset=texts("prompt", "completion"),
        processing_class=tokenizer(),
        **(LORA if adapters else {}),
    )


def dpo(directory: Path, *, adapters: bool = False, **options: Any) -> Any:
    return trl.DPOTrainer(
        model(),
        args=arguments(trl.DPOConfig, directory, **options),
        train_dataset=texts("prompt", "chosen", "rejected"),
        processing_class=tokenizer(),
        **(LORA if adapters else {"ref_model": model()}),
    )


def reward(directory: Path, **options: Any) -> Any:
    return trl.RewardTrainer(
        model(LlamaForSequenceClassification, num_labels=1),
        args=arguments(trl.RewardConfig, directory, **options),
        train_dataset=texts("chosen", "rejected"),
        processing_class=tokenizer(),
    )


class Losing(TrainerCallback):  # type: ignore[misc]
    """Calls `lose` once, as the second step begins."""

    def __init__(self, lose: Callable[[], object]) -> None:
        self._lose = [lose]

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 2 and self._lose:
            self._lose.pop()()


def prepared(trainer: Any, session: Session) -> Any:
    return prepare_trainer(trainer, session=session)
