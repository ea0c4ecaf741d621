"""The compilations of the losses' kernels.

sm_90 gets the full product of logits' dtypes and flags (48 compilations of the cross entropy), but
of those with statistics rows in which every pair of two flags' values occurs. The other targets get
all flags off, all flags on, and such rows, for each dtype in turn.
"""

import itertools
from collections.abc import Iterable, Iterator

from compile_targets import DTYPES, FULL, MULTIPLE, Case, absent, cases_of, each, named, rows
from triton.backends.compiler import GPUTarget

from liger_patch.kernels.head import odds as head_odds
from liger_patch.kernels.head.divergences import DIVERGENCES
from liger_patch.kernels.triton import distillation, labels, scale
from liger_patch.kernels.triton import row_odds as odds_of_rows
from liger_patch.kernels.triton.cross_entropy import MAX_BLOCK_V, block_and_warps

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
    everything = itertools.product(DTYPES, itertools.product((0, 1), repeat=4), (MAX_BLOCK_V,))
    rotated = ((DTYPES[i % 3], flags, MAX_BLOCK_V) for i, flags in enumerate(FLAGS))
    ends = itertools.product(DTYPES, FLAGS[:2], (MAX_BLOCK_V,))
    small = [("bf16", FLAGS[1], 131), ("fp32", FLAGS[1], 2)]
    found = {*everything, *small} if target == FULL else {*rotated, *ends, *small}
    for dtype, flags, vocab_size in sorted(found):
        softcap, class_weight, smoothing, gradient = flags
        block_v, warps = block_and_warps(vocab_size, target.warp_size)
        given = {"BLOCK_V": block_v} | absent("softcap", unless=softcap)
        given |= absent("dlogits_ptr row_scale_ptr", unless=gradient)
        # class weights come in the model's dtype or in float32
        given |= each("class_weight_ptr", f"*{dtype}") if smoothing else absent("label_smoothing")
        given |= absent("class_weight_ptr", unless=class_weight)
        yield Case(dtype, given, warps, named((dtype, vocab_size, *flags)))


@cases_of("_divergence_kernel")
def divergence(target: GPUTarget) -> Iterator[Case]:
    # student's and teacher's softcap, cross entropy, gradient
    flags = ((1, 1, 1, 1), (0, 0, 0, 1), (1, 0, 1, 0), (0, 1, 0, 0))
    kinds = range(len(DIVERGENCES))
    dtypes = [(DTYPES[i % 3], DTYPES[i // 2 % 3]) for i in kinds]  # of student and teacher
    everything = itertools.product(itertools.product(DTYPES, DTYPES), flags[:2], kinds)
    rotated = ((dtypes[i], row, i) for i in kinds for row in flags)
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
        yield Case(pair[0], given, warps, named((DIVERGENCES[kind], *pair, *row)))


@cases_of("_row_odds_kernel")
@rows(*itertools.product((0, 1), repeat=3))
def row_odds(target, softcap, class_weight, gradient):
    block = odds_of_rows.BLOCK_WITH_SOFTCAP if softcap else odds_of_rows.BLOCK
    given = {"BLOCK_V": block["BLOCK_V"]} | absent("softcap", unless=softcap)
    given |= absent("class_weight_ptr", unless=class_weight)
    given |= absent("row_scale_ptr", unless=gradient)
    return Case("bf16", given, block["num_warps"])


@cases_of("_scale_kernel")
@rows(*itertools.product(DTYPES, ("i32", "i64")))
def scale_elements(target, dtype, size):
    given = each("first_size second_size", size) | absent("second_ptr", unless=size == "i64")
    return Case(dtype, given, 8)


@cases_of("_scale_rows_kernel")
@rows(
    ("fp32", "bf16", 0),  # of products, to gradients of both dtypes
    ("fp32", "fp32", 1),
    ("fp32", "fp32", 0),
    ("bf16", "bf16", 0),  # hidden states to scaled ones
)
def scale_rows(target, values, out, has_rows):
    given = {"out_ptr": f"*{out}", "weight_ptr": "*bf16", "BLOCK": scale.ROW_BLOCK}
    given |= absent("rows_ptr", unless=has_rows)
    of_products = "labels_ptr label_gradients_ptr weight_ptr weight_stride"
    return Case(values, given | absent(of_products, unless=values == "fp32"), 4)


ODDS_WITH_STATISTICS = (  # softcap, writes, rank, sums: every pair of two flags' values
    (0, 0, 0, 3),
    (1, 1, 0, 3),
    (0, 1, 16, 3),
    (1, 0, 16, 3),
    (1, 0, 64, 3),
    (0, 1, 64, 3),
)


@cases_of("odds_kernel")
@rows(*itertools.product((0, 1), (0, 1), (0, 16, 64), (2,)), *ODDS_WITH_STATISTICS)
def odds(target, softcap, writes, rank, sums):
    """What it serves: bf16 on Hopper. Of B200 and B300, where it is not launched, heads without
    adapters: Triton 3.7's compiler fails at those for sm_100.
    """
    is_served = target == FULL or (target.arch in (100, 103) and not rank)
    if not is_served or head_odds.TensorDescriptor is None:
        return None
    constants = head_odds.tile_constants(4096, rank)
    height, classes, columns = head_odds.TILE_ROWS, head_odds.TILE_V, head_odds.TILE_H
    names = ("GROUPED_TILES", "TILE_ROWS", "TILE_V", "TILE_H", "PARTS")
    given = {name: constants[name] for name in names} | {"SUMS": sums}
    given |= {"x": _tile(height, columns), "weight": _tile(classes, columns)}
    given |= {"odds": _tile(height, classes // constants["PARTS"]) if writes else None}
    given |= {"low_rank": _tile(height, rank), "low_rank_weight": _tile(classes, rank)}
    given |= absent("low_rank low_rank_weight", unless=rank) | absent("softcap", unless=softcap)
    return Case("bf16", given, constants["num_warps"])


def _tile(height: int, columns: int) -> str:
    return f"tensordesc<bf16[{height},{columns}]>"


@cases_of("label_logit_kernel")
@rows(*itertools.product((0, 1), repeat=2))
def label_logit(target, softcap, rank):
    low_rank = "low_rank_ptr low_rank_weight_ptr low_rank_stride low_rank_weight_stride rank"
    given = head_odds.DOT | absent("softcap", unless=softcap) | absent(low_rank, unless=rank)
    return Case("bf16", given, 4)


@cases_of("finish_kernel")
@rows(*itertools.product((0, 1), repeat=4))
def finish(target, softcap, class_weight, writes, statistics):
    if class_weight and statistics:  # losses have the one, log-probabilities the other
        return None
    if target != FULL and {softcap, writes} != {statistics}:  # not served there
        return None
    given = {"SUMS": 3 if statistics else 2, "TILE_V": head_odds.TILE_V}
    given |= absent("row_scale_ptr", unless=writes)
    given |= each("class_weight_ptr", "*bf16") if softcap else absent("softcap")
    given |= absent("class_weight_ptr", unless=class_weight)
    given |= absent("entropy_ptr lse_ptr is_top1_ptr", unless=statistics)
    return Case("bf16", given | head_odds.FINISHED, 4)


@cases_of("_order_tokens_kernel")
@rows(("i64",), ("i32",), ("i16",), ("i8",), ("u8",))
def order_tokens(target, dtype):
    return Case(dtype, {"BLOCK": labels.ORDER_BLOCK}, labels.ORDER_WARPS)


@cases_of("_add_label_rows_kernel")
@rows(*itertools.product(("bf16", "fp32"), (0, 1)))
def add_label_rows(target, dweight, has_rows):
    given = {"labels_ptr": "*i32", "dweight_ptr": f"*{dweight}", **labels.BLOCKS}
    return Case("bf16", given | absent("rows_ptr", unless=has_rows), labels.WARPS)


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
    everything = [*itertools.product(DTYPES, flags, (MAX_BLOCK_V,)), ("bf16", flags[2], 131)]
    rotated = [(DTYPES[i % 3], row, MAX_BLOCK_V) for i, row in enumerate(flags)]
    for dtype, row, vocab_size in everything if target == FULL else rotated:
        block_v, warps = block_and_warps(vocab_size, target.warp_size)
        softcap, class_weight, *others = row
        given = {"BLOCK_V": block_v} | absent("softcap", unless=softcap)
        given |= absent("class_weight_ptr", unless=class_weight)
        yield Case(dtype, given, warps, named((dtype, vocab_size, *row))), tuple(others)
