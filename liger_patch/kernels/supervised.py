"""Which tokens count, and by how much: labels and weights to the rows that are computed and their
factors.

N: tokens, n: supervised tokens, V: vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_patch.kernels.loss_options import LossOptions

REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class Supervised:
    """The supervised tokens of a batch.

    Attributes:
        labels: (n,) int64, each in [0, V).
        rows: (n,) their positions among the N tokens, ascending; None where every token is
            supervised.
        total: N.
    """

    labels: Tensor
    rows: Tensor | None
    total: int

    def gather(self, values: Tensor) -> Tensor:
        """(N, ...) to (n, ...)."""
        return values if self.rows is None else values.index_select(0, self.rows)

    def scatter(self, values: Tensor) -> Tensor:
        """(n, ...) to (N, ...), zero on the ignored tokens."""
        if self.rows is None:
            return values
        return values.new_zeros(self.total, *values.shape[1:]).index_copy_(0, self.rows, values)


def find_supervised(labels: Tensor, vocab_size: int, ignore_index: int) -> Supervised:
    """Drop the ignored tokens of labels (N,).

    Reads the device once: the count and the check of the labels.

    Raises:
        ValueError: a label that is neither ``ignore_index`` nor in [0, vocab_size).
    """
    labels = labels.to(torch.int64)
    supervised = labels != ignore_index
    outside = supervised & ((labels < 0) | (labels >= vocab_size))
    count, n_outside = torch.stack([supervised.sum(), outside.sum()]).tolist()
    if n_outside:
        value = labels[outside][0].item()
        raise ValueError(
            f"labels must be in [0, {vocab_size}) or ignore_index ({ignore_index}), got {value} "
            f"({n_outside} outside)"
        )
    if count == len(labels):
        return Supervised(labels, None, len(labels))
    # a stable sort instead of nonzero(), which would read the count from the device again
    rows = torch.argsort((~supervised).to(torch.uint8), stable=True)[:count]
    return Supervised(labels.index_select(0, rows), rows, len(labels))


def row_factors(
    supervised: Supervised,
    options: LossOptions,
    *,
    reduction: str,
    token_weight: Tensor | None,  # (N,)
    num_items_in_batch: Tensor | int | None,
    dtype: torch.dtype,
) -> Tensor:
    """(n,) factor of each supervised token's loss: its weight, over the mean's denominator.

    A denominator of 0 (no supervised token, or weights that add up to 0) counts as 1: loss and
    gradients are 0.
    """
    n, device = len(supervised.labels), supervised.labels.device
    if token_weight is not None:
        factors = supervised.gather(token_weight).to(dtype)
    elif reduction == "mean" and num_items_in_batch is None and options.class_weight is None:
        # the usual case in one launch: the device waits for it
        return torch.full((n,), 1.0 / max(n, 1), dtype=dtype, device=device)
    else:
        factors = torch.ones(n, dtype=dtype, device=device)
    if reduction != "mean":
        return factors
    if isinstance(num_items_in_batch, Tensor):
        denominator = num_items_in_batch.reshape(())
        denominator = denominator.to(device, dtype, non_blocking=not denominator.is_cuda)
    elif num_items_in_batch is not None:
        # full() fills on the device, where tensor() would copy from the host and wait
        denominator = torch.full((), num_items_in_batch, dtype=dtype, device=device)
    elif options.class_weight is not None:
        denominator = (
            factors * options.class_weight.to(dtype).index_select(0, supervised.labels)
        ).sum()
    else:
        denominator = factors.sum()
    # torch.where would copy its 1.0 to the device and wait for the device to take it
    return factors / denominator.masked_fill(denominator == 0, 1.0)


def check_tokens(
    labels: Tensor,
    tokens: int,
    device: torch.device,
    *,
    reduction: str,
    token_weight: Tensor | None,
    num_items_in_batch: Tensor | int | None,
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
    if token_weight is not None:
        if tuple(token_weight.shape) != (tokens,):
            raise ValueError(
                f"token_weight must have shape ({tokens},), got {tuple(token_weight.shape)}"
            )
        if token_weight.device != device:
            raise ValueError(f"token_weight must be on {device}, got {token_weight.device}")
        if token_weight.requires_grad:
            raise ValueError("token_weight must not require a gradient: none is computed for it")
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
    elif num_items_in_batch < 0:
        raise ValueError(f"num_items_in_batch must be >= 0, got {num_items_in_batch}")
