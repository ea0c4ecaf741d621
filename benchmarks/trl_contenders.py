"""Steps of TRL's SFTTrainer on one model: with its own head, and with ours."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from model_contenders import Loss, shared_copy
from torch import Tensor, nn


def contenders(model: nn.Module, **_: Any) -> dict[str, Callable[[], Loss]]:
    """Name to what makes the contender. All share the weights of ``model``."""
    return {
        "TRL": partial(_sft, model, use_liger_patch=False),
        "liger_patch": partial(_sft, model, use_liger_patch=True),
    }


def _sft(model: nn.Module, *, use_liger_patch: bool) -> Loss:
    """Loss and metrics of a batch, as a trainer of a copy computes them."""
    from liger_patch.integrations.trl import SFTConfig, SFTTrainer

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
        shared_copy(model),
        config,
        train_dataset=_dataset(),
        processing_class=_tokenizer(),
    )

    def loss(batch: Mapping[str, Tensor]) -> Tensor:
        inputs = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
        count = (batch["labels"][:, 1:] != -100).sum()
        return trainer.compute_loss(trainer.model, inputs, num_items_in_batch=count)

    return loss


def _dataset() -> Any:
    """Never read: a trainer is not made without one."""
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": [[0, 1]], "labels": [[0, 1]]})


def _tokenizer() -> Any:
    """Likewise."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
