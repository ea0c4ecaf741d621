"""A gated feed-forward layer with LoRA adapters, over slices of its tokens: it keeps x alone.

The formulas are in ``mlp``; ``kernels/sliced`` runs the slices. Weights are cast or dequantized
once in a pass: 6 H I bytes in 16 bits. Dropout has a seed for each slice and projection.

H: hidden size, I: intermediate size, N: tokens, n: of a slice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype
from liger_patch.kernels.lora.activation import activate, activate_backward
from liger_patch.kernels.lora.products import (
    b_gradient,
    base_product,
    gradients_of_input_,
    new_seed,
    product,
    serves_lora,
    thin_products,
    upstream_thin_products,
)
from liger_patch.kernels.lora.projection import (
    Constants,
    LoraProjection,
    bases_of,
    cast_matrices,
    restored,
)
from liger_patch.kernels.product import product_
from liger_patch.kernels.sliced import Sums

FIELDS = 4  # tensors of a projection: weight, bias, a, b
DOWN = 2  # the place of the last projection
Shared = tuple[Tensor, list[LoraProjection]]  # by all slices


class SlicedMlp:
    """The layer as ``kernels/sliced`` runs it.

    Args:
        fixed: the constants of gate, up and down.
        dtype: of the products.
        activation: "silu", "gelu_tanh" or "gelu".
        out_features: O.
        slices: how many there are.
    """

    name = "lora_mlp"

    def __init__(
        self,
        fixed: Sequence[Constants],
        dtype: torch.dtype,
        activation: str,
        out_features: int,
        slices: int,
    ) -> None:
        self.dtype, self.activation, self.out_features = dtype, activation, out_features
        self._fixed = fixed
        self._seeds = [
            [new_seed() if each.dropout else None for each in fixed] for _ in range(slices)
        ]

    @staticmethod
    def serves(x: Tensor, dtype: torch.dtype, parts: Sequence[LoraProjection]) -> bool:
        """Return False if dropout would need a mask as a tensor, which slices cannot make again."""
        one = x.new_empty(1, dtype=dtype)
        return serves_lora(one, max(len(each.a) for each in parts)) or not any(
            each.dropout for each in parts
        )

    def prepare(self, parameters: Sequence[Tensor | None]) -> Shared:
        """Return A of gate and up as one, and the projections, as the products take them."""
        bases, all_a, all_b = bases_of(parameters), parameters[2::4], parameters[3::4]
        groups: Any = [all_a[:DOWN], all_a[DOWN:], *([b] for b in all_b)]
        a, down_a, *bs, down_b = cast_matrices(groups, self.dtype)
        parts = restored(self._fixed[:DOWN], bases[:-2], a, bs)
        parts += restored(self._fixed[DOWN:], bases[-2:], down_a, [down_b])
        return a, [each._replace(weight=each.dense(self.dtype)) for each in parts]

    def forward(self, shared: Shared, x: Tensor, i: int) -> Tensor:
        """Return y (n, O)."""
        a_gates, (*parts, down) = shared
        seeds = self._seeds[i]
        s, _ = thin_products(x, a_gates, parts, seeds[:DOWN])
        gate, up = (base_product(x, part) for part in parts)
        how = down.dropout, self.activation, seeds[DOWN]
        a, s_down, _ = activate(gate, up, s, parts, down.a, *how)
        del gate, up
        return product(a, down, s_down, (len(x),))

    def backward(
        self,
        shared: Shared,
        x: Tensor,
        dy: Tensor,
        dx: Tensor | None,
        sums: Sums,
        i: int,
    ) -> None:
        """Write dx (n, H), and add to the sums, which are in float32."""
        a_gates, (*parts, down) = shared
        *seeds, seed = self._seeds[i]
        wide = accumulation_dtype(self.dtype)
        s, _ = thin_products(x, a_gates, parts, seeds)
        gate, up = (base_product(x, part) for part in parts)
        a, s_down, _ = activate(gate, up, s, parts, down.a, down.dropout, self.activation, seed)
        self._add_base(sums, DOWN, dy, a)
        del a
        sums.add(FIELDS * DOWN + 3, b_gradient(dy, down, s_down, wide))
        da = product_(torch.empty_like(gate), dy, down.dense(self.dtype))
        ds_down = upstream_thin_products((dy,), (down,))
        how = seed, down.dropout, self.activation, [wide] * 3
        dgate, dup, ds, dbs, ddown_a = activate_backward(
            da, ds_down, gate, up, s, parts, down.a, *how
        )
        del da, gate, up
        sums.add(FIELDS * DOWN + 2, ddown_a)
        dys = dgate, dup
        dtypes = [wide if sums.wants(FIELDS * j + 2) else None for j in range(DOWN)]
        das = gradients_of_input_(dx, x, a_gates, dys, parts, ds, seeds, dtypes)
        for j, each in enumerate(dys):
            self._add_base(sums, j, each, x)
            sums.add(FIELDS * j + 2, das[j])
            sums.add(FIELDS * j + 3, dbs[j])

    def _add_base(self, sums: Sums, j: int, dy: Tensor, x: Tensor) -> None:
        sums.add_product(FIELDS * j, dy.t(), x)
        if sums.wants(FIELDS * j + 1):
            sums.add(FIELDS * j + 1, dy.sum(0, dtype=accumulation_dtype(dy.dtype)))
