"""Trainer with DeepSpeed's engine on the CPU, for test_distributed. Run once for each process.

Exits with an error unless a patched model is trained as an unpatched one is, fused, and without
real logits.
"""

import os
import sys
from pathlib import Path
from typing import Any

import deepspeed.comm.torch
import torch
from distributed_step import count_logits
from gloo_group import join, leave
from tiny_models import tiny_batch, tiny_model
from transformers import Trainer, TrainingArguments

from liger_patch import apply_patch, patch_status
from liger_patch.registry import available


def main(folder: Path, *stages: str) -> None:
    join(f"{folder}/group", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    deepspeed.comm.torch.build_shm_op = lambda: None  # which gloo does without: no compiler
    for stage in stages:
        check(int(stage), folder)
    leave()


def check(stage: int, folder: Path) -> None:
    expected, _ = train(stage, folder, patch=False)
    with count_logits() as computed:
        weights, model = train(stage, folder, patch=True)
    assert patch_status(model).fused, patch_status(model).reason
    assert not computed, f"real logits were computed {len(computed)} times"
    torch.testing.assert_close(weights, expected)


def train(stage: int, folder: Path, *, patch: bool) -> tuple[dict[str, torch.Tensor], Any]:
    (row,) = (row for row in available() if row.model_type == "llama")
    model = tiny_model(row)
    if patch:
        apply_patch(model, layers=True)
    batches = [tiny_batch(model, batch=1, seed=seed) for seed in range(8)]
    dataset = [{name: value[0] for name, value in batch.items()} for batch in batches]
    config = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        deepspeed=config,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=2,
        learning_rate=0.01,
        optim="sgd",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=dataset).train()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, model


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
