"""Samples of several lengths, ways to bring them to a model in packed rows, and the truth: the
eager model, called with one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tiny_models import END_OF_WORDS, FIRST_WORD, PAD, ROWS, tiny_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from training_step import Step, call, gradients, widened
from transformers import DataCollatorWithFlattening, PreTrainedModel

MODEL_TYPES = ["llama", "gemma2", "qwen3"]
IGNORED = -100
Sample = dict[str, list[int]]


def make_model(model_type: str = "llama") -> PreTrainedModel:
    model = widened(tiny_model(ROWS[model_type]))
    # mostly as Trainer has it: with a cache, Transformers' attention looks across boundaries
    model.config.use_cache = model.config.get_text_config().use_cache = False
    return model


def make_samples(*lengths: int, prompts: bool = True, seed: int = 0) -> list[Sample]:
    """Sequences of these lengths; with prompts, a third of each is not supervised."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths:
        ids = torch.randint(FIRST_WORD, END_OF_WORDS, (length,), generator=generator).tolist()
        prompt = length // 3 if prompts else 0
        samples.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return samples


def tensors(sample: Sample) -> dict[str, Tensor]:
    return {name: torch.tensor([values]) for name, values in sample.items()}


def positions_only(samples: list[Sample]) -> dict[str, Any]:
    """One row, and labels that nobody has masked at the boundaries."""
    lengths = [len(s["input_ids"]) for s in samples]
    row = {name: [x for s in samples for x in s[name]] for name in ("input_ids", "labels")}
    return tensors({**row, "position_ids": [i for n in lengths for i in range(n)]})


def two_rows(samples: list[Sample]) -> dict[str, Any]:
    """Packed rows of the same length, the second padded."""
    rows = [positions_only(samples[:2]), positions_only(samples[2:])]
    length = max(row["input_ids"].shape[1] for row in rows)
    padding = {"input_ids": PAD, "labels": IGNORED, "position_ids": 0}
    return {
        name: torch.cat(
            [
                torch.nn.functional.pad(row[name], (0, length - row[name].shape[1]), value=value)
                for row in rows
            ]
        )
        for name, value in padding.items()
    }


def flattened(samples: list[Sample]) -> dict[str, Any]:
    """Transformers' own collator."""
    return DataCollatorWithFlattening()(samples, return_tensors="pt")


def flattened_for_kernels(samples: list[Sample]) -> dict[str, Any]:
    """The same with what flash attention and linear attention ask for."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    return collate(samples, return_tensors="pt")


def trl_padding_free(samples: list[Sample]) -> dict[str, Any]:
    pytest.importorskip("trl")
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate: Any = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=True)
    return collate(samples)


def trl_packed(samples: list[Sample]) -> dict[str, Any]:
    """Of TRL's packing: each row says how long its sequences are."""
    packed: Any = [
        {
            "input_ids": [x for s in part for x in s["input_ids"]],
            "labels": [x for s in part for x in s["labels"]],
            "seq_lengths": [len(s["input_ids"]) for s in part],
        }
        for part in (samples[:2], samples[2:])
    ]
    return trl_padding_free(packed)


def padded(samples: list[Sample], side: str = "right") -> dict[str, Tensor]:
    """Not packed: one sequence a row."""
    longest = max(len(s["input_ids"]) for s in samples)
    batch: dict[str, list[Tensor]] = {"input_ids": [], "labels": [], "attention_mask": []}
    padding = {"input_ids": PAD, "labels": IGNORED, "attention_mask": 0}
    for sample in samples:
        missing = longest - len(sample["input_ids"])
        width = (0, missing) if side == "right" else (missing, 0)
        values = {**sample, "attention_mask": [1] * len(sample["input_ids"])}
        for name, value in padding.items():
            row = torch.tensor(values[name])
            batch[name].append(torch.nn.functional.pad(row, width, value=value))
    return {name: torch.stack(rows) for name, rows in batch.items()}


PACKINGS: list[Callable[[list[Sample]], dict[str, Any]]] = [
    positions_only,
    two_rows,
    flattened,
    flattened_for_kernels,
    trl_padding_free,
    trl_packed,
]


def truth_of(model: PreTrainedModel, samples: list[Sample]) -> Step:
    """Loss and gradients of the eager model, one sequence at a time."""
    logits = [call(model, {"input_ids": tensors(s)["input_ids"]}).logits[0] for s in samples]
    return averaged(model, logits, samples)


def packed_eagerly(model: PreTrainedModel, samples: list[Sample]) -> Step:
    """Loss and gradients of the eager model, of one packed row."""
    batch = {name: value.to(model.device) for name, value in positions_only(samples).items()}
    del batch["labels"]
    (row,) = call(model, batch).logits
    return averaged(model, row.split([len(s["input_ids"]) for s in samples]), samples)


def averaged(
    model: PreTrainedModel,
    logits: Iterable[Tensor],
    samples: list[Sample],
    *,
    by_sequence: bool = False,
) -> Step:
    """Of the logits (T, V) of each sequence: the mean over all tokens, or of each one's mean."""
    sums, counts = [], []
    for rows, sample in zip(logits, samples, strict=True):
        labels = torch.tensor(sample["labels"][1:], device=rows.device)
        if (labels != IGNORED).any():
            sums.append(cross_entropy(rows[:-1], labels, reduction="sum"))
            counts.append((labels != IGNORED).sum())
    total, count = torch.stack(sums), torch.stack(counts)
    loss = (total / count).mean() if by_sequence else total.sum() / count.sum()
    return {"loss": loss.detach(), **gradients(model, loss)}
