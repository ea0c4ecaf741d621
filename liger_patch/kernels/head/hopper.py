"""Launch the odds kernels of Hopper on a chunk: a kernel that computes the matrix product of the
logits writes their unnormalized softmax ("odds") instead (``triton/odds``). ``odds`` says
which inputs are served.

C: tokens of a chunk, N: of the batch, H: hidden size, V: vocabulary.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import TensorDescriptor, processors
from liger_patch.kernels.head.gradients import OddsFactors
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.head.labels import CompactedLabels
from liger_patch.kernels.head.row_sums import TokenStatistics
from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.triton.odds import finish_kernel, label_logit_kernel, odds_kernel

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


class OddsForm:
    """Computes losses and gradients of chunks of tokens from odds: see ``logits.LogitsForm``."""

    counts_on_device = True

    def __init__(
        self,
        operands: HeadInputs,
        labels: CompactedLabels,
        options: LossOptions,
        *,
        has_statistics: bool = False,
    ) -> None:
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
    """Return the columns of a tile that holds them all."""
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
