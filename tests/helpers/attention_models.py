"""Small models whose attention has masks, their batches, and which functions computed it: on a CPU,
the reference stands for flash attention, and masks are deferred as on a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import plain_flash
import pytest
import torch
import truths
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from liger_patch.kernels import attention, segments
from liger_patch.layers import masked_attention, masks, unpadded
from liger_patch.layers.masked_attention import DeferredMask

TOKENS, WINDOW = 40, 12
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gemma3_text": Gemma3TextConfig(
        **SIZES,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "llama": LlamaConfig(**SIZES),
}
FAMILIES: dict[str, PreTrainedConfig] = {
    **CONFIGS,
    "qwen2": Qwen2Config(
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
}
WINDOWS: dict[str, list[int | None]] = {  # of the two layers
    "gemma3_text": [WINDOW, None],
    "mistral": [WINDOW, WINDOW],
    "llama": [None, None],
    "qwen2": [None, WINDOW],
}
WARNINGS = pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")


def make_model(model_type: str, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[model_type])
    config.use_cache = False  # as Trainer has it
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.train()


def make_batch(kind: str) -> dict[str, Tensor]:
    """Two rows of one sequence each, or packed with three, or one of them with padding: an eighth
    of the batch, or so little that the batch keeps it.
    """
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, SIZES["vocab_size"], (2, TOKENS), generator=generator)
    batch = {"input_ids": input_ids, "labels": input_ids.masked_fill(input_ids % 3 == 0, -100)}
    if kind == "packed":
        lengths = [[7, 20, 13], [30, 1, 9]]
        places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        # a patched model does not predict these, whatever the labels
        labels = batch["labels"].masked_fill(places == 0, -100)
        return batch | {"position_ids": places, "labels": labels}
    if kind == "ones":
        return batch | {"attention_mask": torch.ones_like(input_ids)}
    if "padded" in kind:
        mask, padding = torch.ones_like(input_ids), 4 if "little" in kind else 10
        mask[1, slice(padding) if "left" in kind else slice(TOKENS - padding, None)] = 0
        labels = batch["labels"].masked_fill(mask == 0, -100)
        labels[1, padding] = -100  # as of a prompt: the last padded token predicts it
        return batch | {"attention_mask": mask, "labels": labels}
    return batch


def configured(**values: Any) -> Any:
    """A change of a model's configuration, as tables of cases have it."""
    return lambda model, _: model.config.update(values)


def causal_mask(kept: Tensor) -> Tensor:
    """Return (B, 1, T, T) bool: a caller's own mask of tokens (B, T) that are no padding."""
    place = torch.arange(TOKENS)
    return kept.bool()[:, None, None] & (place <= place[:, None])


@pytest.fixture(name="calls")
def served_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch, served=True)


class Calls:
    """The calls of flash attention and of PyTorch's SDPA, and the masks that were read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, served: bool) -> None:
        self.flash: list[segments.Segments] = []
        self.own: list[bool] = []  # whether there was a mask
        self.read = 0
        self.made = 0  # deferred masks whose values were needed
        own = torch.nn.functional.scaled_dot_product_attention

        def flash(query, key, value, found, scale=None) -> Tensor:
            self.flash.append(found)
            compute = truths.segment_attention if served else attention.segment_attention
            return compute(query, key, value, found, scale).contiguous()

        def with_sinks(query, key, value, sinks, found, scale) -> Tensor:
            return truths.segment_attention(query, key, value, found, scale, sinks).contiguous()

        def counted(*states: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
            self.own.append(attn_mask is not None)
            return own(*states, attn_mask=attn_mask, **options)

        def read(mask: Tensor, rows: int, used: Tensor | None) -> Any:
            self.read += 1
            return segments.segments_of(mask, rows, used)

        def read_intervals(*arguments: Any, **options: Any) -> Any:
            self.read += 1
            return segments.segments_of_intervals(*arguments, **options)

        def made(mask: DeferredMask) -> Tensor:
            self.made += mask.value is None
            return real_mask(mask)

        real_mask = DeferredMask.real_mask

        monkeypatch.setattr(masked_attention, "segment_attention", flash)
        monkeypatch.setattr(masked_attention, "segments_of", read)
        monkeypatch.setattr(masks, "segments_of_intervals", read_intervals)
        monkeypatch.setattr(DeferredMask, "real_mask", made)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        monkeypatch.setattr(masked_attention, "SDPA", counted)
        if served:
            monkeypatch.setattr(masked_attention, "sink_attention", with_sinks)
            monkeypatch.setattr(masked_attention, "serves_flash_attention", lambda *_: True)
            monkeypatch.setattr(unpadded, "has_lse_of_tokens", lambda: True)
            for name in ("flash_forward", "flash_backward"):
                monkeypatch.setattr(attention, name, getattr(plain_flash, name))
            for module in (masks, unpadded):
                monkeypatch.setattr(module, "may_serve_flash_attention", lambda *_: True)
            monkeypatch.setattr(masks, "LEAST_NUMBERS", 1)


def rows_of(model: Any) -> list[torch.Size]:
    """The shapes of what the layers of a backbone are given, as calls append them."""
    shapes: list[torch.Size] = []

    def hook(module: nn.Module, inputs: tuple[Tensor]) -> None:
        shapes.append(inputs[0].shape[:2])

    hook.__module__ = "torch.nn"  # a library's hook keeps no padding in the batch
    model.get_decoder().layers[0].input_layernorm.register_forward_pre_hook(hook)
    return shapes


@contextmanager
def seen_masks(model: Any) -> Iterator[list[Any]]:
    """The masks that the layers of a model are given within this context."""
    seen: list[Any] = []

    def see(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["attention_mask"])

    attentions = [layer.self_attn for layer in model.model.layers]
    hooks = [each.register_forward_pre_hook(see, with_kwargs=True) for each in attentions]
    try:
        yield seen
    finally:
        for each in hooks:
            each.remove()
