"""Triton forms of scaling by factors that only the device knows: one for all in place, and one for
each row on the way to another place and dtype. C: rows, H: columns.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.triton.launch import launch

BLOCK = 8192  # elements of a program's step
ROW_BLOCK = 1024  # elements
MAX_PROGRAMS = 2048  # walking in steps: few enough that returning at once costs microseconds


@triton.jit
def _scale_part(values_ptr, factor, size, stride, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, stride):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < size
        values = tl.load(values_ptr + offsets, mask=mask).to(tl.float32)
        tl.store(values_ptr + offsets, values * factor, mask=mask)


@triton.jit
def _scale_kernel(
    first_ptr,
    first_size,
    second_ptr,  # None: the first alone
    second_size,
    factor_ptr,
    stride,
    BLOCK: tl.constexpr,
):
    """One block per program at a time, ``stride`` elements apart; nothing for a factor of 1."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor == 1.0:
        return
    _scale_part(first_ptr, factor, first_size, stride, BLOCK)
    if second_ptr is not None:
        _scale_part(second_ptr, factor, second_size, stride, BLOCK)


def scale_(values: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each of the values, contiguous and of any shape, by a factor of one element."""
    values = [each for each in values if each.numel()]
    for start in range(0, len(values), 2):  # two a launch: of a head and of its input
        first = values[start]
        second = values[start + 1] if start + 1 < len(values) else None
        size = 0 if second is None else second.numel()
        programs = min(MAX_PROGRAMS, -(-max(first.numel(), size) // BLOCK))
        launch(
            _scale_kernel,
            (programs,),
            first,
            first.numel(),
            second,
            size,
            factor,
            programs * BLOCK,
            BLOCK=BLOCK,
            num_warps=8,
        )


@triton.jit
def _scale_rows_kernel(
    values_ptr,  # (C, H)
    values_stride,
    factors_ptr,  # (C,)
    out_ptr,  # (N, H)
    out_stride,
    rows_ptr,  # (C,) row of out for each row of values; None: the same
    labels_ptr,  # (C,) or None
    label_gradients_ptr,  # (C,) or None
    weight_ptr,  # (V, H) or None
    weight_stride,
    columns,
    BLOCK: tl.constexpr,
):
    """One program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    out_row = row
    if rows_ptr is not None:
        out_row = tl.load(rows_ptr + row)
    values = tl.load(values_ptr + row * values_stride + column, mask=mask).to(tl.float32)
    factor = tl.load(factors_ptr + row)
    scaled = values * factor
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        weight_ptr += label * weight_stride
        label_row = tl.load(weight_ptr + column, mask=mask).to(tl.float32)
        scaled += tl.load(label_gradients_ptr + row) * label_row
    tl.store(out_ptr + out_row * out_stride + column, scaled, mask=mask)


def scale_rows(
    values: Tensor,  # (C, H)
    factors: Tensor,  # (C,) float32
    out: Tensor,  # (N, H)
    *,
    rows: Tensor | None = None,  # (C,) int64
    label_part: tuple[Tensor, Tensor, Tensor] | None = None,  # (C,) int64, (C,) float32, (V, H)
) -> Tensor:
    """Write ``factors[:, None] * values`` to ``out[rows]``, or to its first C rows; round once.

    With ``label_part`` of labels, their gradients and a weight, plus
    ``label_gradients[:, None] * weight[labels]``.
    """
    labels, label_gradients, weight = label_part or (None, None, None)
    count, columns = values.shape
    grid = (count, triton.cdiv(columns, ROW_BLOCK))
    launch(
        _scale_rows_kernel,
        grid,
        values,
        values.stride(0),
        factors,
        out,
        out.stride(0),
        rows,
        labels,
        label_gradients,
        weight,
        None if weight is None else weight.stride(0),
        columns,
        BLOCK=ROW_BLOCK,
    )
    return out
