"""Odds, the unnormalized softmax of rows of logits: which heads and batches they serve, and their
two forms. On Hopper, a kernel that computes the matrix product of the logits writes odds instead
(``triton/odds``). On other GPUs, a kernel writes them in one walk over logits in memory
(``triton/row_odds``).

C: tokens of a chunk, N: of the batch, H: hidden size, V: vocabulary.
"""

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import TensorDescriptor, is_hopper, processors, takes_descriptors
from liger_patch.kernels.head.gradients import OddsFactors
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.head.labels import CompactedLabels
from liger_patch.kernels.head.logits import LogitsForm
from liger_patch.kernels.head.row_sums import TokenStatistics
from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.products import writes_float32

STATISTICS = frozenset({"entropy", "lse", "is_top1"})
MAX_RANK = 64  # of an adapter: larger tiles would not fit in shared memory beside the stages
# tokens of a batch: up to so many, the device would wait for the launches of the odds kernels.
# Measured with 512 tokens on an idle H100: Llama-3-8B's head takes 3.1 ms with odds and 2.9
# without, Qwen3-0.6B's 2.4 and 1.4. Odds of rows take as many launches more
SMALL_BATCH = 512
TILE_ROWS, TILE_V, TILE_H = 128, 128, 64  # of a tile of odds, and of a step of its product
# tiles of rows that share a tile of the weight: as many as keep about 4 MiB of the hidden states in
# the L2 cache (measured with a hidden size of 4096: 4 tiles are 7 % faster than 8)
GROUPED_COLUMNS, MAX_GROUPED_TILES = 16384, 16
TILES: dict[str, Any] = {
    "TILE_ROWS": TILE_ROWS,
    "TILE_V": TILE_V,
    "TILE_H": TILE_H,
    "PARTS": 2,  # of a tile of odds, each written by itself
    "num_warps": 4,
    "num_stages": 3,
}
PROGRAMS = 2  # on a processor: while one turns its tile into odds, the other multiplies
# an adapter's tiles take shared memory too. With a small rank, smaller parts leave enough of it.
# With a larger rank there is no room for a second program, so the one program has more stages
SMALL_RANK, WITH_SMALL_RANK = 16, {"PARTS": 4}
WITH_LARGE_RANK, PROGRAMS_WITH_LARGE_RANK = {"num_stages": 5}, 1
FINISHED: dict[str, Any] = {"BLOCK_ROWS": 8, "BLOCK_TILES": 256}
DOT: dict[str, Any] = {"BLOCK_H": 1024}
ALIGNED = 4  # float32 numbers, 16 bytes: Triton compiles anew for pointers that are less aligned


def serves_odds(operands: HeadInputs, options: LossOptions, statistics: Collection[str]) -> bool:
    """Return True if Hopper's odds kernels serve such a head.

    That is: bf16 on Hopper; no bias and no label smoothing; of an adapter, a rank up to MAX_RANK;
    hidden size and rank in multiples of 8; rows that the tensor memory accelerator takes as they
    lie; of the statistics, only those in STATISTICS. float16 could not hold odds.
    """
    x, _, bias, low_rank, _ = operands
    return (
        x.dtype == torch.bfloat16
        and is_hopper(x.device)
        and takes_descriptors(x.device)
        and bias is None
        and options.label_smoothing == 0.0
        and STATISTICS.issuperset(statistics)
        and x.shape[1] % 8 == 0
        and (low_rank is None or (low_rank.shape[1] <= MAX_RANK and low_rank.shape[1] % 8 == 0))
        and all(_fits_descriptor(each) for each in operands if each is not None)
    )


def is_worth_odds(tokens: int) -> bool:
    """Return True for a batch that outlasts the odds kernels' launches: see SMALL_BATCH."""
    return tokens > SMALL_BATCH


def _fits_descriptor(matrix: Tensor) -> bool:
    return (
        matrix.stride(1) == 1
        and matrix.stride(0) >= matrix.shape[1]
        and matrix.stride(0) % 8 == 0
        and matrix.data_ptr() % 16 == 0
    )


def serves_row_odds(operands: HeadInputs, options: LossOptions) -> bool:
    """Return True if odds of rows serve such a head.

    That is: bf16, which holds their range (float16 does not); a device that writes float32 products
    of it, which are scaled before they are rounded; no bias and no label smoothing; matrices whose
    rows are contiguous.
    """
    return (
        operands.hidden_states.dtype == torch.bfloat16
        and writes_float32(operands.hidden_states)
        and operands.bias is None
        and options.label_smoothing == 0.0
        and has_whole_rows(operands)
    )


def has_whole_rows(operands: HeadInputs) -> bool:
    """Return True if the elements of each row lie side by side, as the kernels read them."""
    matrices = operands.hidden_states, operands.weight, operands.low_rank, operands.low_rank_weight
    return all(each.stride(1) == 1 for each in matrices if each is not None)


class RowOddsForm(LogitsForm):
    """Computes losses of chunks of tokens from odds, and gradients from the same odds."""

    def __init__(
        self, operands: HeadInputs, labels: CompactedLabels, options: LossOptions, **how: Any
    ) -> None:
        super().__init__(operands, labels, options, **how)
        factors, label_gradients = self.losses.new_empty(2, len(labels.labels))
        self.odds = OddsFactors(factors, labels.labels, label_gradients)

    def _turn(self, logits: Tensor, chunk: slice, row_scale: Tensor | None) -> None:
        from liger_patch.kernels.triton.row_odds import row_odds_

        assert self.odds is not None
        factors, labels, label_gradients = self.odds.of(chunk)
        row_odds_(
            logits,
            labels,
            self._options,
            losses=self.losses[chunk],
            row_scale=row_scale,
            factors=factors,
            label_gradients=label_gradients,
        )


class OddsForm:
    """Computes losses and gradients of chunks of tokens from Hopper's odds: see
    ``logits.LogitsForm``.
    """

    counts_on_device = True

    def __init__(
        self,
        operands: HeadInputs,
        labels: CompactedLabels,
        options: LossOptions,
        *,
        has_statistics: bool = False,
    ) -> None:
        from liger_patch.kernels.triton.odds import label_logit_kernel

        x, weight, _, low_rank, low_rank_weight = operands
        class_weight = options.class_weight
        count = len(labels.labels)
        self._labels, self._options = labels, options
        self._vocab_size = weight.shape[0]
        self._class_weight = class_weight if class_weight is None else class_weight.contiguous()
        self._weight_tiles = _tiles(weight, TILE_V, TILE_H)
        self._low_rank_weight_tiles = None
        if low_rank_weight is not None:
            rank = _rank_tile(low_rank_weight)
            self._low_rank_weight_tiles = _tiles(low_rank_weight, TILE_V, rank)
        self._overflow = x.new_empty((), dtype=torch.int32)
        numbers = 8 if has_statistics else 6
        per_token = x.new_empty(numbers, -(-count // ALIGNED) * ALIGNED, dtype=torch.float32)
        self.losses, scales, label_gradients, *rest = per_token[:, :count].unbind()
        self._label_logits, self._label_z, self._reference, *rest = rest
        self.statistics: TokenStatistics | None = None
        if has_statistics:
            entropy, lse = rest
            is_top1 = x.new_empty(count, dtype=torch.bool)
            self.statistics = TokenStatistics(entropy, lse, is_top1)
        self.odds = OddsFactors(scales, labels.labels, label_gradients)
        if count:
            with torch.cuda.device_of(x):
                label_logit_kernel[(count,)](
                    x,
                    x.stride(0),
                    labels.rows,
                    weight,
                    weight.stride(0),
                    low_rank,
                    None if low_rank is None else low_rank.stride(0),
                    low_rank_weight,
                    None if low_rank_weight is None else low_rank_weight.stride(0),
                    labels.labels,
                    labels.counts,
                    self._label_logits,
                    self._label_z,
                    self._reference,
                    self._overflow,
                    x.shape[1],
                    None if low_rank is None else low_rank.shape[1],
                    self._vocab_size,
                    options.softcap,
                    options.logit_scale,
                    **DOT,
                )

    def run(
        self,
        operands: HeadInputs,  # of the C tokens
        start: int,
        *,
        memory: Tensor | None,  # (C, V)
        row_scale: Tensor | None,  # (N,) float32
    ) -> None:
        """Compute the losses of the C supervised tokens from ``start`` on; with ``row_scale``,
        memory then holds odds.
        """
        from liger_patch.kernels.triton.odds import finish_kernel, odds_kernel

        x, low_rank = operands.hidden_states, operands.low_rank
        rows, hidden_size = x.shape
        options = self._options
        device = x.device
        chunk, counts = slice(start, start + rows), self._labels.counts
        labels, reference = self._labels.labels[chunk], self._reference[chunk]
        v_tiles = -(-self._vocab_size // TILE_V)
        tiles = -(-rows // TILE_ROWS) * v_tiles
        statistics = None if self.statistics is None else self.statistics.of(chunk)
        sums = 2 if statistics is None else 3
        partial = torch.empty(v_tiles, sums, rows, dtype=torch.float32, device=device)
        x_tiles = _tiles(x, TILE_ROWS, TILE_H)
        low_rank_tiles, rank, programs = None, 0, PROGRAMS
        if low_rank is not None:
            rank = _rank_tile(low_rank)
            low_rank_tiles = _tiles(low_rank, TILE_ROWS, rank)
            programs = PROGRAMS if rank <= SMALL_RANK else PROGRAMS_WITH_LARGE_RANK
        constants: dict[str, Any] = tile_constants(hidden_size, rank) | {"SUMS": sums}
        odds_tiles = None
        if row_scale is not None and memory is not None:
            odds_tiles = _tiles(memory, TILE_ROWS, TILE_V // constants["PARTS"])
        per_token = (
            labels,
            self._label_logits[chunk],
            self._label_z[chunk],
            reference,
            None if row_scale is None else row_scale[chunk],
            self._class_weight,
            self.losses[chunk],
            self.odds.factors[chunk],
            self.odds.label_gradients[chunk],
            *((None, None, None) if statistics is None else statistics[:3]),
        )
        logit_options = options.softcap, options.logit_scale
        finish: Any = finish_kernel[(-(-rows // FINISHED["BLOCK_ROWS"]),)]
        with torch.cuda.device_of(x):
            for only_on_overflow in (0, 1):
                odds_kernel[(min(tiles, programs * processors(device)),)](
                    x_tiles,
                    self._weight_tiles,
                    low_rank_tiles,
                    self._low_rank_weight_tiles,
                    odds_tiles,
                    labels,
                    reference,
                    partial,
                    self._overflow,
                    counts,
                    start,
                    only_on_overflow,
                    rows,
                    hidden_size,
                    self._vocab_size,
                    *logit_options,
                    **constants,
                )
                finish(
                    partial,
                    *per_token,
                    self._overflow,
                    counts,
                    start,
                    only_on_overflow,
                    rows,
                    v_tiles,
                    self._vocab_size,
                    *logit_options,
                    options.z_loss,
                    SUMS=sums,
                    TILE_V=TILE_V,
                    **FINISHED,
                )


def _rank_tile(low_rank: Tensor) -> int:
    """Return the columns of a tile: a power of two, from 16 on, that holds the rank."""
    return max(16, 1 << (low_rank.shape[1] - 1).bit_length())


def _tiles(matrix: Tensor, rows: int, columns: int) -> object:
    """Return the descriptor of a matrix in tiles of a shape."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])  # pyright: ignore[reportOptionalMemberAccess]


@functools.cache
def tile_constants(hidden_size: int, rank: int) -> dict[str, Any]:
    """Return constants of the kernel for an adapter with tiles of ``rank`` columns, 0 for none."""
    fitting = max(1, min(MAX_GROUPED_TILES, GROUPED_COLUMNS // hidden_size))
    constants = TILES | {"GROUPED_TILES": 1 << (fitting - 1).bit_length()}
    if rank:
        constants |= WITH_SMALL_RANK if rank <= SMALL_RANK else WITH_LARGE_RANK
    return constants
