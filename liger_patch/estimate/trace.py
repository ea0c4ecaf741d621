"""Record what one training step allocates and frees on a GPU, from the sizes of tensors on the meta
device.

- A dispatch mode sees every operation of forward and backward pass. Tensors on the meta device have
  sizes and lifetimes, but no values: a model of any size is traced in seconds, without its weights.
- There PyTorch computes attention with a (T, T) tensor of scores, and autocast does nothing. What
  stands in their place allocates and keeps what the GPU's own operation does.

H: hidden size, I: intermediate size, R: rank, T: tokens of a sequence.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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

BLOCK_BYTES = 512  # CUDA's caching allocator rounds sizes up to this
LAYER, HEAD, OTHER = "layer", "head", "other"  # where a tensor of the forward pass is made
HEAD_BACKWARD, BACKWARD = "head backward", "backward"

ATEN_PRODUCTS = (
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.linear,
)
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


@dataclass
class Allocation:
    """One piece of memory: its size, when it lives, and where it is made.

    Attributes:
        place: LAYER, HEAD, OTHER, HEAD_BACKWARD or BACKWARD.
        birth, death: numbers of events; a piece without death lives on behind the step.
        call_end: the event behind the module's call that made it, for pieces of LAYER.
        is_gradient: whether it ends up as the gradient of a parameter.
        purpose: what it is, where the code that makes it says so.
    """

    size: int
    place: str
    birth: int
    death: int | None = None
    call_end: int | None = None
    is_gradient: bool = False
    purpose: str = ""


@dataclass
class Trace:
    """The pieces of memory of one step.

    Attributes:
        forward_end: the event between both passes.
        sent: the pieces that are copied to the host.
    """

    allocations: list[Allocation] = field(default_factory=list)
    events: int = 0
    forward_end: int = 0
    sent: list[Allocation] = field(default_factory=list)

    def alive(self, event: int) -> list[Allocation]:
        """Return the pieces that exist at an event."""
        return [
            each
            for each in self.allocations
            if each.birth <= event and (each.death is None or event < each.death)
        ]

    def peak(self) -> tuple[int, int]:
        """Return the most bytes that exist at once, and the event from which on they do."""
        changes = [0] * (self.events + 2)
        for each in self.allocations:
            changes[each.birth] += each.size
            if each.death is not None:
                changes[each.death] -= each.size
        total = most = where = 0
        for event, change in enumerate(changes):
            total += change
            if total > most:
                most, where = total, event
        return most, where


class MemoryTrace(TorchDispatchMode):
    """Record the memory of all tensors that are made within this context.

    Args:
        held: tensors that exist before, and are not counted.
        unpacked: weights that are held in 4 or 8 bits: each product makes a 16-bit copy for itself.
    """

    def __init__(self, held: Sequence[Tensor], unpacked: Collection[Tensor] = ()) -> None:
        super().__init__()
        self.trace = Trace()
        self.place = OTHER
        self.purpose = ""
        self.is_closed = False
        self._open: list[Allocation] = []  # of the layer that runs
        self._made: dict[int, Allocation] = {}  # by storage
        self._held = {_key(each) for each in held}
        self._unpacked = {_key(each) for each in unpacked}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # Transformers asks: is no row packed, is no token padding?
        result = func(*args, **(kwargs or {}))
        copies = []
        if self._unpacked and func.overloadpacket in ATEN_PRODUCTS:
            weights = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            weights = [each for each in weights if _key(each) in self._unpacked]
            copies = [self._allocate(each.numel() * each.element_size()) for each in weights]
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._see(each)
        for each in copies:  # they are there until the product is
            each.death = self._next()
        return result

    def _see(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._made or key in self._held or tensor.device.type != "meta":
            return
        storage = tensor.untyped_storage()
        allocation = self._allocate(storage.nbytes())
        self._made[key] = allocation
        weakref.finalize(storage, self._free, key)

    def _allocate(self, size: int) -> Allocation:
        size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        allocation = Allocation(size, self.place, self._next(), purpose=self.purpose)
        self.trace.allocations.append(allocation)
        if self.place == LAYER:
            self._open.append(allocation)
        return allocation

    def _free(self, key: int) -> None:
        allocation = self._made.pop(key)
        if not self.is_closed:
            allocation.death = self._next()

    def _next(self) -> int:
        self.trace.events += 1
        return self.trace.events

    def enter(self, place: str) -> None:
        """Count what is made from here on to a place of the forward pass."""
        if not self.trace.forward_end:
            self.place = place

    def leave_layer(self) -> None:
        """Note that the layer that ran has returned."""
        if self.trace.forward_end:
            return
        event = self._next()
        for each in self._open:
            each.call_end = event
        self._open = []
        self.place = OTHER

    @contextmanager
    def naming(self, purpose: str) -> Iterator[None]:
        """Name the purpose of what is made within this context."""
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    def note_sent(self, tensor: Tensor) -> None:
        """Note that a tensor is copied to the host."""
        self.trace.sent.append(self._made[_key(tensor)])

    def start_backward(self) -> None:
        """Note that the forward pass has ended."""
        self.trace.forward_end = self._next()
        self.place = HEAD_BACKWARD

    def leave_head(self) -> None:
        """Note that the backward pass has left the head."""
        if self.trace.forward_end:
            self.place = BACKWARD

    def finish(self, gradients: Sequence[Tensor]) -> Trace:
        """End the step: what is freed from here on does not count. Return the trace, with the
        gradients of parameters marked.
        """
        self.is_closed = True
        for each in gradients:
            if _key(each) in self._made:
                self._made[_key(each)].is_gradient = True
        return self.trace


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


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
