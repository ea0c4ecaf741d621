"""Two steps of Transformers' Trainer, or of ours, on samples that are packed into rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from packed_samples import IGNORED, flattened, make_samples
from training_step import Float64, Step
from transformers import PreTrainedModel


def weights_after(
    model: PreTrainedModel,
    folder: Path,
    per_device: int,
    accumulated: int,
    *,
    trainer_class: Any = None,
    collate: Any = flattened,
    evaluates: bool = True,
    **how: Any,
) -> Step:
    """Of two steps of four sequences, of which one does not count: so passes of as many differ. By
    default, the sequences of a pass are one row.
    """
    from transformers import TrainingArguments

    if trainer_class is None:
        from liger_patch.integrations.transformers import Trainer as trainer_class

    samples: Any = make_samples(9, 4, 13, 6, 5, 7, 3, 11, prompts=False)
    for unsupervised in (samples[2], samples[4]):
        unsupervised["labels"] = [IGNORED] * len(unsupervised["labels"])
    trainer: Any = trainer_class(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=2,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=accumulated,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=1e9,
            lr_scheduler_type="constant",
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **how,
        ),
        data_collator=collate,
        train_dataset=samples,
        eval_dataset=samples,
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(samples)
    with Float64():
        trainer.train()
        if evaluates:
            assert trainer.evaluate()["eval_loss"] > 0
    return {name: p.detach().clone() for name, p in model.named_parameters()}
