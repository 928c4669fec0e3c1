"""Train LoRA adapters on a small BERT to tell which half of its vocabulary a sentence has more of.

elastic-ps run examples/peft/job.yaml, or alone in one process: python examples/peft/train.py
Afterwards, with the directory of the job's checkpoints: elastic-ps export CHECKPOINTS adapters
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from elastic_ps.integrations.transformers import prepare_trainer

WORDS, LENGTH = 64, 15


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences of 15 random words; the label is 1 if most words are of the second half."""

    def __init__(self, records: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(WORDS, (records, LENGTH), generator=generator)
        self.labels = ((self.words >= WORDS // 2).sum(1) > LENGTH // 2).long()

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def base() -> BertForSequenceClassification:
    """Stands for a model of `from_pretrained`, which has the same values in each worker."""
    torch.manual_seed(1)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, **size))


def main(epochs: int = 3, batch_size: int = 16, lr: float = 0.01, output: str = "runs/peft") -> None:
    """Train the adapters and the classifier, save them, and evaluate."""
    layers = ["word_embeddings", "query", "value"]
    config = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=layers)
    arguments = TrainingArguments(
        output_dir=output,
        num_train_epochs=epochs,
        per_device_train_batch_size=batch_size,
        learning_rate=lr,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Trainer(
        get_peft_model(base(), config),
        arguments,
        train_dataset=Sentences(2000, seed=0),
        eval_dataset=Sentences(500, seed=1),
        compute_metrics=lambda given: {"accuracy": (given.predictions.argmax(1) == given.label_ids).mean()},
    )
    prepare_trainer(trainer, base="external")  # alone: without this line
    trainer.train()
    trainer.save_model()
    if trainer.session.is_chief:
        trainer.session.report(test_accuracy=trainer.evaluate()["eval_accuracy"])


if __name__ == "__main__":
    main()
