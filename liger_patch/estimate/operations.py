"""Operations as they use memory on a GPU, for tensors that have sizes and no values.

On the meta device PyTorch computes attention by way of all scores, and autocast does nothing. Each
class here allocates and keeps what the GPU's own operation does.

H: hidden size, I: intermediate size, R: rank, T: tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from liger_patch.kernels.chunk_sizes import ROW_MULTIPLE
from liger_patch.kernels.gated import gated_forward
from liger_patch.kernels.gated_mlp import gated_mlp
from liger_patch.kernels.segments import Segments
from liger_patch.kernels.sliced import GATED_TENSORS, SLICE_BYTES, slice_tokens
from liger_patch.layers.long_rows import is_checkpointed

PRODUCTS = (
    functional.linear,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.baddbmm,
)
ATTENTION = functional.scaled_dot_product_attention  # PyTorch's own, whatever stands there later
IN_FLOAT32 = (functional.cross_entropy, functional.nll_loss, functional.log_softmax)
CHUNK = "chunk of logits"
ROWS_OF_SUMS = 1024  # of the kernel behind LoraGate: one sum of dB for as many


class GpuOperations(TorchFunctionMode):
    """Replace attention by a fused one, and cast the operands of products as autocast does.

    Args:
        autocast: the dtype of products, None without autocast.
        slices: whether feed-forward layers run in slices where a row is long.
    """

    def __init__(self, autocast: torch.dtype | None, slices: bool = True) -> None:
        super().__init__()
        self.autocast, self.slices = autocast, slices
        self._copies: dict[int, Tensor] = {}  # of trained weights, by id

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = dict(kwargs or {})
        if func is ATTENTION:
            q, k, v = (self.as_operand(each) for each in args[:3])
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            return _Attention.apply(q, k, v, mask)
        if self.autocast is not None and func in PRODUCTS:
            args = tuple(self.as_operand(each) for each in args)
            kwargs = {name: self.as_operand(each) for name, each in kwargs.items()}
        elif self.autocast is not None and func in IN_FLOAT32:
            args = tuple(each.float() if _is_floating(each) else each for each in args)
        return func(*args, **kwargs)

    def as_operand(self, value: Any) -> Any:
        """Return a tensor in autocast's dtype. The copy of a float32 weight that trains is made
        once in the region.
        """
        if self.autocast is None or not _is_floating(value) or value.dtype == self.autocast:
            return value
        if not (value.is_leaf and value.requires_grad and value.dtype == torch.float32):
            return value.to(self.autocast)
        if id(value) not in self._copies:
            self._copies[id(value)] = value.to(self.autocast)
        return self._copies[id(value)]

    def tokens_of_slice(self, x: Tensor, size: int) -> int | None:
        """Return what ``layers/long_rows`` does on a GPU."""
        return sliced_rows(x, size, self.autocast or x.dtype) if self.slices else None

    def serves_flash_attention(self, *_: Tensor) -> bool:
        """Return what a GPU answers."""
        return True

    def may_serve_flash_attention(self, *_: Any) -> bool:
        """Return what a GPU answers, for 16 bits."""
        return True

    def segments_of_intervals(
        self, _: Any, is_real: Tensor, *_more: Any, **_options: Any
    ) -> Segments:
        """Return the same as ``segments_of``, of a mask that is not made."""
        return Segments(None, is_real.shape[-1], 1)

    def segments_of(self, mask: Tensor, *_: Any) -> Segments:
        """Return what a mask describes that is needed for whole rows: a window."""
        return Segments(None, mask.shape[-1], 1)

    def segment_attention(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None
    ) -> Tensor:
        """Compute attention without its mask."""
        states = [self.as_operand(each) for each in (query, key, value)]
        return _Attention.apply(*states, None).transpose(1, 2)

    def gated_mlp(
        self,
        x: Tensor,
        *weights: Tensor | None,
        activation: str,
        slice_tokens: int | None = None,
    ) -> Tensor:
        """Compute our feed-forward layer, which casts its own operands."""
        dtype = self.autocast or x.dtype
        if slice_tokens is not None:
            given = [each for each in weights if each is not None]
            copied = [each for each in given if each.dtype != dtype]
            return in_slices(x, given[-1], dtype, copied, given)
        cast: Any = [None if each is None else each.to(dtype) for each in (x, *weights)]
        return gated_mlp(*cast, activation=activation)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._copies.clear()  # as at the end of a region of autocast


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class _Attention(torch.autograd.Function):
    """Attention that keeps q, k, v, its result and the log of each row's sum, and no scores; of a
    mask, a copy in the dtype of q.

    Backward: their gradients, one number a row, and without a mask a float32 sum of dq; those of
    keys that attention heads share are there for each attention head first.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        y = _tokens_first(q, q.shape[1], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.empty_like(mask, dtype=q.dtype)  # as the kernel takes it
        ctx.save_for_backward(q, k, v, y, lse, mask)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        q, k, v, _, lse, mask = ctx.saved_tensors
        temporary = [torch.empty_like(lse)]
        if mask is None:
            temporary.append(torch.empty_like(q, dtype=torch.float32))
        if k.shape[1] != q.shape[1]:
            temporary += [_tokens_first(each, q.shape[1], each.shape[-1]) for each in (k, v)]
        return *(_tokens_first(each, each.shape[1], each.shape[-1]) for each in (q, k, v)), None


def _tokens_first(like: Tensor, heads: int, size: int) -> Tensor:
    """Return memory (B, heads, T, size) with tokens in front of attention heads."""
    return like.new_empty(like.shape[0], like.shape[2], heads, size).transpose(1, 2)


class ChunkedHead(torch.autograd.Function):
    """A loss that is computed together with its gradients, one chunk of logits at a time."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, chunk_bytes: int, named: Any) -> Tensor:
        with named(CHUNK):
            logits = hidden.new_empty(chunk_bytes, dtype=torch.uint8)
        gradients: list[Tensor | None] = []
        for value, name, wanted in zip(
            (hidden, weight), ("hidden states", "the head"), ctx.needs_input_grad, strict=False
        ):
            with named(f"gradient of {name}"):
                gradients.append(torch.empty_like(value) if wanted else None)
        del logits
        ctx.gradients = gradients
        return hidden.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, upstream: Tensor):
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients, None, None


class LoraLinear(torch.autograd.Function):
    """Our linear layer with an adapter: it keeps x and the thin product."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
        dtype: torch.dtype,
        source: Tensor | None,  # what x is the norm of, and can be computed of again
    ):
        rows = x.to(dtype)
        s = rows.new_empty(*rows.shape[:-1], len(a))
        ctx.save_for_backward(rows if source is None else source, s, weight, a, b)
        ctx.dtype, ctx.rows = x.dtype, None if source is None else (rows.shape, dtype)
        return functional.linear(rows, weight.to(dtype))

    @staticmethod
    def backward(ctx, dy: Tensor):
        _, s, weight, a, b = ctx.saved_tensors
        rows = None if ctx.rows is None else s.new_empty(ctx.rows[0], dtype=ctx.rows[1])
        ds = torch.empty_like(s)
        dx = torch.matmul(dy, weight.to(dy.dtype)).to(ctx.dtype)
        del ds, rows
        return dx, None, torch.empty_like(a), torch.empty_like(b), None, None


class LoraGate(torch.autograd.Function):
    """Our feed-forward layer with adapters, in front of its last product: it keeps x, gate, up."""

    @staticmethod
    def forward(ctx, x: Tensor, gate_weight: Tensor, up_weight: Tensor, dtype, *adapters: Tensor):
        rows = x.to(dtype)
        gate, up = (functional.linear(rows, each.to(dtype)) for each in (gate_weight, up_weight))
        s = rows.new_empty(*rows.shape[:-1], sum(len(each) for each in adapters[::2]))
        ctx.save_for_backward(rows, gate, up, s, gate_weight, up_weight, *adapters)
        ctx.dtype = x.dtype
        return gated_forward(gate, up, "silu")

    @staticmethod
    def backward(ctx, da: Tensor):
        _, gate, _, s, gate_weight, _, *adapters = ctx.saved_tensors
        dgate, dup = da, torch.empty_like(gate)  # dgate takes the place of da
        tokens, rank = gate.numel() // gate.shape[-1], len(adapters[0])
        sums = (-(-tokens // ROWS_OF_SUMS), 3, gate.shape[-1], rank)
        gate.new_empty(sums, dtype=torch.float32)
        ds = torch.empty_like(s)
        dx = torch.matmul(dgate, gate_weight.to(dgate.dtype))  # up's part is added in its place
        del dup, ds
        return dx.to(ctx.dtype), None, None, None, *(torch.empty_like(each) for each in adapters)


class LoraDown(torch.autograd.Function):
    """The last product of that layer: it keeps no tensor, so checkpointing leaves it out."""

    @staticmethod
    def forward(ctx, a: Tensor, weight: Tensor, adapter_b: Tensor, dtype: torch.dtype):
        ctx.held = weight, adapter_b
        return functional.linear(a, weight.to(dtype))

    @staticmethod
    def backward(ctx, dy: Tensor):
        weight, adapter_b = ctx.held
        return torch.matmul(dy, weight.to(dy.dtype)), None, torch.empty_like(adapter_b), None


def sliced_rows(x: Tensor, size: int, dtype: torch.dtype) -> int | None:
    """Return in slices of how many tokens a feed-forward layer of x (..., H) runs, None for all at
    once.

    Args:
        size: the intermediate size.
        dtype: of the products.
    """
    rows = slice_tokens(x.numel() // x.shape[-1], size, dtype.itemsize)
    return rows if rows is not None and is_checkpointed() else None


def in_slices(
    x: Tensor,
    down_weight: Tensor,
    dtype: torch.dtype,
    copied: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> Tensor:
    """Run our feed-forward layer of x (..., H) in slices, with or without adapters.

    Args:
        down_weight: (O, I).
        dtype: of the products.
        copied: weights that are cast or dequantized, once in a pass.
        parameters: whose gradients may be wanted.
    """
    out_features, size = down_weight.shape
    token_bytes = GATED_TENSORS * size * dtype.itemsize
    rows = SLICE_BYTES // token_bytes
    rows -= rows % ROW_MULTIPLE if rows >= ROW_MULTIPLE else 0
    held = max(1, rows) * token_bytes, dtype.itemsize * sum(each.numel() for each in copied)
    link = SlicedKeep.apply(x, dtype, held, out_features, *parameters)
    return SlicedRun.apply(link, held)


def _pieces(like: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [like.new_empty(size, dtype=torch.uint8) for size in sizes if size]


class SlicedKeep(torch.autograd.Function):
    """Our feed-forward layer in slices: it keeps x, and sums gradients in float32."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        dtype: torch.dtype,
        held: tuple[int, int],  # bytes of a slice, and of copied weights
        out_features: int,
        *parameters: Tensor,
    ):
        ctx.save_for_backward(x.to(dtype), *parameters)
        ctx.dtype, ctx.held = x.dtype, held
        return x.new_empty((), dtype=dtype).expand(*x.shape[:-1], out_features)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, *parameters = ctx.saved_tensors
        wants_x, _, _, _, *wanted = ctx.needs_input_grad
        dx = torch.empty_like(x, dtype=ctx.dtype) if wants_x else None
        pieces = _pieces(x, ctx.held)
        pairs = list(zip(parameters, wanted, strict=True))
        sums = [torch.empty_like(each, dtype=torch.float32) if w else None for each, w in pairs]
        del pieces
        gradients: list[Tensor | None] = []
        for i, parameter in enumerate(parameters):
            total, sums[i] = sums[i], None
            gradients.append(None if total is None else total.to(parameter.dtype))
        return dx, None, None, None, *gradients


class SlicedRun(torch.autograd.Function):
    """The result of that layer: it keeps no tensor, so checkpointing leaves it out."""

    @staticmethod
    def forward(ctx, link: Tensor, held: tuple[int, int]):
        y = link.new_empty(link.shape)
        pieces = _pieces(link, held)
        del pieces
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy, None
