"""Which tokens are supervised, and with which factors their losses count: the labels of supervised
tokens are put first ("compacted"), and weights and denominators become factors of the losses.

N: tokens, n: supervised tokens, V: vocabulary.
"""

import copy
import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from liger_patch.kernels.backend import serves_triton_device
from liger_patch.kernels.graphs import is_without_values
from liger_patch.kernels.options import LossOptions, is_finite

REDUCTIONS = ("none", "mean", "sum")
AHEAD = "_liger_patch_compacted"  # attribute of labels: see compact_ahead


class CompactedLabels:
    """Labels with those of the supervised tokens first. Their count may still be on the GPU.

    Attributes:
        labels: (N,) int64, those of the supervised tokens first; the others have no meaning.
        rows: (N,) the positions of the supervised tokens, ascending; the others are any positions.
        counts: (2,) the number of supervised tokens, and of those with a label outside [0, V).
        means: (N,) float32, 1 / the number of supervised tokens (1 where there are none); None if
            no kernel has computed it.
        count: n; None before ``read_count``.
        supervised_rows: the first n of ``rows``; None where every token is supervised.
    """

    def __init__(
        self,
        labels: Tensor,
        rows: Tensor,
        counts: Tensor,
        means: Tensor | None,
        vocab_size: int,
        ignore_index: int,
    ) -> None:
        self.labels, self.rows, self.counts, self.means = labels, rows, counts, means
        self.count: int | None = None
        self.supervised_rows: Tensor | None = None
        self._vocab_size, self._ignore_index = vocab_size, ignore_index
        self._counts_on_host, self._arrived = counts, None
        if counts.is_cuda:
            self._counts_on_host = torch.empty(2, dtype=torch.int64, device="cpu", pin_memory=True)
            self._counts_on_host.copy_(counts, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(counts.device))

    def read_count(self) -> int:
        """Return n. The first call waits for the counts, and for nothing that was launched after
        them.

        Raises:
            ValueError: a label that is neither ``ignore_index`` nor in [0, V).
            RuntimeError: in a recording, which would hold n as a constant.
        """
        if self.count is not None:
            return self.count
        if is_without_values():
            raise RuntimeError(
                "the host reads the number of supervised tokens: make_fx, torch.export and "
                "FakeTensorMode take cross_entropy, and linear_cross_entropy without vocab_shard "
                "and hopper_kernels"
            )
        total = len(self.labels)
        if self.counts.is_meta:
            self.count = total  # for shapes, as if all of them counted
            return total
        if self._arrived is not None:
            self._arrived.synchronize()
        count, outside = self._counts_on_host.tolist()
        if outside:
            labels = self.labels[:count]
            wrong = labels[(labels < 0) | (labels >= self._vocab_size)]
            raise ValueError(
                f"labels must be in [0, {self._vocab_size}) or ignore_index "
                f"({self._ignore_index}), got {wrong[0].item()} ({outside} outside)"
            )
        self.count = count
        if count != total:
            self.supervised_rows = self.rows[:count]
        return count

    def gather(self, values: Tensor) -> Tensor:
        """Return (n, ...) of values (N, ...). The count has been read."""
        rows = self.supervised_rows
        return values if rows is None else values.index_select(0, rows)

    def scatter(self, values: Tensor) -> Tensor:
        """Return (N, ...) of values (n, ...), zero on the ignored tokens. The count has been
        read.
        """
        rows = self.supervised_rows
        if rows is None:
            return values
        return values.new_zeros(len(self.rows), *values.shape[1:]).index_copy_(0, rows, values)

    def some(self, places: Tensor) -> "CompactedLabels":
        """Return those of some of the supervised tokens, at places (d,) among the n, ascending."""
        some = copy.copy(self)
        some.labels, some.rows = (each.index_select(0, places) for each in (self.labels, self.rows))
        some.count, some.supervised_rows, some.means = len(places), some.rows, None
        some.counts = self.counts.clone()
        some.counts[0] = len(places)
        return some

    def scale_rows_(self, gradients: Sequence[Tensor | None], factors: Tensor) -> None:
        """Multiply each of the (N, ...) by factors (n,) of the supervised tokens, in place."""
        # through the supervised rows: 0 * inf of an ignored token would be nan
        of_tokens = self.scatter(factors)[:, None]
        for each in gradients:
            if each is not None:
                each.mul_(of_tokens)


def compact_ahead(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Start to count labels (N,) that ``compact_labels`` is given later, so that the host need not
    wait then for what was launched in between.

    The count is noted on this tensor: ``compact_labels`` must be given the same object, not a view.
    """
    compacted = compact_labels(labels, vocab_size, ignore_index)
    vars(labels)[AHEAD] = compacted, labels._version, vocab_size, ignore_index


def compact_labels(labels: Tensor, vocab_size: int, ignore_index: int) -> CompactedLabels:
    """Return labels (N,) with those of the supervised tokens first, and start to count them."""
    compacted, *of = vars(labels).get(AHEAD, (None,))
    if compacted is not None and of == [labels._version, vocab_size, ignore_index]:
        return compacted
    if serves_triton_device(labels):
        from liger_patch.kernels.triton.labels import order_tokens

        ordered, rows, counts, means = order_tokens(labels, vocab_size, ignore_index)
    else:
        labels = labels.to(torch.int64)
        ignored = labels == ignore_index
        outside = ((labels < 0) | (labels >= vocab_size)) & ~ignored
        counts = torch.stack([(~ignored).sum(), outside.sum()])
        # a stable sort instead of nonzero(), which would read the count from the device
        rows = torch.argsort(ignored.to(torch.uint8), stable=True)
        ordered, means = labels.index_select(0, rows), None
    return CompactedLabels(ordered, rows, counts, means, vocab_size, ignore_index)


def token_factors(
    labels: Tensor,  # (N,)
    compacted: CompactedLabels,  # the same
    options: LossOptions,
    *,
    reduction: str,
    token_weight: Tensor | None,  # (N,)
    num_items_in_batch: Tensor | int | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return (N,) the factor of each supervised token's loss in the result: its weight, over the
    mean's denominator. It may be expanded from one number where all are the same.

    A number of items of 0 counts as 1. Where weights add up to 0, every factor is 0.
    """
    labels = labels.to(torch.int64)
    device, factors, denominator = labels.device, None, None
    if token_weight is not None:
        factors = token_weight.to(dtype).masked_fill(labels == options.ignore_index, 0.0)
    if reduction == "mean":
        if isinstance(num_items_in_batch, Tensor):
            denominator = num_items_in_batch.reshape(())
            denominator = denominator.to(device, dtype, non_blocking=not denominator.is_cuda)
        elif num_items_in_batch is not None:
            # full() fills on the device, where tensor() would copy from the host and wait
            denominator = torch.full((), num_items_in_batch, dtype=dtype, device=device)
        elif options.class_weight is not None:
            class_weight = options.class_weight.to(dtype)
            inside = labels.clamp(0, len(class_weight) - 1)  # checked later
            weights = class_weight.index_select(0, inside)
            weights = weights.masked_fill(labels == options.ignore_index, 0.0)
            denominator = (weights if factors is None else weights * factors).sum()
        elif factors is not None:
            denominator = factors.sum()
        elif compacted.means is not None and compacted.means.dtype == dtype:
            return compacted.means
        else:
            # three launches, not five
            inverse = compacted.counts[0].clamp(min=1).to(dtype).reciprocal()
            return inverse.expand(labels.shape)
    if denominator is None:
        return (
            factors
            if factors is not None
            else labels.new_ones((), dtype=dtype).expand(labels.shape)
        )
    in_place_of_0 = math.inf if num_items_in_batch is None else 1.0
    # not torch.where: it would copy the number to the device, and wait
    inverse = denominator.masked_fill(denominator == 0, in_place_of_0).reciprocal()
    return inverse.expand(labels.shape) if factors is None else factors * inverse


def check_token_arguments(
    labels: Tensor,
    tokens: int,
    device: torch.device,
    *,
    reduction: str,
    token_weight: Tensor | None,
    num_items_in_batch: Tensor | int | None,
    row_weights: Tensor | None = None,
) -> None:
    """Raise ValueError unless the per-token arguments fit ``tokens`` tokens on ``device``."""
    if tuple(labels.shape) != (tokens,):
        raise ValueError(f"labels must have shape ({tokens},), got {tuple(labels.shape)}")
    if labels.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"labels must be an integer tensor, got {labels.dtype}")
    if labels.device != device:
        raise ValueError(f"labels must be on {device}, got {labels.device}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    for name, each in (("token_weight", token_weight), ("row_weights", row_weights)):
        if each is None:
            continue
        if tuple(each.shape) != (tokens,):
            raise ValueError(f"{name} must have shape ({tokens},), got {tuple(each.shape)}")
        if each.device != device:
            raise ValueError(f"{name} must be on {device}, got {each.device}")
        if each.is_complex():
            raise ValueError(f"{name} must be real, got {each.dtype}")
        if each.requires_grad:
            raise ValueError(f"{name} must not require a gradient: none is computed for it")
    if num_items_in_batch is None:
        return
    if reduction != "mean":
        raise ValueError(
            f"num_items_in_batch replaces the denominator of reduction='mean', got {reduction!r}"
        )
    if isinstance(num_items_in_batch, Tensor):
        if num_items_in_batch.numel() != 1:
            raise ValueError(
                "num_items_in_batch must hold one number, got shape "
                f"{tuple(num_items_in_batch.shape)}"
            )
        if num_items_in_batch.is_complex() or num_items_in_batch.dtype == torch.bool:
            raise ValueError(
                f"num_items_in_batch must be a real number, got {num_items_in_batch.dtype}"
            )
        if num_items_in_batch.requires_grad:
            raise ValueError(
                "num_items_in_batch must not require a gradient: none is computed for it"
            )
    elif not (
        isinstance(num_items_in_batch, Real)
        and not isinstance(num_items_in_batch, bool)
        and num_items_in_batch >= 0
        and is_finite(num_items_in_batch)
    ):
        raise ValueError(
            f"num_items_in_batch must be a finite number >= 0, got {num_items_in_batch!r}"
        )


def traced_items(number: Tensor | float | None) -> Tensor | None:
    """Return ``num_items_in_batch`` as an operator in a graph takes it. As a constant, each number
    would be another graph.
    """
    if number is None or isinstance(number, Tensor):
        return number
    if not 0 <= number < math.inf:  # in comparisons that torch 2.6 traces
        raise ValueError(f"num_items_in_batch must be a finite number >= 0, got {number!r}")
    return torch.full((), number, dtype=torch.float64, device="cpu")
