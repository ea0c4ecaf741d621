"""Trainer, or TRL's SFTTrainer, with DeepSpeed's engine on the CPU, for test_distributed.

Its cases are "transformers" or "trl", and a stage of ZeRO. Exits with an error unless a patched
model is trained as an unpatched one is, fused, and without real logits.
"""

from pathlib import Path
from typing import Any

import deepspeed
import torch
from distributed_step import count_logits
from gloo_group import compile_no_collectives, each_case
from tiny_models import LLAMA, tiny_batch, tiny_model
from torch import distributed as dist
from trainers import QUIET
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from liger_patch import apply_patch, patch_status


def check(case: str, folder: Path, *_: object) -> None:
    library, stage = case.split()
    compile_no_collectives()
    # once: behind a case of ZeRO-3, a new model may be partitioned as it is made, on all ranks
    if dist.get_rank() == 0 and not (folder / "model").exists():
        tiny_model(LLAMA).save_pretrained(folder / "model")
    dist.barrier()
    train = {"transformers": train_with_trainer, "trl": train_with_trl}[library]
    expected = trained(train(int(stage), folder, patch=False))
    with count_logits() as computed:
        trainer = train(int(stage), folder, patch=True)
        results = trained(trainer)
    status = patch_status(trainer.model)
    assert status.fused, status.reason
    assert not computed, f"real logits were computed {len(computed)} times"
    torch.testing.assert_close(results, expected)


def trained(trainer: Any) -> dict[str, Any]:
    """What training logs, and the weights after it."""
    trainer.train()
    logs = [
        {
            name: torch.tensor(value, dtype=torch.float32)
            for name, value in log.items()
            if not name.endswith(("runtime", "_second", "step_time"))
        }
        for log in trainer.state.log_history
    ]
    assert any("loss" in log for log in logs), logs
    with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
        weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return {"logs": logs, **weights}


def configuration(stage: int, folder: Path) -> dict[str, Any]:
    """Arguments of a trainer."""
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}  # nothing is too small
    return {
        "output_dir": str(folder),
        "deepspeed": {
            "zero_optimization": {"stage": stage, **zero},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 0.01,
        "optim": "sgd",
        **QUIET,
    }


def train_with_trainer(stage: int, folder: Path, *, patch: bool) -> Any:
    arguments = TrainingArguments(**configuration(stage, folder))
    # ZeRO-3 partitions the model while it is loaded, before it is patched
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
    if patch:
        apply_patch(model, layers=True)
    batches = [tiny_batch(model, batch=1, seed=seed) for seed in range(8)]
    dataset = [{name: value[0] for name, value in batch.items()} for batch in batches]
    return Trainer(model=model, args=arguments, train_dataset=dataset)


def train_with_trl(stage: int, folder: Path, *, patch: bool) -> Any:
    from tiny_text import prompts_and_completions, tiny_tokenizer

    from liger_patch.integrations.trl import SFTConfig, SFTTrainer

    options = {"bf16": False, "gradient_checkpointing": False, "use_liger_patch": patch}
    arguments = SFTConfig(**configuration(stage, folder), **options)
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        args=arguments,
        train_dataset=prompts_and_completions(),
        processing_class=tiny_tokenizer(),
    )


if __name__ == "__main__":
    each_case(check)
