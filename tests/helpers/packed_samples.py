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
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence
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


def joined(samples: list[Sample]) -> Sample:
    return {name: [x for s in samples for x in s[name]] for name in ("input_ids", "labels")}


def positions_only(samples: list[Sample]) -> dict[str, Any]:
    """One row, and labels that nobody has masked at the boundaries."""
    positions = [i for s in samples for i in range(len(s["input_ids"]))]
    return tensors({**joined(samples), "position_ids": positions})


def two_rows(samples: list[Sample]) -> dict[str, Any]:
    """Packed rows of the same length, the second padded."""
    rows = [positions_only(samples[:2]), positions_only(samples[2:])]
    padding = {"input_ids": PAD, "labels": IGNORED, "position_ids": 0}
    return {
        name: pad_sequence([row[name][0] for row in rows], batch_first=True, padding_value=value)
        for name, value in padding.items()
    }


def ignored_by_another_number(samples: list[Sample]) -> dict[str, Any]:
    batch = positions_only(samples)
    batch["labels"][batch["labels"] == IGNORED] = -7
    return {**batch, "ignore_index": -7}


def flattened(samples: list[Sample]) -> dict[str, Any]:
    """Transformers' own collator."""
    return DataCollatorWithFlattening()(samples, return_tensors="pt")


def flattened_and_shifted(samples: list[Sample]) -> dict[str, Any]:
    batch = flattened(samples)
    return {**batch, "shift_labels": pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]}


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
        joined(part) | {"seq_lengths": [len(s["input_ids"]) for s in part]}
        for part in (samples[:2], samples[2:])
    ]
    return trl_padding_free(packed)


def padded(samples: list[Sample], side: str = "right") -> dict[str, Tensor]:
    """Not packed: one sequence a row."""
    rows = [{**s, "attention_mask": [1] * len(s["input_ids"])} for s in samples]
    padding = {"input_ids": PAD, "labels": IGNORED, "attention_mask": 0}
    return {
        name: pad_sequence([torch.tensor(row[name]) for row in rows], True, value, side)
        for name, value in padding.items()
    }


PACKINGS: list[Callable[[list[Sample]], dict[str, Any]]] = [
    positions_only,
    ignored_by_another_number,
    two_rows,
    flattened,
    flattened_and_shifted,
    flattened_for_kernels,
    trl_padding_free,
    trl_packed,
]


def truth_of(model: PreTrainedModel, samples: list[Sample], **how: Any) -> Step:
    """Loss and gradients of the eager model, one sequence at a time; see ``averaged``."""
    logits = [call(model, {"input_ids": tensors(s)["input_ids"]}).logits[0] for s in samples]
    return averaged(model, logits, samples, **how)


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
    weights_of: Callable[[list[int]], list[float]] = lambda ids: [1.0] * len(ids),
) -> Step:
    """Of the logits (T, V) of each sequence: the mean over all tokens, or of each one's mean, where
    a token weighs what ``weights_of`` says of the sequence's ids.
    """
    sums, counts = [], []
    for rows, sample in zip(logits, samples, strict=True):
        labels = torch.tensor(sample["labels"][1:], device=rows.device)
        weights = torch.tensor(weights_of(sample["input_ids"])[1:]).to(rows) * (labels != IGNORED)
        if (labels != IGNORED).any():
            sums.append((cross_entropy(rows[:-1], labels, reduction="none") * weights).sum())
            counts.append(weights.sum())
    total, count = torch.stack(sums), torch.stack(counts)
    loss = (total / count).mean() if by_sequence else total.sum() / count.sum()
    return {"loss": loss.detach(), **gradients(model, loss)}
