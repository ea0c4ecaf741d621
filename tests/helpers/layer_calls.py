"""Calls of layers' operators of weights as tensors, with products in autocast's dtype."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import autocast_dtype
from liger_patch.kernels.expert_steps import Activation, ExpertProjection
from liger_patch.kernels.experts import run_experts
from liger_patch.kernels.gated_mlp import run_gated_mlp
from liger_patch.kernels.gated_norm import run_gated_norm
from liger_patch.kernels.lora.linears import run_lora_linears
from liger_patch.kernels.lora.projection import LoraProjection, without_adapter

SWIGLU = Activation()


def dtype_of_products(x: Tensor) -> torch.dtype:
    return autocast_dtype(x.device.type, x.dtype) or x.dtype


def gated_mlp(
    x: Tensor,
    gate: Any,
    up: Any,
    down: Any,
    *,
    activation: str = "silu",
    slice_tokens: int | None = None,
) -> Tensor:
    parts: Any = [
        each if each is None or isinstance(each, LoraProjection) else without_adapter(each)
        for each in (gate, up, down)
    ]
    return run_gated_mlp(x, *parts, dtype_of_products(x), activation, slice_tokens)


def lora_linears(x: Tensor, projections: Sequence[LoraProjection]) -> tuple[Tensor, ...]:
    return run_lora_linears(x, projections, dtype_of_products(x), None)


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    first: ExpertProjection,
    last: ExpertProjection,
    *,
    activation: Activation = SWIGLU,
    slice_tokens: int | None = None,
) -> Tensor:
    how = activation, dtype_of_products(x), slice_tokens
    return run_experts(x, index, weights, first, last, *how)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group_size: int | None = None,
    activation: str = "silu",
    gate_first: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    how = group_size or x.shape[-1], activation, gate_first, dtype or x.dtype
    return run_gated_norm(x, gate, weight, eps, *how)
