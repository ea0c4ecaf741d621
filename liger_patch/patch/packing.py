"""Rows that hold several sequences: where each begins, and what each token weighs in a mean of the
sequences' means. B: rows, T: tokens of a row, N: B * T.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

IGNORE_INDEX = -100  # of Transformers' and TRL's collators
NUM_SEQUENCES = "num_sequences_in_batch"  # an argument of ours: in all calls of a step


def sequence_starts(shape: torch.Size, arguments: Mapping[str, Any]) -> Tensor | None:
    """Return (B, T) bool, True at the first token of each sequence, for labels of this shape; None
    where no argument says that rows hold several.

    A sequence begins:

    - where position ids do not rise from one token to the next. Tokens that an attention mask
      (B, T) leaves out are skipped. A row whose position ids never rise says nothing;
    - where ``seq_idx`` (B, T) changes;
    - at ``cu_seq_lens_q`` (sequences + 1,), which count along all rows.

    Position ids are (B, T), or (4, B, T) with those of the text first. Other shapes say nothing.

    Raises:
        ValueError: ``seq_idx`` or ``cu_seq_lens_q`` of another form.
    """
    if len(shape) != 2:
        return None
    begins = restarts(arguments.get("position_ids"), arguments.get("attention_mask"), shape)
    index, ends = arguments.get("seq_idx"), arguments.get("cu_seq_lens_q")
    found = [] if begins is None else [begins]
    if index is not None:
        if not isinstance(index, Tensor) or not _fits(index, shape):
            raise ValueError(f"seq_idx must be a tensor {tuple(shape)}, got {_form(index)}")
        found.append(_after_first(index[:, 1:] != index[:, :-1]))
    if ends is not None:
        is_vector = isinstance(ends, Tensor) and ends.dim() == 1 and len(ends) > 1
        if not is_vector or ends.is_floating_point() or ends.dtype == torch.bool:
            raise ValueError(
                "cu_seq_lens_q must be an integer tensor (sequences + 1,), at least (2,), "
                f"got {_form(ends)}"
            )
        flat = torch.zeros(shape.numel() + 1, dtype=torch.bool, device=ends.device)
        flat.index_fill_(0, ends.to(torch.int64).clamp(0, shape.numel()), True)
        found.append(flat[:-1].view(shape))
    if not found:
        return None
    starts = found[0].expand(shape).clone()
    for other in found[1:]:
        starts |= other.to(starts.device)
    starts[:, :1] = True
    return starts


def leaking_labels(labels: Tensor, starts: Tensor, input_ids: object) -> Tensor:
    """Return (B, T) bool, True for labels that the last token of another sequence would predict:
    those of the first token of each sequence behind another in its row.

    A label that is not the token in its place is the user's own, as the ``separator_id`` of
    Transformers' ``DataCollatorWithFlattening`` is: that last token is to predict it.
    """
    leaks = starts.to(labels.device, copy=True)
    leaks[:, :1] = False
    if isinstance(input_ids, Tensor) and input_ids.shape == labels.shape:
        leaks &= labels == input_ids.to(labels.device)
    return leaks


def next_labels(labels: Tensor, ignore_index: int) -> Tensor:
    """Return (B, T) what each token predicts: the next label of its row."""
    targets = torch.full_like(labels, ignore_index, memory_format=torch.contiguous_format)
    targets[..., :-1] = labels[..., 1:]
    return targets


def sequence_weights(
    starts: Tensor | None,  # (B, T) of sequence_starts; None: each row is a sequence
    supervised: Tensor,  # (B, T) whether a token has a label to predict
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return the weight of each token in the sum of the sequences' means, (N,), and the number of
    sequences that have a supervised token, ().
    """
    if starts is None:
        starts = torch.zeros_like(supervised)
        starts[..., :1] = True
    sequence = starts.to(supervised.device).flatten().cumsum(0) - 1
    flat = supervised.flatten().to(torch.int64)
    counts = torch.zeros_like(sequence).index_add_(0, sequence, flat)
    weights = flat / counts.clamp(min=1).to(dtype)[sequence]
    return weights, (counts > 0).sum()


def average_of_sequences(
    starts: Tensor | None,  # (B, T) of sequence_starts; None: each row is a sequence
    supervised: Tensor,  # (B, T) whether a token has a label to predict
    dtype: torch.dtype,
    *,
    num_sequences: Tensor | int | None,  # in all calls of a step; None to count those of this call
    num_tokens: Tensor | int | None,  # num_items_in_batch of the call
    reduction: str,  # "mean" or "sum" of the sequences' means
) -> tuple[Tensor, Tensor | int | None]:
    """Return the weight of each token in the sum of the sequences' means, (N,), and what that sum
    is divided by; None for a plain sum.

    Raises:
        ValueError: this process has only parts of sequences; or tokens of a step were counted, and
            not sequences.
    """
    split = why_sequences_are_split()
    if split is not None:
        raise ValueError(f'loss_average="sequence" needs whole sequences, got {split}')
    weights, count = sequence_weights(starts, supervised, dtype)
    if num_sequences is not None:
        return weights, num_sequences
    if num_tokens is not None:
        raise ValueError(
            "num_items_in_batch counts tokens, but apply_patch was given "
            'loss_average="sequence". Pass num_sequences_in_batch too: the number of sequences '
            "in all forward passes of the step. The Trainer of "
            "liger_patch.integrations.transformers does so"
        )
    return weights, None if reduction == "sum" else count


def count_sequences(batch: Mapping[str, Any]) -> Tensor:
    """Return (), the number of sequences of a batch that have a supervised token."""
    labels = batch["labels"]
    starts = sequence_starts(labels.shape, batch)
    targets = batch.get("shift_labels")
    if targets is None and starts is not None:
        leaks = leaking_labels(labels, starts, batch.get("input_ids"))
        labels = labels.masked_fill(leaks, IGNORE_INDEX)
    if targets is None:
        targets = next_labels(labels, IGNORE_INDEX)
    return sequence_weights(starts, targets != IGNORE_INDEX)[1]


def take_num_sequences(arguments: dict[str, Any], loss_average: str) -> Tensor | int | None:
    """Remove the number of sequences in a whole step from the arguments of a call, and return it;
    None without.

    Raises:
        ValueError: it is no whole number, or ``loss_average`` is not "sequence".
    """
    number = arguments.pop(NUM_SEQUENCES, None)
    if number is not None and loss_average != "sequence":
        raise ValueError(
            f"{NUM_SEQUENCES} is for means of sequences, but apply_patch was given "
            f"loss_average={loss_average!r}"
        )
    if isinstance(number, Tensor):
        # mixed precision would round one that is floating point
        is_whole = not (number.is_floating_point() or number.is_complex())
        if number.numel() != 1 or not is_whole or number.dtype == torch.bool:
            raise ValueError(
                f"{NUM_SEQUENCES} must be one whole number, got {number.dtype} "
                f"{tuple(number.shape)}"
            )
        # on a GPU, the host would have to wait for the number; 0 is a step without a label
        known = number.device.type == "cpu" and not torch.compiler.is_compiling()
        if known and number < 0:
            raise ValueError(f"{NUM_SEQUENCES} must not be negative, got {number!r}")
        return number
    if number is None:
        return None
    is_whole = isinstance(number, Integral) and not isinstance(number, bool)
    if not is_whole or number <= 0:
        raise ValueError(f"{NUM_SEQUENCES} must be a tensor or a whole number > 0, got {number!r}")
    return int(number)


def why_sequences_are_split() -> str | None:
    """Return which parallelism of accelerate gives each process a part of each sequence, or None.

    The parts' position ids do not say where sequences begin: a process may hold the middle of one,
    and context parallelism joins two distant parts.
    """
    if "accelerate" not in sys.modules:
        return None
    from accelerate.state import AcceleratorState

    config = getattr(AcceleratorState, "_shared_state", {}).get("parallelism_config")
    sizes = ((name, getattr(config, name, None) or 1) for name in ("cp_size", "sp_size"))
    return next((f"{name}={size}" for name, size in sizes if size > 1), None)


def restarts(positions: object, mask: object, shape: torch.Size) -> Tensor | None:
    """Return (B, T) bool, True where position ids do not rise from the last kept token to this one;
    None where position ids or mask have another shape. See ``sequence_starts``.
    """
    if not isinstance(positions, Tensor):
        return None
    places = positions[0] if positions.dim() == 3 and len(positions) == 4 else positions
    if not _fits(places, shape):
        return None
    if isinstance(mask, Tensor) and mask.dim() == 2:
        if not _fits(mask, shape):
            return None
        kept, places = torch.broadcast_tensors(mask.to(places.device).bool(), places)
        index = torch.arange(shape[1], device=places.device)
        before = index.where(kept, -1).cummax(1).values[:, :-1]  # the last kept token
        follows = kept[:, 1:] & (before >= 0)
        rises = places[:, 1:] > places.gather(1, before.clamp(min=0))
    else:
        rises = places[:, 1:] > places[:, :-1]
        follows = torch.ones_like(rises)
    begins = follows & ~rises & (follows & rises).any(1, keepdim=True)
    return _after_first(begins)


def _form(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return type(value).__name__


def _fits(tensor: Tensor, shape: torch.Size) -> bool:
    return tensor.dim() == 2 and tensor.shape[0] in (1, shape[0]) and tensor.shape[1] == shape[1]


def _after_first(begins: Tensor) -> Tensor:
    """Return (B, T) of (B, T - 1): a row's first token begins a sequence."""
    return pad(begins, (1, 0), value=True)
