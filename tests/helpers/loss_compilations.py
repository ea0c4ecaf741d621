"""The compilations of the losses' kernels.

sm_90 gets the full product of logits' dtypes and flags (48 compilations of the cross entropy), but
of those with statistics rows in which every pair of two flags' values occurs. The other targets get
all flags off, all flags on, and such rows, for each dtype in turn.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from compile_targets import DTYPES, FULL, MULTIPLE, Case, absent, cases_of, each, named
from triton.backends.compiler import GPUTarget

from liger_patch.kernels.head import odds as head_odds
from liger_patch.kernels.head.divergences import DIVERGENCES
from liger_patch.kernels.triton import cross_entropy as rows
from liger_patch.kernels.triton import distillation, labels, scale
from liger_patch.kernels.triton import row_odds as odds_of_rows

FLAGS = (  # softcap, class weight, label smoothing, gradient
    (0, 0, 0, 0),
    (1, 1, 1, 1),
    (1, 0, 0, 1),
    (0, 1, 0, 1),
    (0, 0, 1, 1),
    (1, 1, 1, 0),
)


@cases_of("_cross_entropy_kernel")
def cross_entropy(target: GPUTarget) -> Iterator[Case]:
    everything = itertools.product(DTYPES, itertools.product((0, 1), repeat=4), (rows.MAX_BLOCK_V,))
    rotated = ((DTYPES[i % 3], flags, rows.MAX_BLOCK_V) for i, flags in enumerate(FLAGS * 2))
    ends = itertools.product(DTYPES, FLAGS[:2], (rows.MAX_BLOCK_V,))
    small = [("bf16", FLAGS[1], 131), ("fp32", FLAGS[1], 2)]
    found = {*everything, *small} if target == FULL else {*rotated, *ends, *small}
    for dtype, flags, vocab_size in sorted(found):
        softcap, class_weight, smoothing, gradient = flags
        block_v, warps = rows.block_and_warps(vocab_size, target.warp_size)
        given = {"BLOCK_V": block_v} | absent("softcap", unless=softcap)
        given |= absent("dlogits_ptr row_scale_ptr", unless=gradient)
        # class weights come in the model's dtype or in float32
        given |= each("class_weight_ptr", f"*{dtype}") if smoothing else absent("label_smoothing")
        given |= absent("class_weight_ptr", unless=class_weight)
        yield Case(named((dtype, vocab_size, *flags)), dtype, given, warps)


@cases_of("_divergence_kernel")
def divergence(target: GPUTarget) -> Iterator[Case]:
    # student's and teacher's softcap, cross entropy, gradient
    flags = ((1, 1, 1, 1), (0, 0, 0, 1), (1, 0, 1, 0), (0, 1, 0, 0))
    kinds = range(len(DIVERGENCES))
    dtypes = [(DTYPES[i % 3], DTYPES[i // 2 % 3]) for i in kinds]  # of student and teacher
    everything = itertools.product(itertools.product(DTYPES, DTYPES), flags[:2], kinds)
    rotated = ((dtypes[i], flags[(i + j) % 4], i) for i in kinds for j in range(4))
    for pair, row, kind in sorted({*everything, *rotated} if target == FULL else {*rotated}):
        softcap, teacher_softcap, has_labels, gradient = row
        itemsize = 4 if "fp32" in pair else 2
        block_v, warps, vector = distillation.block_and_warps(100000, target.warp_size, itemsize)
        given = {"DIVERGENCE": kind, "BLOCK_V": block_v, "VECTOR": vector}
        given |= {"teacher_ptr": f"*{pair[1]}"}
        given |= each("student_stride teacher_stride width", MULTIPLE)
        given |= absent("labels_ptr", unless=has_labels) | absent("row_scale_ptr", unless=gradient)
        given |= absent("softcap", unless=softcap)
        given |= absent("t_softcap entropy_ptr", unless=teacher_softcap)
        yield Case(named((DIVERGENCES[kind], *pair, *row)), pair[0], given, warps)


@cases_of("_row_odds_kernel")
def row_odds(target: GPUTarget) -> Iterator[Case]:
    for row in itertools.product((0, 1), repeat=3):
        softcap, class_weight, gradient = row
        block = odds_of_rows.BLOCK_WITH_SOFTCAP if softcap else odds_of_rows.BLOCK
        given = {"BLOCK_V": block["BLOCK_V"]} | absent("softcap", unless=softcap)
        given |= absent("class_weight_ptr", unless=class_weight)
        given |= absent("row_scale_ptr factor_ptr label_gradient_ptr", unless=gradient)
        yield Case(named(row), "bf16", given, block["num_warps"])


@cases_of("_scale_kernel")
def scale_elements(target: GPUTarget) -> Iterator[Case]:
    for dtype, size in itertools.product(DTYPES, ("i32", "i64")):
        given = each("first_size second_size", size) | absent("second_ptr", unless=size == "i64")
        yield Case(f"{dtype}-{size}", dtype, given, 8)


@cases_of("_scale_rows_kernel")
def scale_rows(target: GPUTarget) -> Iterator[Case]:
    # float32 products to gradients of both dtypes, and hidden states to scaled ones
    of_products = ("fp32", "bf16", 0), ("fp32", "fp32", 1), ("fp32", "fp32", 0)
    for values, out, has_rows in (*of_products, ("bf16", "bf16", 0)):
        given: dict[str, Any] = {"rows_ptr": "*i64" if has_rows else None, "out_ptr": f"*{out}"}
        given |= {"weight_ptr": "*bf16", "BLOCK": scale.ROW_BLOCK}
        of_products_only = "labels_ptr label_gradients_ptr weight_ptr weight_stride"
        given |= absent(of_products_only, unless=values == "fp32")
        yield Case(named((values, out, has_rows)), values, given, 4)


ODDS_WITH_STATISTICS = (  # softcap, writes, rank, sums: every pair of two flags' values
    (0, 0, 0, 3),
    (1, 1, 0, 3),
    (0, 1, 16, 3),
    (1, 0, 16, 3),
    (1, 0, 64, 3),
    (0, 1, 64, 3),
)


@cases_of("odds_kernel")
def odds(target: GPUTarget) -> Iterator[Case]:
    """What it serves: bf16 on Hopper. Of B200 and B300, where it is not launched, heads without
    adapters: Triton 3.7's compiler fails at those for sm_100.
    """
    if target.arch not in (90, 100, 103) or head_odds.TensorDescriptor is None:
        return
    everything = itertools.product((0, 1), (0, 1), (0, 16, 64), (2,))
    for row in [*everything, *ODDS_WITH_STATISTICS]:
        softcap, writes, rank, sums = row
        if rank and target != FULL:
            continue
        constants = head_odds.tile_constants(4096, rank)
        height, classes, columns = head_odds.TILE_ROWS, head_odds.TILE_V, head_odds.TILE_H
        names = ("GROUPED_TILES", "TILE_ROWS", "TILE_V", "TILE_H", "PARTS")
        given = {name: constants[name] for name in names} | {"SUMS": sums}
        given |= {"x": _tile(height, columns), "weight": _tile(classes, columns)}
        given |= {"odds": _tile(height, classes // constants["PARTS"]) if writes else None}
        given |= {"low_rank": _tile(height, rank), "low_rank_weight": _tile(classes, rank)}
        given |= absent("low_rank low_rank_weight", unless=rank) | {"counts_ptr": "*i64"}
        given |= absent("softcap", unless=softcap)
        yield Case(named(row), "bf16", given, constants["num_warps"])


def _tile(height: int, columns: int) -> str:
    return f"tensordesc<bf16[{height},{columns}]>"


@cases_of("label_logit_kernel")
def label_logit(target: GPUTarget) -> Iterator[Case]:
    low_rank = "low_rank_ptr low_rank_weight_ptr low_rank_stride low_rank_weight_stride rank"
    for softcap, rank in itertools.product((0, 1), repeat=2):
        given = head_odds.DOT | absent("softcap", unless=softcap) | absent(low_rank, unless=rank)
        yield Case(f"{softcap}-{rank}", "bf16", given | each("rows_ptr counts_ptr", "*i64"), 4)


@cases_of("finish_kernel")
def finish(target: GPUTarget) -> Iterator[Case]:
    for row in itertools.product((0, 1), repeat=4):
        softcap, class_weight, writes, statistics = row
        if class_weight and statistics:  # losses have the one, log-probabilities the other
            continue
        if target != FULL and {softcap, writes} != {statistics}:  # not served there
            continue
        given = {"SUMS": 3 if statistics else 2, "TILE_V": head_odds.TILE_V, "counts_ptr": "*i64"}
        given |= absent("row_scale_ptr", unless=writes)
        given |= each("class_weight_ptr", "*bf16") if softcap else absent("softcap")
        given |= absent("class_weight_ptr", unless=class_weight)
        given |= absent("entropy_ptr lse_ptr is_top1_ptr", unless=statistics)
        yield Case(named(row), "bf16", given | head_odds.FINISHED, 4)


@cases_of("_order_tokens_kernel")
def order_tokens(target: GPUTarget) -> Iterator[Case]:
    given = each("rows_ptr counts_ptr", "*i64") | {"BLOCK": labels.ORDER_BLOCK}
    for dtype in ("i64", "i32", "i16", "i8", "u8"):
        yield Case(dtype, dtype, given, labels.ORDER_WARPS)


@cases_of("_add_label_rows_kernel")
def add_label_rows(target: GPUTarget) -> Iterator[Case]:
    for dweight, has_rows in itertools.product(("bf16", "fp32"), (0, 1)):
        given = {"labels_ptr": "*i32", "dweight_ptr": f"*{dweight}", **labels.BLOCKS}
        given |= {"rows_ptr": "*i64" if has_rows else None}
        yield Case(f"{dweight}-{has_rows}", "bf16", given, labels.WARPS)


@cases_of("_row_sums_kernel")
def row_sums(target: GPUTarget) -> Iterable[Case]:
    # softcap, class weight, label smoothing, 1 for gradients of entropy and 2 for statistics
    flags = ((0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 1, 0), (0, 0, 1, 0), (1, 0, 0, 2), (0, 0, 0, 1))
    for case, (smoothing, statistics) in _two_walks(target, flags):
        case.given.update(each("weighted_ptr", "*fp32"))
        case.given.update(absent("weighted_ptr weight_sum_ptr", unless=smoothing))
        case.given.update(absent("moment_ptr", unless=statistics))
        case.given.update(absent("squares_ptr z_sum_ptr top_ptr", unless=statistics == 2))
        yield case


@cases_of("_row_gradients_kernel")
def row_gradients(target: GPUTarget) -> Iterable[Case]:
    # softcap, class weight, label smoothing, entropy
    flags = ((0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 1, 0), (0, 0, 1, 0), (1, 0, 0, 1), (0, 0, 0, 1))
    for case, (smoothing, entropy) in _two_walks(target, flags):
        case.given.update(absent("smooth_ptr", unless=smoothing))
        case.given.update(absent("entropy_factor_ptr mean_distance_ptr", unless=entropy))
        yield case


def _two_walks(
    target: GPUTarget, flags: tuple[tuple[int, ...], ...]
) -> Iterator[tuple[Case, tuple[int, ...]]]:
    """The cases of a kernel of one of the two walks, and the flags that only it knows."""
    large = rows.MAX_BLOCK_V
    everything = [*itertools.product(DTYPES, flags, (large,)), ("bf16", flags[2], 131)]
    rotated = [(DTYPES[i % 3], row, large) for i, row in enumerate(flags)]
    for dtype, row, vocab_size in everything if target == FULL else rotated:
        block_v, warps = rows.block_and_warps(vocab_size, target.warp_size)
        softcap, class_weight, *others = row
        given = {"BLOCK_V": block_v} | absent("softcap", unless=softcap)
        given |= absent("class_weight_ptr", unless=class_weight)
        yield Case(named((dtype, vocab_size, *row)), dtype, given, warps), tuple(others)
