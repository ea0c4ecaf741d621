"""Operations as they use memory on a GPU, for tensors that have sizes and no values.

On the meta device PyTorch computes attention with a (T, T) tensor of scores, and autocast does
nothing. What stands here allocates and keeps what the GPU's own operation does.

B: sequences, T: tokens of each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from liger_patch.kernels.chunk_sizes import (
    GATED_TENSORS,
    ROW_MULTIPLE,
    SLICE_BYTES,
    longest_at_once,
)
from liger_patch.kernels.products import QuantizedWeight
from liger_patch.kernels.rms_norm import NormInputs
from liger_patch.kernels.segments import Segments
from liger_patch.layers.long_rows import is_checkpointed, source_of
from liger_patch.layers.lora import Dtypes

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
ROWS_OF_SUMS = 1024  # of the kernel behind a LoRA feed-forward layer: one sum of dB for as many


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
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
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

    def tokens_of_slice(self, x: Tensor, size: int, _: torch.dtype) -> int | None:
        """Return what ``layers/long_rows`` does on a GPU, with one size in rows of any length."""
        itemsize = (self.autocast or x.dtype).itemsize
        is_short = x.numel() // x.shape[-1] <= longest_at_once(size, itemsize)
        if not self.slices or is_short or not is_checkpointed():
            return None
        rows = SLICE_BYTES // (GATED_TENSORS * size * itemsize)
        return max(1, rows - (rows % ROW_MULTIPLE if rows >= ROW_MULTIPLE else 0))

    def source_of(self, x: Tensor) -> NormInputs | None:
        """Return the input that a norm's result is computed again from, where rows are long."""
        return source_of(x) if self.slices else None

    def _dtypes_of(self, x: Tensor) -> Dtypes:
        """Return the dtypes of a call on x."""
        return Dtypes(x.dtype, self.autocast or x.dtype, self.autocast is not None)

    def segment_attention(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None
    ) -> Tensor:
        """Compute attention without its mask."""
        states = [self.as_operand(each) for each in (query, key, value)]
        return _Attention.apply(*states, None).transpose(1, 2)

    def autocast_dtype(self, *_: Any) -> torch.dtype | None:
        """Return what a GPU answers within the region."""
        return self.autocast

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._copies.clear()  # as at the end of a region of autocast


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return what CUDA's kernel does, which keeps a byte of each number."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


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


class Unpacked(QuantizedWeight):
    """Without values: each read makes it in a dtype."""

    casts_result = True

    def __init__(self, stored: Tensor, dtype: torch.dtype) -> None:
        self.stored, self.dtype = stored, dtype
        self.shape, self.device = stored.shape, stored.device

    def dequantized(self) -> Tensor:
        return self.stored.new_empty(self.shape, dtype=self.dtype)


def activate(gate: Tensor, up: Tensor, s: Tensor, parts: Any, down_a: Tensor, *_: Any) -> Any:
    """Return what the kernel of ``lora/mlp`` does."""
    return torch.empty_like(gate), s.new_empty(len(s), len(down_a)), None


def activate_backward(
    da: Tensor,
    ds_down: Tensor,
    gate: Tensor,
    up: Tensor,
    s: Tensor,
    parts: Any,
    down_a: Tensor,
    *how: Any,
) -> Any:
    """Return what its backward kernel does; dgate takes the place of da."""
    dup = torch.empty_like(gate)
    sums = -(-len(gate) // ROWS_OF_SUMS), 3, gate.shape[-1], len(down_a)
    gate.new_empty(sums, dtype=torch.float32)
    pairs = zip((*(part.b for part in parts), down_a), how[-1], strict=True)
    *dbs, ddown_a = [None if d is None else torch.empty_like(m, dtype=d) for m, d in pairs]
    return da, dup, torch.empty_like(s), dbs, ddown_a


def first_slices(_: Tensor, tokens: int) -> list[tuple[int, int]]:
    """Return two slices, which need as much as all: rows of any length allocate the same pieces."""
    return [(0, tokens), (tokens, 2 * tokens)]
