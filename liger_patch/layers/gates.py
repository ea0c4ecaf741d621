"""What the kernels must know of the classes of gated feed-forward layers.

GATES has an entry for each form of forward. Its key is the set of names in the code of the class's
forward. A probe (``mlp``) tests the entry before a layer is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_patch.layers.checks import has_hooks


def _is_always_plain(self: Any) -> bool:
    return True


class Gate(NamedTuple):
    """Describe how a class computes ``down_proj(act(gate) * up)``."""

    products: Callable[[Any, Tensor], tuple[Tensor, Tensor | None]]  # gate and up, from x
    projections: tuple[str, ...] = ("gate_proj", "up_proj")  # the attributes of gate and up
    activation: str = "act_fn"
    down: str = "down_proj"
    # the layer's result from act(gate) * up, if the layer does more there than multiply by ``down``
    result: Callable[[Any, Tensor], Tensor] | None = None
    # whether a call now computes exactly the formula above: no dropout, no scale, no sparse gate
    is_plain: Callable[[Any], bool] = _is_always_plain


def _two_products(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return self.gate_proj(x), self.up_proj(x)


def _one_product(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute gate and up as the halves of one product (Phi-3, GLM-4)."""
    return self.gate_up_proj(x), None


def _sparse_gate(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Keep only the largest gates in some layers (Gemma 3n)."""
    gate = self.gate_proj(x)
    if self.activation_sparsity > 0.0:
        gate = self._gaussian_topk(gate)
    return gate, self.up_proj(x)


def _is_not_sparse(self: Any) -> bool:
    return self.activation_sparsity <= 0.0


def _scaled_gate(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scale the gate, and the result (Falcon-H1)."""
    return self.gate_proj(x) * self.gate_multiplier, self.up_proj(x)


def _scaled_result(self: Any, y: Tensor) -> Tensor:
    return self.down_proj(y) * self.down_multiplier


def _is_never_plain(self: Any) -> bool:
    return False


def _drops_gated(self: Any, y: Tensor) -> Tensor:
    """Drop features behind the activation (T5Gemma)."""
    return self.down_proj(self.dropout(y))


def _drops_nothing(self: Any) -> bool:
    return _is_idle(self.dropout)


def _is_idle(dropout: Any) -> bool:
    return not has_hooks(dropout) and not (dropout.training and dropout.p > 0.0)


def _drops_result(self: Any, y: Tensor) -> Tensor:
    """Drop features of the result (Seed-OSS)."""
    return nn.functional.dropout(self.down_proj(y), self.residual_dropout, self.training)


def _drops_no_result(self: Any) -> bool:
    return not (self.training and self.residual_dropout > 0.0)


def _two_inner_products(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return self.wi_0(x), self.wi_1(x)


def _t5_result(self: Any, y: Tensor) -> Tensor:
    """Drop features; the last product may be float32 in a 16-bit model (T5)."""
    y, weight = self.dropout(y), self.wo.weight
    if isinstance(weight, Tensor) and weight.dtype not in (y.dtype, torch.int8):
        y = y.to(weight.dtype)
    return self.wo(y)


def _is_plain_t5(self: Any) -> bool:
    return _drops_nothing(self) and self.wo.weight.dtype == self.wi_0.weight.dtype


def _drops_before_product(self: Any, y: Tensor) -> Tensor:
    return self.wo(self.dropout(y))


def _one_input_product(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return self.input_linear(x), None


def _one_wide_product(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return self.Wi(x), None


def _drops_before_wide_product(self: Any, y: Tensor) -> Tensor:
    return self.Wo(self.drop(y))


def _drops_nothing_there(self: Any) -> bool:
    return _is_idle(self.drop)


T5_GATE = Gate(_two_inner_products, ("wi_0", "wi_1"), "act", "wo", _t5_result, _is_plain_t5)
GATES = {  # by the names in the code of forward
    frozenset(names.split()): gate
    for names, gate in {
        "act_fn down_proj gate_proj up_proj": Gate(_two_products),
        "act_fn down_proj dtype float gate_proj to up_proj": Gate(_two_products),
        "activation_fn down_proj gate_proj up_proj": Gate(
            _two_products, activation="activation_fn"
        ),
        "activation_fn chunk down_proj gate_up_proj": Gate(
            _one_product, ("gate_up_proj",), "activation_fn"
        ),
        "Wi Wo act chunk drop": Gate(
            _one_wide_product,
            ("Wi",),
            "act",
            "Wo",
            _drops_before_wide_product,
            _drops_nothing_there,
        ),
        "activation chunk input_linear output_linear": Gate(
            _one_input_product, ("input_linear",), "activation", "output_linear"
        ),
        "_gaussian_topk act_fn activation_sparsity down_proj gate_proj up_proj": Gate(
            _sparse_gate, is_plain=_is_not_sparse
        ),
        "act_fn down_multiplier down_proj gate_multiplier gate_proj up_proj": Gate(
            _scaled_gate, result=_scaled_result, is_plain=_is_never_plain
        ),
        "act_fn down_proj dropout gate_proj up_proj": Gate(
            _two_products, result=_drops_gated, is_plain=_drops_nothing
        ),
        "act_fn down_proj dropout functional gate_proj nn residual_dropout training up_proj": Gate(
            _two_products, result=_drops_result, is_plain=_drops_no_result
        ),
        "act dropout wi_0 wi_1 wo": T5_GATE._replace(result=_drops_before_product),
        "Tensor act dropout dtype int8 isinstance to torch weight wi_0 wi_1 wo": T5_GATE,
    }.items()
}
