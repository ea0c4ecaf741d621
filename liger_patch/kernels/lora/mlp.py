"""The steps of a gated feed-forward layer (arXiv:2002.05202), forward and backward.

    gate = x Wg' + sg Sg Bg'      up = x Wu' + su Su Bu'      S = x A'
    a    = act(gate) * up         y  = a Wd' + sd Sd Bd'      Sd = a Ad'

Without adapters, the terms of S and Sd are left out. With da = dy Wd + what comes through Ad, and
dgate and dup as in ``gated``:

    dWd = dy' a       dWg = dgate' x       dWu = dup' x       dx = dgate Wg + dup Wu + dS A

One kernel turns da into dgate and dup. Without adapters it leaves a in da's place if Wd trains.
With adapters it computes again what they add to gate and up, and sums dB of both and dA of down, so
that nothing of the size of gate is read or written for them.

H: hidden size, I: intermediate size, O: features of y, R: rank, N or n: tokens of a call.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype
from liger_patch.kernels.gated import gated_backward, gated_backward_, gated_forward
from liger_patch.kernels.lora.products import (
    Kept,
    adapter_gradient_,
    b_gradients,
    columns_of,
    gradients_of_input_,
    new_seed,
    products,
    serves_lora,
    thin_product_,
    thin_products,
    through_base,
    upstream_thin_products,
)
from liger_patch.kernels.lora.projection import (
    Constants,
    LoraProjection,
    cast_adapters,
    restored,
)
from liger_patch.kernels.products import product_

FIELDS = 4  # tensors of a projection: weight, bias, a, b


def activate(
    gate: Tensor,  # (N, I) of the base
    up: Tensor,  # (N, I) of the base
    s: Tensor,  # (N, R of gate + R of up)
    parts: Sequence[LoraProjection],
    down_a: Tensor,  # (R, I)
    dropout: float,
    activation: str,
    seed: Kept = None,  # of what is dropped, where it is not a new one
) -> tuple[Tensor, Tensor, Kept]:
    """Return a (N, I), Sd (N, R), and which features of a its adapter sees."""
    if serves_lora(gate, parts[0].a, parts[1].a, down_a):
        from liger_patch.kernels.triton.gated_lora import gated_lora

        seed = new_seed() if dropout and seed is None else seed
        number = None if seed is None else int(seed)
        adapters = _adapters(parts, down_a)
        return *gated_lora(gate, up, s, *adapters, number, dropout, activation), seed
    a = gated_forward(*_with_adapters(gate, up, s, parts), activation)
    s_down = a.new_empty(a.shape[0], down_a.shape[0])
    return a, s_down, thin_product_(s_down, a, down_a, dropout, seed)


def activate_backward(
    da: Tensor,  # (N, I) through the base, overwritten
    ds_down: Tensor,  # (N, R)
    gate: Tensor,
    up: Tensor,
    s: Tensor,
    parts: Sequence[LoraProjection],
    down_a: Tensor,
    kept: Kept,
    dropout: float,
    activation: str,
    dtypes: Sequence[torch.dtype | None],  # of dB of both and of dA of down
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None], Tensor | None]:
    """Return dgate, dup (N, I), ds (N, R of gate + R of up), dB of both and dA of down; None where
    no dtype is given.
    """
    *b_dtypes, a_dtype = dtypes
    if serves_lora(gate, parts[0].a, parts[1].a, down_a) and (kept is None or kept.dim() == 0):
        from liger_patch.kernels.triton.gated_lora import gated_lora_backward_

        adapters = _adapters(parts, down_a)
        seed = None if kept is None else int(kept)
        # hooks of saved tensors may have given these other strides
        gate, up, s = (each.contiguous() for each in (gate, up, s))
        dgate, dup, dgate_b, dup_b, ddown_a = gated_lora_backward_(
            da, ds_down, gate, up, s, *adapters, seed, dropout, activation
        )
        ds = upstream_thin_products((dgate, dup), parts, s)
        found = zip((dgate_b, dup_b, ddown_a.t()), dtypes, strict=True)
        *dbs, ddown_a = (None if dtype is None else each.to(dtype) for each, dtype in found)
        return dgate, dup, ds, dbs, ddown_a
    gate, up = _with_adapters(gate, up, s, parts)
    a = gated_forward(gate, up, activation)
    ddown_a = adapter_gradient_(da, a, down_a, ds_down, kept, a_dtype, dropout)
    del a
    dgate, dup = gated_backward(da, gate, up, activation)
    ds = upstream_thin_products((dgate, dup), parts, s)
    return dgate, dup, ds, b_gradients((dgate, dup), parts, s, b_dtypes), ddown_a


def _with_adapters(
    gate: Tensor, up: Tensor, s: Tensor, parts: Sequence[LoraProjection]
) -> tuple[Tensor, Tensor]:
    gate_part, up_part = parts
    s_gate, s_up = columns_of(s, parts)
    gate = torch.addmm(gate, s_gate, gate_part.b.t(), alpha=gate_part.scaling)
    up = torch.addmm(up, s_up, up_part.b.t(), alpha=up_part.scaling)
    return gate, up


def _adapters(
    parts: Sequence[LoraProjection], down_a: Tensor
) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """Return what the Triton form takes of three adapters."""
    gate, up = parts
    gate_b, up_b, down_a = (each.contiguous() for each in (gate.b, up.b, down_a))
    return gate_b, up_b, down_a, gate.scaling, up.scaling


class Parts(NamedTuple):
    """The projections, with their adapters as products take them.

    Attributes:
        a: A of gate and up as one (sum of R, H); None without adapters.
        first: gate and up, or both as one.
    """

    a: Tensor | None
    first: list[LoraProjection]
    down: LoraProjection


class Gates:
    """What a layer computes before its last product; a backward pass frees each after its use.

    Attributes:
        gate, up: (n, I), of the bases; without ``up``, ``gate`` is (n, 2 I).
        s, s_down: (n, sum of R) and (n, R); None without adapters.
        kept: which features the adapters of gate, up (of x) and down (of a) see.
        a: (n, I).
    """

    def __init__(
        self,
        gate: Tensor,
        up: Tensor | None,
        s: Tensor | None,
        a: Tensor | None = None,
        s_down: Tensor | None = None,
        kept: Sequence[Kept] = (),
    ) -> None:
        # not Optional, though freed: each is there when it is read
        self.gate: Any = gate
        self.up: Any = up
        self.s: Any = s
        self.a: Any = a
        self.s_down: Any = s_down
        self.kept = [*kept]


class Gradients:
    """The gradients of parameters.

    Args:
        dtypes: of each parameter; None for one that does not exist.
        wanted: whose gradients are computed.
        in_slices: whether they are sums over slices, in float32.
    """

    def __init__(
        self,
        dtypes: Sequence[torch.dtype | None],
        wanted: Sequence[bool],
        *,
        in_slices: bool = False,
    ) -> None:
        # those that gradients are computed in, None where none is wanted
        self.dtypes = [
            None if dtype is None or not w else accumulation_dtype(dtype) if in_slices else dtype
            for dtype, w in zip(dtypes, wanted, strict=True)
        ]
        self.found: list[Tensor | None] = [None] * len(self.dtypes)
        self._in_slices = in_slices

    def add(self, i: int, *gradients: Tensor | None) -> None:
        """Add to the gradients of parameter i and of those behind it, each if it is wanted."""
        for j, gradient in enumerate(gradients, i):
            total = self.found[j]
            if gradient is None or self.dtypes[j] is None:
                continue
            if total is not None:
                total += gradient
            elif self._in_slices:
                self.found[j] = gradient.clone(memory_format=torch.contiguous_format)
            else:
                self.found[j] = gradient

    def add_base(self, i: int, dy: Tensor, x: Tensor | None) -> None:
        """Add ``dy' x`` to the gradient of weight i, and the sum of dy (n, O) to that of the bias
        behind it, if they are wanted. Then x (n, H) is not None.
        """
        dtype, total = self.dtypes[i], self.found[i]
        if dtype is not None:
            assert x is not None
            if total is None:
                total = self.found[i] = x.new_empty(dy.shape[1], x.shape[1], dtype=dtype)
                product_(total, dy.t(), x)
            else:
                product_(total, dy.t(), x, add=True)
        if self.dtypes[i + 1] is not None:
            self.add(i + 1, dy.sum(0, dtype=self.dtypes[i + 1]))

    def rounded(self, parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the sums over slices, each in its parameter's dtype; zeros of no slices."""
        for i, parameter in enumerate(parameters):
            if parameter is None or self.dtypes[i] is None:
                continue
            total, self.found[i] = self.found[i], None  # freed as it is rounded
            if total is None:
                total = torch.zeros_like(parameter)
            self.found[i] = total.to(parameter.dtype)
        return self.found


class GatedLayer(NamedTuple):
    """A feed-forward layer without its tensors, as autograd functions take it.

    Attributes:
        fixed: the constants of gate and up, or of both as one, and of down.
        dtype: of the products.
        activation: "silu", "gelu_tanh" or "gelu".
    """

    fixed: Sequence[Constants]
    dtype: torch.dtype
    activation: str

    def out_features(self, parameters: Sequence[Tensor | None]) -> int:
        """Return O."""
        weight = (
            parameters[-FIELDS] if self.fixed[-1].quantized is None else self.fixed[-1].quantized
        )
        assert weight is not None
        return weight.shape[0]

    def cast(self, projections: Sequence[LoraProjection]) -> Parts:
        """Return gate and up (or both as one) and down, with their adapters cast."""
        *first, down = projections
        if down.a is None:
            return Parts(None, first, down)
        (a, first), (_, (down,)) = cast_adapters([first, [down]], self.dtype)
        return Parts(a, first, down)

    def restored(self, bases: Sequence[Tensor | None], adapters: Sequence[Tensor]) -> Parts:
        """Return the projections again.

        Args:
            bases: each weight, then each bias.
            adapters: A of gate and up as one, B of both, A and B of down, cast; none without.
        """
        fixed, number = self.fixed, len(self.fixed)
        weights, biases = bases[:number], bases[number:]
        if not adapters:
            without = [None] * number
            *first, down = restored(fixed, weights, biases, without, without)
            return Parts(None, first, down)
        a, *bs, down_a, down_b = adapters
        first = restored(fixed[:-1], weights[:-1], biases[:-1], a, bs)
        (down,) = restored(fixed[-1:], weights[-1:], biases[-1:], down_a, [down_b])
        return Parts(a, first, down)

    def prepared(self, parameters: Sequence[Tensor | None]) -> Parts:
        """Return the projections with weights cast or dequantized, for several slices."""
        parts = self.cast(restored(self.fixed, *[parameters[i::FIELDS] for i in range(FIELDS)]))
        *first, down = (p.prepared(self.dtype) for p in (*parts.first, parts.down))
        return Parts(parts.a, first, down)

    def first_products(self, x: Tensor, parts: Parts, seeds: Sequence[Kept] | None = None) -> Gates:
        """Return gate and up of x (n, H), not yet their activation."""
        s, kept = None, []
        if parts.a is not None:
            s, kept = thin_products(x, parts.a, parts.first, seeds)
        gate, *up = products(x, parts.first, [None] * len(parts.first), x.shape[:-1])  # of bases
        return Gates(gate, up[0] if up else None, s, kept=kept)

    def activate(self, gates: Gates, parts: Parts, seed: Kept = None) -> None:
        """Compute a and Sd."""
        if parts.a is None:
            gates.a = gated_forward(gates.gate, gates.up, self.activation)
            return
        down, computed = parts.down, (gates.gate, gates.up, gates.s)
        how = down.dropout, self.activation, seed
        gates.a, gates.s_down, kept = activate(*computed, parts.first, down.a, *how)
        gates.kept.append(kept)

    def gradients_(
        self,
        dx: Tensor | torch.dtype | None,  # (n, H), or the dtype of a new one, if it is wanted
        dy: Tensor,  # (n, O)
        x: Tensor | None,  # (n, H), if gradients of gate and up need it
        parts: Parts,
        gates: Gates,  # with a where there are adapters and Wd trains
        sums: Gradients,
    ) -> Tensor | None:
        """Return dx, and add the gradients of the parameters."""
        last, down = FIELDS * len(parts.first), parts.down
        ds, dbs = None, [None, None]
        if parts.a is None:
            da = through_base(dy, down)
            backward = gated_backward if sums.dtypes[last] is None else gated_backward_
            dgate, dup = backward(da, gates.gate, gates.up, self.activation)
            sums.add_base(last, dy, da)  # a has taken its place, if Wd trains
        else:
            sums.add_base(last, dy, gates.a)
            gates.a = None
            down_db = b_gradients((dy,), (down,), gates.s_down, sums.dtypes[last + 3 :])
            if dx is None and not any(sums.dtypes[:last]) and sums.dtypes[last + 2] is None:
                sums.add(last + 3, *down_db)
                return None
            da = through_base(dy, down)
            ds_down = upstream_thin_products((dy,), (down,), gates.s_down)
            computed = gates.gate, gates.up, gates.s, parts.first, down.a
            dtypes = *sums.dtypes[3:last:FIELDS], sums.dtypes[last + 2]
            how = gates.kept[-1], down.dropout, self.activation, dtypes
            dgate, dup, ds, dbs, ddown_a = activate_backward(da, ds_down, *computed, *how)
            del computed
            sums.add(last + 2, ddown_a, *down_db)
        dys = [dgate] if gates.up is None else [dgate, dup]
        del da
        gates.gate = gates.up = None  # under checkpoints, nothing else holds them
        if isinstance(dx, torch.dtype):  # not made before da is freed
            dx = dy.new_empty(len(dy), parts.first[0].weight.shape[1], dtype=dx)
        dtypes = sums.dtypes[2:last:FIELDS]
        das = gradients_of_input_(dx, x, parts.a, dys, parts.first, ds, gates.kept[:-1], dtypes)
        for j, each in enumerate(dys):
            sums.add_base(FIELDS * j, each, x)
            sums.add(FIELDS * j + 2, das[j], dbs[j])
        return dx
