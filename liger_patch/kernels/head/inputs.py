"""The inputs of a head, their checks, and a vocabulary that is distributed over ranks:

    logits = hidden_states @ weight.T + bias + low_rank @ low_rank_weight.T

N: tokens, H: hidden size, V: vocabulary, R: rank. The second product is the one of low-rank
adapters (LoRA) on the head. ``low_rank`` is the result of an adapter's first product, times its
scale. Those of several adapters stand side by side, in columns.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from liger_patch.kernels.backend import autocast_dtype, check_plain_tensors
from liger_patch.kernels.options import LossOptions

MIB = 2**20
# Beyond these, more memory saves little time, measured on an H200. If the head trains, each chunk
# reads and writes dweight again: 512 MiB cost up to 10 % over 1 GiB. A frozen head has none
TRAINED_CHUNK_MIB = 512
FROZEN_CHUNK_MIB = 256
MAX_CHUNK_MIB = 2**40  # no device has so much


class HeadInputs(NamedTuple):
    """The inputs of a head, in the order of the gradients."""

    hidden_states: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    low_rank: Tensor | None = None  # (N, R)
    low_rank_weight: Tensor | None = None  # (V, R)

    def products(self) -> list[tuple[Tensor, Tensor]]:
        """Return (states, weight) of each product ``states @ weight.T``, the main one first."""
        products = [(self.hidden_states, self.weight)]
        if self.low_rank is not None and self.low_rank_weight is not None:
            products.append((self.low_rank, self.low_rank_weight))
        return products

    def to(self, dtype: torch.dtype) -> HeadInputs:
        """Return the operands of the products in their dtype."""
        converted: list[Any] = [None if t is None else t.to(dtype) for t in self]
        return HeadInputs(*converted)

    def of(self, rows: Tensor | slice) -> HeadInputs:
        """Return the same head for some of the tokens."""

        def chosen(states: Tensor) -> Tensor:
            return states[rows] if isinstance(rows, slice) else states.index_select(0, rows)

        low_rank = None if self.low_rank is None else chosen(self.low_rank)
        return self._replace(hidden_states=chosen(self.hidden_states), low_rank=low_rank)


class Wanted(NamedTuple):
    """Which gradients are wanted."""

    hidden_states: bool = False
    weight: bool = False
    bias: bool = False
    low_rank: bool = False
    low_rank_weight: bool = False

    @property
    def sums(self) -> bool:
        """Return True if one of them sums over the tokens."""
        return self.weight or self.bias or self.low_rank_weight

    def in_forward(self, dtype: torch.dtype, *, same_for_all: bool) -> bool:
        """Return True if the forward pass can compute the gradients, for the backward pass to
        scale.

        Not in float16, which would lose small gradients before a loss scale reaches them.

        Args:
            same_for_all: whether all tokens have the same upstream gradient.
        """
        if not any(self) or dtype == torch.float16:
            return False
        return same_for_all or not self.sums

    def of_products(self) -> list[tuple[bool, bool]]:
        """Return (states, weight) of each product."""
        return [(self.hidden_states, self.weight), (self.low_rank, self.low_rank_weight)]

    @classmethod
    def by(cls, inputs: HeadInputs) -> Wanted:
        """Return those that PyTorch would compute."""
        if not torch.is_grad_enabled():
            return cls()
        return cls(*[tensor is not None and tensor.requires_grad for tensor in inputs])


class Surroundings(NamedTuple):
    """The state of autograd and autocast in which a call is made.

    Attributes:
        wanted: the gradients that the backward pass returns.
        autocast: the dtype of products, None without autocast.
    """

    wanted: Wanted
    autocast: torch.dtype | None

    @classmethod
    def by(cls, inputs: HeadInputs) -> Surroundings:
        """Return those of a call now."""
        return cls(Wanted.by(inputs), autocast_dtype(inputs.hidden_states.device.type))


@dataclass(frozen=True)
class VocabShard:
    """The rows of a head's weight that this rank holds (tensor parallel), as PyTorch's DTensor
    shards (V, H): each of R ranks ceil(V / R) rows, in the order of the ranks; the last ones fewer,
    or none. Every rank must make the same calls in the same order.

    Attributes:
        group: the process group of the ranks; None for the default one.
        vocab_size: V.

    Raises:
        ValueError: names the attribute, its value and what was expected.
    """

    group: Any  # torch.distributed.ProcessGroup, which some builds of PyTorch lack
    vocab_size: int

    def __post_init__(self) -> None:
        size = self.vocab_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"vocab_size must be a whole number >= 1, got {size!r}")

    @cached_property
    def largest(self) -> int:
        """Return the rows of the largest shard, the same on every rank."""
        return -(-self.vocab_size // distributed.get_world_size(self.group))

    @cached_property
    def start(self) -> int:
        """Return the class of this rank's first row."""
        return min(distributed.get_rank(self.group) * self.largest, self.vocab_size)

    def check(self, rows: int) -> None:
        """Raise ValueError unless a weight has this rank's number of rows. Each rank knows only of
        its own.
        """
        expected = min(self.largest, self.vocab_size - self.start)
        if rows != expected:
            raise ValueError(
                f"weight must have {expected} rows on rank {distributed.get_rank(self.group)}, "
                f"from class {self.start} of {self.vocab_size} on, got {rows}"
            )

    def gather(self, numbers: Tensor) -> Tensor:
        """Return (R, ...) the numbers of all ranks, in their order."""
        ranks = distributed.get_world_size(self.group)
        gathered = numbers.new_empty(ranks, *numbers.shape)
        # into one tensor: for a list, NCCL gathers elsewhere, and copies
        gather = getattr(distributed, "all_gather_single", None)  # its name from torch 2.13 on
        gather = gather or distributed.all_gather_into_tensor
        gather(gathered.flatten(0, 1), numbers, group=self.group)
        return gathered

    def start_sum_(self, values: Tensor) -> Any:
        """Start to sum values over the ranks, in place; wait() of the result ends it."""
        return distributed.all_reduce(values, group=self.group, async_op=True)


def checked_inputs(
    hidden_states: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    low_rank: tuple[Tensor, Tensor] | None,  # (N, R), (V, R)
    shard: VocabShard | None,
) -> HeadInputs:
    """Return the inputs of a head; raise ValueError unless they fit each other."""
    check_plain_tensors(hidden_states=hidden_states, weight=weight, bias=bias)
    if hidden_states.dim() != 2:
        raise ValueError(f"hidden_states must have shape (N, H), got {tuple(hidden_states.shape)}")
    hidden_size = hidden_states.shape[1]
    is_matrix = len(weight.shape) == 2 and weight.shape[1] == hidden_size
    if not is_matrix or not (weight.shape[0] or shard is not None):  # a shard may have no rows
        raise ValueError(
            f"weight must have shape (V, {hidden_size}) with V >= 1, got {tuple(weight.shape)}"
        )
    if shard is not None:
        if not isinstance(shard, VocabShard):
            raise ValueError(f"vocab_shard must be a VocabShard or None, got {shard!r}")
        shard.check(weight.shape[0])
    vocab_size, device = weight.shape[0], hidden_states.device
    if bias is not None and tuple(bias.shape) != (vocab_size,):
        raise ValueError(f"bias must have shape ({vocab_size},), got {tuple(bias.shape)}")
    low_rank_states, low_rank_weight = _checked_low_rank(
        low_rank, hidden_states.shape[0], vocab_size
    )
    inputs = HeadInputs(hidden_states, weight, bias, low_rank_states, low_rank_weight)
    names = *inputs._fields[:3], "low_rank[0]", "low_rank[1]"
    for name, tensor in zip(names, inputs, strict=True):
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name} must be on {device} as hidden_states are, got {tensor.device}"
            )
    return inputs


def _checked_low_rank(
    low_rank: tuple[Tensor, Tensor] | None, tokens: int, vocab_size: int
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if low_rank is None:
        return None, None
    if not (
        isinstance(low_rank, (tuple, list))
        and len(low_rank) == 2
        and all(isinstance(each, Tensor) for each in low_rank)
    ):
        raise ValueError(f"low_rank must be two tensors, (N, R) and (V, R), got {low_rank!r:.80}")
    states, weight = low_rank
    if states.dim() != 2 or states.shape[0] != tokens or not states.shape[1]:
        raise ValueError(f"low_rank[0] must have shape ({tokens}, R), got {tuple(states.shape)}")
    if tuple(weight.shape) != (vocab_size, states.shape[1]):
        raise ValueError(
            f"low_rank[1] must have shape ({vocab_size}, {states.shape[1]}), "
            f"got {tuple(weight.shape)}"
        )
    check_plain_tensors(**{"low_rank[0]": states, "low_rank[1]": weight})
    for i, tensor in enumerate(low_rank):
        if not tensor.is_floating_point():
            raise ValueError(f"low_rank[{i}] must be a floating-point tensor, got {tensor.dtype}")
    return states, weight


def product_dtype(inputs: HeadInputs, autocast: torch.dtype | None) -> torch.dtype:
    """Return the dtype that ``torch.nn.functional.linear`` would compute in, under autocast to a
    dtype or without.
    """
    dtypes = {"hidden_states": inputs.hidden_states.dtype, "weight": inputs.weight.dtype}
    if inputs.bias is not None:
        dtypes["bias"] = inputs.bias.dtype
    for name, dtype in dtypes.items():
        if not dtype.is_floating_point:
            raise ValueError(f"{name} must be a floating-point tensor, got {dtype}")
    if autocast is not None and torch.float64 not in dtypes.values():
        return autocast
    if len(set(dtypes.values())) > 1:
        raise ValueError(
            f"hidden_states, weight and bias must share a dtype outside autocast, got {dtypes}"
        )
    return inputs.hidden_states.dtype


def checked_chunk_bytes(chunk_mib: float | None, *, trains_weight: bool) -> int:
    """Return the bytes of logits held at once; raise ValueError unless ``chunk_mib`` is a size or
    None.
    """
    is_number = isinstance(chunk_mib, Real) and not isinstance(chunk_mib, bool)
    if chunk_mib is not None and not (is_number and 0 < chunk_mib <= sys.float_info.max):
        raise ValueError(f"chunk_mib must be a finite number of MiB > 0 or None, got {chunk_mib!r}")
    return int(min(chunk_mib or default_chunk_mib(trains_weight), MAX_CHUNK_MIB) * MIB)


def default_chunk_mib(trains_weight: bool) -> int:
    """Return the MiB of logits held at once by default."""
    return TRAINED_CHUNK_MIB if trains_weight else FROZEN_CHUNK_MIB


def save_inputs(ctx: Any, inputs: Sequence[Any], options: LossOptions) -> None:
    """Save inputs and options: a tensor that is changed in place before the backward pass needs it
    is an error there.
    """
    ctx.options = options
    ctx.save_for_backward(*inputs, options.class_weight)


def saved_inputs(ctx: Any) -> tuple[HeadInputs, LossOptions]:
    """Return what ``save_inputs`` was given: the inputs of one head, and its options."""
    *inputs, class_weight = ctx.saved_tensors
    return HeadInputs(*inputs), replace(ctx.options, class_weight=class_weight)
