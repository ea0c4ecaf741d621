"""The loop over chunks of tokens that all operators on a head share: their logits, and the losses
and gradients from these.

N: tokens, n: supervised tokens, H: hidden size, V: vocabulary, C: tokens in a chunk. Ignored tokens
are dropped. For each chunk, where gradients are wanted:

    logits = X_c W^T                 one matrix product into a buffer that every chunk reuses
    logits -> losses, G in place     G = dloss/dlogits; see ``logits`` and ``odds``
    dX_c = G W,  dW += G^T X_c       two products; the first chunk writes dW, later ones add to it

three matrix products of 2 n H V operations, two with a frozen head, one without gradients. A
low-rank adapter on the head adds its own thin products to each of them. Of a distributed
vocabulary, each rank multiplies by its own rows: see ``row_sums``. Extra memory: the gradients
themselves and C * V logits. Rounding a 16-bit dW after each of many chunks would lose accuracy: see
``summed_chunk_rows``. Chunking: Liger-Kernel (arXiv:2410.10989).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    accumulation_dtype,
    check_plain_tensors,
    serves_triton_device,
    without_autocast,
)
from liger_patch.kernels.chunk_sizes import (
    chunk_bounds,
    chunks_of,
    rows_before_count,
    summed_chunk_rows,
)
from liger_patch.kernels.head.gradients import Gradients
from liger_patch.kernels.head.inputs import (
    HeadInputs,
    Surroundings,
    VocabShard,
    Wanted,
    checked_chunk_bytes,
    checked_inputs,
    product_dtype,
)
from liger_patch.kernels.head.labels import (
    CompactedLabels,
    check_token_arguments,
    compact_labels,
    token_factors,
)
from liger_patch.kernels.head.logits import LogitsForm
from liger_patch.kernels.head.row_sums import TokenStatistics, UpstreamGradients
from liger_patch.kernels.options import LossOptions

if TYPE_CHECKING:
    from liger_patch.kernels.head.odds import OddsForm

ALIGNED_V = 64  # elements: Triton's rows of logits start at 128-byte boundaries, whatever V


@dataclass(frozen=True)
class ChunkConfig:
    """The configuration of one call of an operator, for each pass through its chunks.

    Attributes:
        labels: the labels of the tokens, those of supervised tokens first.
        options: the options of the loss.
        wanted: the gradients that the backward pass returns.
        dtype: of the matrix products and the logits.
        chunk_bytes: the bytes of logits held at once.
        shard: this rank's part of a distributed vocabulary; None for a whole one.
        hopper_kernels: True for the kernels for large batches, Hopper's or other GPUs'; False to
            leave Hopper's out; None to choose by the size of the batch.
    """

    labels: CompactedLabels
    options: LossOptions
    wanted: Wanted
    dtype: torch.dtype
    chunk_bytes: int
    shard: VocabShard | None = None
    hopper_kernels: bool | None = None


class ChunkedResult(NamedTuple):
    """The result of ``run_chunks``.

    Attributes:
        losses: (n,), unscaled; empty with upstream gradients.
        statistics: (n,) each, None where not asked for.
        gradients: in the order of the inputs, None where not wanted.
    """

    losses: Tensor
    statistics: TokenStatistics | None
    gradients: list[Tensor | None]


def check_arguments(
    hidden_states: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    low_rank: tuple[Tensor, Tensor] | None,  # (N, R), (V, R)
    options: LossOptions,
    *,
    reduction: str = "none",
    token_weight: Tensor | None = None,  # (N,)
    num_items_in_batch: Tensor | int | None = None,
    row_weights: Tensor | None = None,  # (N,)
    shard: VocabShard | None = None,
) -> HeadInputs:
    """Return the inputs of an operator on a head; raise ValueError for what does not fit. Reads no
    values.
    """
    check_plain_tensors(
        labels=labels,
        class_weight=options.class_weight,
        token_weight=token_weight,
        row_weights=row_weights,
    )
    inputs = checked_inputs(hidden_states, weight, bias, low_rank, shard)
    vocab_size = weight.shape[0] if shard is None else shard.vocab_size
    device = hidden_states.device
    options.check(vocab_size, device)
    check_token_arguments(
        labels,
        hidden_states.shape[0],
        device,
        reduction=reduction,
        token_weight=token_weight,
        num_items_in_batch=num_items_in_batch,
        row_weights=row_weights,
    )
    return inputs


def prepare_chunks(
    inputs: HeadInputs,
    labels: Tensor,  # (N,)
    options: LossOptions,
    chunk_mib: float | None,
    shard: VocabShard | None = None,
    surroundings: Surroundings | None = None,
    *,
    hopper_kernels: bool | None = None,
) -> ChunkConfig:
    """Configure the chunks of arguments that have been checked, and start to compact the labels.

    Args:
        surroundings: those of the call, where it runs below autograd and autocast now.
    """
    wanted, autocast = surroundings or Surroundings.by(inputs)
    chunk_bytes = checked_chunk_bytes(chunk_mib, trains_weight=wanted.weight)
    vocab_size = inputs.weight.shape[0] if shard is None else shard.vocab_size
    dtype = product_dtype(inputs, autocast)
    compacted = compact_labels(labels, vocab_size, options.ignore_index)
    return ChunkConfig(compacted, options, wanted, dtype, chunk_bytes, shard, hopper_kernels)


def run_chunks(
    config: ChunkConfig,
    inputs: HeadInputs,
    row_scale: Tensor,
    wanted: Wanted,
    *,
    statistics: Collection[str] = (),
    upstream: UpstreamGradients | None = None,
    totals: list[Tensor | None] | None = None,
) -> ChunkedResult:
    """Compute the losses of the supervised tokens, and the gradients of the sum of
    ``row_scale * losses``, chunk by chunk.

    On Hopper the first chunk is launched before the host reads the count of supervised tokens, so
    that the device has work while the host waits for the count.

    Args:
        row_scale: (N,) in the order of the compacted labels; (n,) once their count is read.
        wanted: the gradients of this pass.
        statistics: names of the fields of ``TokenStatistics`` that are asked for.
        upstream: upstream gradients (n,) of log-probabilities, entropy and lse. The gradients are
            then those of these three, and no losses are computed.
        totals: gradients of an earlier pass, which these sums are added to, in place where the
            dtype is that of the sum. The rows of states are overwritten.
    """
    labels, weight, vocab_size = config.labels, inputs.weight, inputs.weight.shape[0]
    # every rank makes the same chunks, by the largest shard
    largest = vocab_size if config.shard is None else config.shard.largest
    row_bytes = row_elements(largest, labels.labels) * config.dtype.itemsize
    has_gradients = any(wanted)
    scale = row_scale if has_gradients else None
    with without_autocast(inputs.hidden_states.device.type):
        operands = inputs.to(config.dtype)
        form = _form(config, operands, statistics, upstream)

        def logits_memory(tokens: int) -> Tensor | None:
            if form.counts_on_device and not has_gradients:
                return None
            return empty_logits(operands.hidden_states, tokens, vocab_size)

        memory = early = None
        first = 0
        if form.counts_on_device:
            # in a second backward pass too, where n is known: the same chunks give the same bits
            first = rows_before_count(len(labels.labels), row_bytes, config.chunk_bytes)
        if labels.count is None and first:
            memory = logits_memory(first)
            early = operands.of(labels.rows[:first])
            form.run(early, 0, memory=memory, row_scale=scale)
        n = labels.read_count()
        rows = labels.supervised_rows
        if first:
            bounds, sum_dtype = chunks_of(first, n), weight.dtype
        else:
            bounds, sum_dtype = bounds_of(config, weight, largest, wanted, n, row_bytes)
        if memory is None and bounds:
            memory = logits_memory(bounds[0][1])
        odds = None if form.odds is None else form.odds.of(slice(n))
        gradients = Gradients(inputs, operands, rows, wanted, sum_dtype, odds, config.shard, totals)
        for start, stop in bounds:
            chunk = slice(start, stop)
            memory_c = None if memory is None else memory[: stop - start]
            if early is None:
                operands_c = operands.of(chunk if rows is None else rows[chunk])
                form.run(operands_c, start, memory=memory_c, row_scale=scale)
            else:
                operands_c, early = early.of(slice(stop)), None
            if memory_c is not None and has_gradients:
                gradients.add(operands_c, memory_c, chunk)
        memory = memory_c = operands_c = None  # freed before a float32 dweight is rounded
        known = None if form.statistics is None else form.statistics.of(slice(n))
        return ChunkedResult(form.losses[:n], known, gradients.finish())


def loss_factors(
    config: ChunkConfig, labels: Tensor, *, token_weight: Tensor | None, **how: Any
) -> Tensor:
    """Return (N,) the factors of the tokens' losses in the order of the compacted labels; ``how``:
    reduction and ``num_items_in_batch``.
    """
    dtype = accumulation_dtype(config.dtype)
    factors = token_factors(
        labels, config.labels, config.options, token_weight=token_weight, dtype=dtype, **how
    )
    if token_weight is None:
        return factors.contiguous()
    return factors.index_select(0, config.labels.rows)


def loss_and_gradients(
    config: ChunkConfig, inputs: HeadInputs, factors: Tensor, reduction: str
) -> tuple[Tensor, list[Tensor | None] | None]:
    """Return the loss, (N,) or (), and its gradients where the forward pass can compute them."""
    in_forward = config.wanted.in_forward(config.dtype, same_for_all=reduction != "none")
    result = run_chunks(config, inputs, factors, config.wanted if in_forward else Wanted())
    losses = result.losses * factors[: len(result.losses)]
    loss = config.labels.scatter(losses) if reduction == "none" else losses.sum()
    return loss, result.gradients if in_forward else None


def loss_gradients(
    config: ChunkConfig, inputs: HeadInputs, factors: Tensor, grad_output: Tensor
) -> list[Tensor | None]:
    """Compute the chunks again, times the upstream gradient (N,) or ()."""
    labels = config.labels
    n = labels.read_count()
    upstream = labels.gather(grad_output) if grad_output.dim() else grad_output
    return run_chunks(config, inputs, factors[:n] * upstream, config.wanted).gradients


def _form(
    config: ChunkConfig,
    operands: HeadInputs,
    statistics: Collection[str],
    upstream: UpstreamGradients | None,
) -> LogitsForm | OddsForm:
    """Return the form that computes losses and dlogits. Reads nothing from the device."""
    labels, options, shard = config.labels, config.options, config.shard
    how: dict[str, Any] = {"has_statistics": bool(statistics)}
    if upstream is None and shard is None and serves_triton_device(labels.labels):
        from liger_patch.kernels.head import odds

        may_be_hopper = config.hopper_kernels is not False
        if config.hopper_kernels or odds.is_worth_odds(len(labels.labels)):
            if may_be_hopper and odds.serves_odds(operands, options, statistics):
                return odds.OddsForm(operands, labels, options, **how)
            if odds.serves_row_odds(operands, options):
                return odds.RowOddsForm(operands, labels, options, **how)
    return LogitsForm(operands, labels, options, upstream=upstream, shard=shard, **how)


def row_elements(vocab_size: int, like: Tensor) -> int:
    """Return the elements from one row of logits to the next, on the device of a tensor."""
    multiple = ALIGNED_V if serves_triton_device(like) else 1
    return -(-vocab_size // multiple) * multiple


def empty_logits(states: Tensor, tokens: int, vocab_size: int) -> Tensor:
    """Return memory for logits (tokens, V) in the dtype of the states."""
    rows = states.new_empty(tokens, row_elements(vocab_size, states))
    if rows.device.type == "cpu":
        # oneDNN reads between the rows in bf16 with AMX: 0 * NaN is NaN (oneDNN#5717)
        rows[:, vocab_size:].zero_()
    return rows[:, :vocab_size]


def bounds_of(
    config: ChunkConfig,
    weight: Tensor,
    weight_rows: int,
    wanted: Wanted,
    n: int,
    row_bytes: int,
) -> tuple[list[tuple[int, int]], torch.dtype]:
    """Return (start, stop) of each chunk of n tokens, and the dtype that dweight is summed in."""
    wide = accumulation_dtype(config.dtype)
    if not wanted.weight or weight.dtype.itemsize >= wide.itemsize:
        return chunk_bounds(n, row_bytes, config.chunk_bytes), weight.dtype
    wide_bytes = weight_rows * weight.shape[1] * wide.itemsize
    rows, widens = summed_chunk_rows(n, row_bytes, config.chunk_bytes, wide_bytes)
    return chunks_of(rows, n), wide if widens else weight.dtype
