"""What tests of trainers share: options, and the size of the largest tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

QUIET: dict[str, Any] = {  # on the CPU, with a log of each step, and no other output
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "dataloader_pin_memory": False,
}


def samples_of(batch: dict[str, Tensor]) -> Any:
    """The rows of a batch, as a trainer takes them."""
    return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]


def losses_and_norms(model: Any, folder: Path, batch: dict[str, Tensor], **options: Any) -> Tensor:
    """Train a model with Transformers' Trainer on the rows of a batch. Return (steps, 2): the loss
    and the norm of the gradients of each step.
    """
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(str(folder), **QUIET, **options)
    trainer = Trainer(model, arguments, train_dataset=samples_of(batch))
    trainer.train()
    history = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]
    assert len(history) == arguments.max_steps
    return torch.tensor(history, dtype=torch.float64)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor in memory that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is Tensor:  # a deferred one is of another class
                size = leaf.untyped_storage().nbytes() // leaf.itemsize
                self.elements = max(self.elements, size)
        return result
