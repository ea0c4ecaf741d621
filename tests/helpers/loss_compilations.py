"""The compilations of the losses' kernels: what their arguments are, and how many warps.

sm_90 gets the full product of logits' dtypes and flags (48 compilations of the cross entropy), but
of those with statistics rows in which every pair of two flags' values occurs. The other targets get
all flags off, all flags on, and such rows, for each dtype in turn.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from compile_targets import DTYPES, FULL
from triton.backends.compiler import GPUTarget

FLAGS = (  # softcap, class weight, label smoothing, gradient
    (0, 0, 0, 0),
    (1, 1, 1, 1),
    (1, 0, 0, 1),
    (0, 1, 0, 1),
    (0, 0, 1, 1),
    (1, 1, 1, 0),
)


def cross_entropy(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(id, arguments: a type, or a value, warps) of each compilation for the target."""
    from liger_patch.kernels.triton.cross_entropy import MAX_BLOCK_V, block_and_warps

    everything = itertools.product(DTYPES, itertools.product((0, 1), repeat=4), (MAX_BLOCK_V,))
    rotated = ((DTYPES[i % 3], flags, MAX_BLOCK_V) for i, flags in enumerate(FLAGS * 2))
    ends = itertools.product(DTYPES, FLAGS[:2], (MAX_BLOCK_V,))
    small = [("*bf16", FLAGS[1], 131), ("*fp32", FLAGS[1], 2)]
    cases = {*everything, *small} if target == FULL else {*rotated, *ends, *small}
    for dtype, flags, vocab_size in sorted(cases):
        softcap, class_weight, smoothing, gradient = flags
        block_v, warps = block_and_warps(vocab_size, target.warp_size)
        yield (
            f"{dtype[1:]}-V{vocab_size}-" + "".join(map(str, flags)),
            {
                "logits_ptr": dtype,
                "logits_stride": "i32",
                "dlogits_ptr": dtype if gradient else None,
                "dlogits_stride": "i32",
                "labels_ptr": "*i64",
                "row_scale_ptr": "*fp32" if gradient else None,
                # class weights come in the model's dtype or in float32
                "class_weight_ptr": (dtype if smoothing else "*fp32") if class_weight else None,
                "loss_ptr": "*fp32",
                "vocab_size": "i32",
                "ignore_index": "i32",
                "softcap": "fp32" if softcap else None,
                "logit_scale": "fp32",
                "label_smoothing": "fp32" if smoothing else None,
                "z_loss": "fp32",
                "BLOCK_V": block_v,
            },
            warps,
        )


def row_odds(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.triton import row_odds as kernels

    for softcap, class_weight, gradient in itertools.product((0, 1), repeat=3):
        block = dict(kernels.BLOCK_WITH_SOFTCAP if softcap else kernels.BLOCK)
        warps = block.pop("num_warps")
        yield (
            f"{softcap}{class_weight}{gradient}",
            {
                "logits_ptr": "*bf16",
                "logits_stride": "i32",
                "labels_ptr": "*i64",
                "row_scale_ptr": "*fp32" if gradient else None,
                "class_weight_ptr": "*fp32" if class_weight else None,
                "loss_ptr": "*fp32",
                "factor_ptr": "*fp32" if gradient else None,
                "label_gradient_ptr": "*fp32" if gradient else None,
                "vocab_size": "i32",
                "softcap": "fp32" if softcap else None,
                "logit_scale": "fp32",
                "z_loss": "fp32",
                **block,
            },
            warps,
        )


def scale(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.triton.scale import BLOCK

    for dtype, size in itertools.product(DTYPES, ("i32", "i64")):
        yield (
            f"{dtype[1:]}-{size}",
            {
                "first_ptr": dtype,
                "first_size": size,
                "second_ptr": dtype if size == "i64" else None,
                "second_size": size,
                "factor_ptr": "*fp32",
                "stride": "i32",
                "BLOCK": BLOCK,
            },
            8,
        )


def scale_rows(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.triton.scale import ROW_BLOCK

    # float32 products to gradients of both dtypes, and hidden states to scaled ones
    of_products = ("*fp32", "*bf16", 0), ("*fp32", "*fp32", 1), ("*fp32", "*fp32", 0)
    for values, out, rows in (*of_products, ("*bf16", "*bf16", 0)):
        yield (
            f"{values[1:]}-{out[1:]}-{rows}",
            {
                "values_ptr": values,
                "values_stride": "i32",
                "factors_ptr": "*fp32",
                "out_ptr": out,
                "out_stride": "i32",
                "rows_ptr": "*i64" if rows else None,
                "labels_ptr": "*i64" if values == "*fp32" else None,
                "label_gradients_ptr": "*fp32" if values == "*fp32" else None,
                "weight_ptr": "*bf16" if values == "*fp32" else None,
                "weight_stride": "i32" if values == "*fp32" else None,
                "columns": "i32",
                "BLOCK": ROW_BLOCK,
            },
            4,
        )


ODDS_CONSTANTS = ("GROUPED_TILES", "TILE_ROWS", "TILE_V", "TILE_H", "PARTS")
ODDS_WITH_STATISTICS = (  # softcap, writes, rank, sums: every pair of two flags' values
    (0, 0, 0, 3),
    (1, 1, 0, 3),
    (0, 1, 16, 3),
    (1, 0, 16, 3),
    (1, 0, 64, 3),
    (0, 1, 64, 3),
)


def odds(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    """What it serves: bf16 on Hopper. Of B200 and B300, where it is not launched, heads without
    adapters: Triton 3.7's compiler fails at those for sm_100.
    """
    from liger_patch.kernels.head import hopper as kernels

    if target.arch not in (90, 100, 103) or kernels.TensorDescriptor is None:
        return
    everything = itertools.product((0, 1), (0, 1), (0, 16, 64), (2,))
    for softcap, writes, rank, sums in [*everything, *ODDS_WITH_STATISTICS]:
        if rank and target != FULL:
            continue
        constants = kernels.tile_constants(4096, rank)
        part = kernels.TILE_V // constants["PARTS"]
        low_rank = [f"tensordesc<bf16[{n},{rank}]>" for n in (kernels.TILE_ROWS, kernels.TILE_V)]
        yield (
            f"{softcap}{writes}-{rank}-{sums}",
            {
                "low_rank": low_rank[0] if rank else None,
                "low_rank_weight": low_rank[1] if rank else None,
                "x": f"tensordesc<bf16[{kernels.TILE_ROWS},{kernels.TILE_H}]>",
                "weight": f"tensordesc<bf16[{kernels.TILE_V},{kernels.TILE_H}]>",
                "odds": f"tensordesc<bf16[{kernels.TILE_ROWS},{part}]>" if writes else None,
                "labels_ptr": "*i64",
                "reference_ptr": "*fp32",
                "partial_ptr": "*fp32",
                "overflow_ptr": "*i32",
                "counts_ptr": "*i64",
                "start": "i32",
                "only_on_overflow": "i32",
                "rows": "i32",
                "hidden_size": "i32",
                "vocab_size": "i32",
                "softcap": "fp32" if softcap else None,
                "logit_scale": "fp32",
                "SUMS": sums,
                **{name: constants[name] for name in ODDS_CONSTANTS},
            },
            constants["num_warps"],
        )


def label_logit(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.head import hopper as kernels

    for softcap, rank in itertools.product((0, 1), repeat=2):
        yield (
            f"{softcap}{rank}",
            {
                "low_rank_ptr": "*bf16" if rank else None,
                "low_rank_stride": "i32" if rank else None,
                "low_rank_weight_ptr": "*bf16" if rank else None,
                "low_rank_weight_stride": "i32" if rank else None,
                "rank": "i32" if rank else None,
                "x_ptr": "*bf16",
                "x_stride": "i32",
                "rows_ptr": "*i64",
                "weight_ptr": "*bf16",
                "weight_stride": "i32",
                "labels_ptr": "*i64",
                "counts_ptr": "*i64",
                "label_logit_ptr": "*fp32",
                "label_z_ptr": "*fp32",
                "reference_ptr": "*fp32",
                "overflow_ptr": "*i32",
                "hidden_size": "i32",
                "vocab_size": "i32",
                "softcap": "fp32" if softcap else None,
                "logit_scale": "fp32",
                **kernels.DOT,
            },
            4,
        )


def finish(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.head import hopper as kernels

    flags = itertools.product((0, 1), repeat=4)
    for softcap, class_weight, writes, statistics in flags:
        if class_weight and statistics:  # losses have the one, log-probabilities the other
            continue
        if target != FULL and {softcap, writes} != {statistics}:  # not served there
            continue
        yield (
            f"{softcap}{class_weight}{writes}{statistics}",
            {
                "partial_ptr": "*fp32",
                "labels_ptr": "*i64",
                "label_logit_ptr": "*fp32",
                "label_z_ptr": "*fp32",
                "reference_ptr": "*fp32",
                "row_scale_ptr": "*fp32" if writes else None,
                "class_weight_ptr": ("*bf16" if softcap else "*fp32") if class_weight else None,
                "loss_ptr": "*fp32",
                "factor_ptr": "*fp32",
                "label_gradient_ptr": "*fp32",
                "entropy_ptr": "*fp32" if statistics else None,
                "lse_ptr": "*fp32" if statistics else None,
                "is_top1_ptr": "*i1" if statistics else None,
                "overflow_ptr": "*i32",
                "counts_ptr": "*i64",
                "start": "i32",
                "only_on_overflow": "i32",
                "rows": "i32",
                "v_tiles": "i32",
                "vocab_size": "i32",
                "softcap": "fp32" if softcap else None,
                "logit_scale": "fp32",
                "z_loss": "fp32",
                "SUMS": 3 if statistics else 2,
                "TILE_V": kernels.TILE_V,
                **kernels.FINISHED,
            },
            4,
        )


def order_tokens(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.triton import order_tokens as kernels

    for labels in ("*i64", "*i32", "*i16", "*i8", "*u8"):
        yield (
            labels[1:],
            {
                "given_ptr": labels,
                "labels_ptr": "*i64",
                "rows_ptr": "*i64",
                "means_ptr": "*fp32",
                "counts_ptr": "*i64",
                "tokens": "i32",
                "vocab_size": "i32",
                "ignore_index": "i32",
                "BLOCK": kernels.BLOCK,
            },
            kernels.WARPS,
        )


def add_label_rows(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.triton import label_rows as kernels

    for dweight, rows in itertools.product(("*bf16", "*fp32"), (0, 1)):
        yield (
            f"{dweight[1:]}-{rows}",
            {
                "labels_ptr": "*i32",
                "order_ptr": "*i64",
                "label_gradients_ptr": "*fp32",
                "x_ptr": "*bf16",
                "x_stride": "i32",
                "rows_ptr": "*i64" if rows else None,
                "dweight_ptr": dweight,
                "dweight_stride": "i32",
                "tokens": "i32",
                "hidden_size": "i32",
                **kernels.BLOCKS,
            },
            kernels.WARPS,
        )


def row_sums(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    # softcap, class weight, label smoothing, 1 for gradients of entropy and 2 for statistics
    flags = ((0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 1, 0), (0, 0, 1, 0), (1, 0, 0, 2), (0, 0, 0, 1))
    for name, block_v, warps, dtype, each in _two_walks(target, flags):
        softcap, class_weight, smoothing, statistics = each
        names = ("weighted", "weight_sum")
        more = {f"{name}_ptr": "*fp32" if smoothing else None for name in names}
        more["moment_ptr"] = "*fp32" if statistics else None
        names = ("squares", "z_sum", "top")
        more |= {f"{name}_ptr": "*fp32" if statistics == 2 else None for name in names}
        names = ("highest", "others", "label_distance")
        more |= {f"{name}_ptr": "*fp32" for name in names}
        yield name, _row_arguments(dtype, softcap, class_weight, block_v) | more, warps


def row_gradients(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    # softcap, class weight, label smoothing, entropy
    flags = ((0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 1, 0), (0, 0, 1, 0), (1, 0, 0, 1), (0, 0, 0, 1))
    for name, block_v, warps, dtype, each in _two_walks(target, flags):
        softcap, class_weight, smoothing, entropy = each
        more: dict[str, Any] = {"smooth_ptr": "*fp32" if smoothing else None}
        names = ("entropy_factor", "mean_distance")
        more |= {f"{name}_ptr": "*fp32" if entropy else None for name in names}
        names = ("highest", "factor", "label_gradient")
        more |= {f"{name}_ptr": "*fp32" for name in names}
        yield name, _row_arguments(dtype, softcap, class_weight, block_v) | more, warps


def _two_walks(
    target: GPUTarget, flags: tuple[tuple[int, ...], ...]
) -> Iterator[tuple[str, int, int, str, tuple[int, ...]]]:
    from liger_patch.kernels.triton.cross_entropy import MAX_BLOCK_V, block_and_warps

    everything = [*itertools.product(DTYPES, flags, (MAX_BLOCK_V,)), ("*bf16", flags[2], 131)]
    rotated = [(DTYPES[i % 3], each, MAX_BLOCK_V) for i, each in enumerate(flags)]
    for dtype, each, vocab_size in everything if target == FULL else rotated:
        block_v, warps = block_and_warps(vocab_size, target.warp_size)
        name = f"{dtype[1:]}-V{vocab_size}-" + "".join(map(str, each))
        yield name, block_v, warps, dtype, each


def _row_arguments(dtype: str, softcap: int, class_weight: int, block_v: int) -> dict[str, Any]:
    return {
        "logits_ptr": dtype,
        "logits_stride": "i32",
        "labels_ptr": "*i64",
        "class_weight_ptr": "*fp32" if class_weight else None,
        "vocab_size": "i32",
        "softcap": "fp32" if softcap else None,
        "logit_scale": "fp32",
        "BLOCK_V": block_v,
    }
