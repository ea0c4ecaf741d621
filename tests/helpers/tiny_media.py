"""Batches of the smallest models with images or sound before their text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tiny_configurations import AUDIO, IMAGE, VIDEO
from torch import Tensor
from transformers import PreTrainedModel

SEQUENCES = 2  # of a batch
N = 2 * SEQUENCES  # images or sounds of a batch, where a sequence has two


class Media(NamedTuple):
    """What a processor makes of images or sound."""

    prompt: list[int]  # the ids of one sequence, before its text
    inputs: dict[str, Any]  # the other arguments of the model
    # arguments with a value for each token: at those of the prompt, and at those of the text
    of_tokens: dict[str, tuple[Any, Any]] | None = None
    has_text: bool = True  # False: the model takes this instead of ids


Form = Callable[[Any], Media]  # of the model's configuration


def with_media(model: PreTrainedModel, batch: dict[str, Tensor], form: Form) -> dict[str, Any]:
    """`batch` with images or sound before the text of each sequence, ignored by the labels."""
    media = form(model.config)
    inputs = {name: _cast(value, model.dtype) for name, value in media.inputs.items()}
    if not media.has_text:
        return {"labels": batch["labels"], **inputs}
    ids = torch.tensor([media.prompt] * SEQUENCES)
    types = sum(number * (ids == token) for number, token in enumerate((IMAGE, VIDEO, AUDIO), 1))
    before = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.full_like(ids, -100),
        "token_type_ids": (ids == IMAGE).long(),
        "mm_token_type_ids": types,
    }
    joined = {name: torch.cat([before[name], value], 1) for name, value in batch.items()}
    length = batch["input_ids"].shape[1]
    for name, (of_prompt, of_text) in (media.of_tokens or {}).items():
        of_each = [of_prompt] * len(media.prompt) + [of_text] * length
        row = torch.stack([torch.as_tensor(each) for each in of_each])
        inputs[name] = torch.stack([row] * SEQUENCES)
    return joined | inputs


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_floating else value


def randn(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers for one shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def first(lengths: list[int], longest: int) -> Tensor:
    """(number of lengths, longest) True in the first so many of each row."""
    return torch.arange(longest) < torch.tensor(lengths)[:, None]
