"""Measure steps of TRL's SFTTrainer, loss and metrics included, with its own head and with ours.

    python -m benchmarks sft_step

Measured and checked as ``training_step.py`` does it: forward and backward, no optimizer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .benchmark import Benchmark
from .model_contenders import Loss, shared_copy
from .models import MODELS
from .training_step import run_model

NAMES = ("Llama-3.2-1B, 8 x 2048", "Gemma-3-270M, 8 x 2048")


def contenders(model: nn.Module, **_: Any) -> dict[str, Callable[[], Loss]]:
    """Return functions that make the contenders, by name. All share the weights of ``model``."""
    return {
        "TRL": partial(_sft, model, use_liger_patch=False),
        "liger_patch": partial(_sft, model, use_liger_patch=True),
        "liger_patch, layers": partial(_sft, model, use_liger_patch=True, layers=True),
    }


def _sft(model: nn.Module, *, use_liger_patch: bool, layers: bool = False) -> Loss:
    """Return the loss of a trainer of a copy; it computes the metrics too."""
    from liger_patch import apply_patch
    from liger_patch.integrations.trl import SFTConfig, SFTTrainer

    own = shared_copy(model)
    if use_liger_patch:
        apply_patch(own, layers=layers)  # the flag keeps the choice of layers
    config = SFTConfig(
        tempfile.mkdtemp(),
        use_liger_patch=use_liger_patch,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False,
        bf16=False,  # the weights are in bf16 already
        use_cpu=next(model.parameters()).device.type == "cpu",
        report_to=[],
    )
    trainer = SFTTrainer(
        own,
        config,
        train_dataset=_dataset(),
        processing_class=tiny_tokenizer(),
    )

    def loss(batch: Mapping[str, Tensor]) -> Tensor:
        inputs = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
        count = (batch["labels"][:, 1:] != -100).sum()
        return trainer.compute_loss(trainer.model, inputs, num_items_in_batch=count)

    return loss


def _dataset() -> Any:
    """Return a dataset that is never read: the trainer needs one."""
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": [[0, 1]], "labels": [[0, 1]]})


def tiny_tokenizer() -> Any:
    """Return a tokenizer that is never used: the trainer needs one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


BENCHMARK = Benchmark(
    packages=("transformers", "trl"),
    cases=lambda options: {
        "sft_steps": [
            partial(run_model, model, rounds=options.rounds, of=contenders)
            for model in MODELS
            if model.name in NAMES
        ]
    },
    rounds=8,
)
