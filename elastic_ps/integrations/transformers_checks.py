"""Refuses settings of a Trainer of Hugging Face that cannot work in a job. Each has a sentence."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from elastic_ps.errors import UsageError
from elastic_ps.worker.session import Session


def check(trainer: Any, session: Session, *, own: type[Any]) -> None:
    """Raises UsageError if what the trainer is set up for cannot work in this job.

    Args:
        own: the class that is in front of the trainer's in a job.
    """
    args, kind = trainer.args, type(trainer).__name__
    sampling = args.train_sampling_strategy
    whole = float(args.num_train_epochs).is_integer() or args.max_steps > 0
    steps_here = session.spec.consistency.mode == "local"
    with_standby = session.spec.parameter_server.durability == "standby" and not steps_here
    problems: list[tuple[bool, str]] = [
        (
            args.world_size > 1 or args.parallel_mode.value in ("distributed", "tpu"),
            "another launcher has started this process as one of several. In a job each worker uses "
            "transformers alone, and the job adds up gradients: start the script with `elastic-ps run SCRIPT "
            "--workers N`. With worker.processes, make the trainer of a class (ElasticMixin, Trainer)",
        ),
        (
            args.n_gpu > 1,
            f"the Trainer would divide a batch among {args.n_gpu} GPUs itself. Give each worker one with "
            "CUDA_VISIBLE_DEVICES, or start a process for each with worker.processes",
        ),
        (
            trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
            "DeepSpeed and FSDP divide the model, but each worker of a job holds the whole model. Leave out "
            "deepspeed and fsdp",
        ),
        (
            sampling not in ("random", "sequential"),
            f"train_sampling_strategy is {sampling!r}, which chooses records itself, but a job trains every "
            "record once in each epoch. Leave it out, or sort the data set by length and set 'sequential'",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size restarts the training, which a job does not allow. Leave it out, and set "
            "per_device_train_batch_size",
        ),
        (
            not whole,
            f"num_train_epochs is {args.num_train_epochs}, but a job counts whole epochs. Set a whole "
            "number, or max_steps",
        ),
        (
            args.load_best_model_at_end,
            "load_best_model_at_end needs the checkpoints of one process. Leave it out, and let an evaluator "
            "keep the best checkpoint, see docs/guides/evaluator.md",
        ),
        (
            getattr(args, "enable_jit_checkpoint", False),
            "enable_jit_checkpoint ends the training at the SIGTERM to one worker, but a job goes on without "
            "that worker, and writes checkpoints itself. Leave it out",
        ),
        (
            args.push_to_hub,
            "push_to_hub uploads what worker 0 has, but another worker may have saved the model. Leave it "
            "out, and call trainer.push_to_hub() after the training",
        ),
        (
            with_standby and args.max_grad_norm > 0,
            f"max_grad_norm is {args.max_grad_norm} (its default is 1.0), but parameterServer.durability: "
            "standby does not allow clipping. Use TrainingArguments(max_grad_norm=0), or set "
            "parameterServer.durability: checkpoint",
        ),
        (
            str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)) == "greedy",
            "lr_scheduler_type is greedy, which steps by the loss of one process. Use another schedule",
        ),
        (
            getattr(args, "sync_ref_model", False),
            "sync_ref_model changes the reference model by each worker's own count of steps, so the workers "
            "would have different ones. Leave it out",
        ),
        (
            _own_loader(trainer, own),
            f"{kind} has a get_train_dataloader of its own, so the job would not know which records are in "
            "a batch. Use a trainer without one, such as SFTTrainer, DPOTrainer or RewardTrainer of TRL",
        ),
    ]
    for given, said in problems:
        if given:
            raise UsageError(said)


def _own_loader(trainer: Any, own: type[Any]) -> bool:
    """Return True if its class replaces what gives the Trainer its batches."""
    kinds = (kind for kind in type(trainer).__mro__ if kind not in (own, Trainer))
    return any("get_train_dataloader" in vars(kind) for kind in kinds)
