"""The compilations of the losses' kernels: what their arguments are, and how many warps.

sm_90 gets the full product of logits' dtypes and flags (48 compilations of the cross entropy), but
of those with statistics rows in which every pair of two flags' values occurs. The other targets get
all flags off, all flags on, and such rows, for each dtype in turn.
"""

import itertools
from collections.abc import Iterator

from compile_targets import DTYPES, FULL, MULTIPLE, Cases, arguments
from triton.backends.compiler import GPUTarget

FLAGS = (  # softcap, class weight, label smoothing, gradient
    (0, 0, 0, 0),
    (1, 1, 1, 1),
    (1, 0, 0, 1),
    (0, 1, 0, 1),
    (0, 0, 1, 1),
    (1, 1, 1, 0),
)


def cross_entropy(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton.cross_entropy import MAX_BLOCK_V, block_and_warps

    everything = itertools.product(DTYPES, itertools.product((0, 1), repeat=4), (MAX_BLOCK_V,))
    rotated = ((DTYPES[i % 3], flags, MAX_BLOCK_V) for i, flags in enumerate(FLAGS * 2))
    ends = itertools.product(DTYPES, FLAGS[:2], (MAX_BLOCK_V,))
    small = [("*bf16", FLAGS[1], 131), ("*fp32", FLAGS[1], 2)]
    cases = {*everything, *small} if target == FULL else {*rotated, *ends, *small}
    for dtype, flags, vocab_size in sorted(cases):
        softcap, class_weight, smoothing, gradient = flags
        block_v, warps = block_and_warps(vocab_size, target.warp_size)
        name = f"{dtype[1:]}-V{vocab_size}-" + "".join(map(str, flags))
        # class weights come in the model's dtype or in float32
        weights = (dtype if smoothing else "*fp32") if class_weight else None
        given = arguments(dtype, "dlogits_ptr", if_=gradient)
        given |= arguments("*fp32", "row_scale_ptr", if_=gradient) | {"class_weight_ptr": weights}
        given |= arguments("fp32", "label_smoothing", if_=smoothing)
        given |= arguments("i32", "dlogits_stride ignore_index")
        given |= {"loss_ptr": "*fp32", "z_loss": "fp32"}
        yield name, _row_arguments(dtype, softcap, 0, block_v) | given, warps


def divergence(target: GPUTarget) -> Cases:
    from liger_patch.kernels.head.divergences import DIVERGENCES
    from liger_patch.kernels.triton.distillation import block_and_warps

    # student's and teacher's softcap, cross entropy, gradient
    flags = ((1, 1, 1, 1), (0, 0, 0, 1), (1, 0, 1, 0), (0, 1, 0, 0))
    kinds = range(len(DIVERGENCES))
    dtypes = [(DTYPES[i % 3], DTYPES[i // 2 % 3]) for i in kinds]  # of student and teacher
    everything = itertools.product(itertools.product(DTYPES, DTYPES), flags[:2], kinds)
    rotated = ((dtypes[i], flags[(i + j) % 4], i) for i in kinds for j in range(4))
    for pair, each, kind in sorted({*everything, *rotated} if target == FULL else {*rotated}):
        softcap, teacher_softcap, has_labels, gradient = each
        student, teacher = pair
        itemsize = 4 if "*fp32" in pair else 2
        block_v, warps, vector = block_and_warps(100000, target.warp_size, itemsize)
        given = arguments("*i64", "labels_ptr", if_=has_labels)
        given |= arguments("*fp32", "row_scale_ptr", if_=gradient) | {"loss_ptr": "*fp32"}
        given |= arguments("*fp32", "entropy_ptr", if_=teacher_softcap)
        given |= arguments("fp32", "softcap", if_=softcap)
        given |= arguments("fp32", "t_softcap", if_=teacher_softcap)
        given |= arguments("fp32", "logit_scale t_scale factor t_factor")
        given |= arguments("fp32", "temperature beta ce_weight")
        given |= arguments(MULTIPLE, "student_stride teacher_stride width") | {"vocab_size": "i32"}
        given |= {"student_ptr": student, "teacher_ptr": teacher}
        given |= {"DIVERGENCE": kind, "BLOCK_V": block_v, "VECTOR": vector}
        name = f"{DIVERGENCES[kind]}-{student[1:]}-{teacher[1:]}-" + "".join(map(str, each))
        yield name, given, warps


def row_odds(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton import row_odds as kernels

    for softcap, class_weight, gradient in itertools.product((0, 1), repeat=3):
        block = dict(kernels.BLOCK_WITH_SOFTCAP if softcap else kernels.BLOCK)
        warps = block.pop("num_warps")
        given = _row_arguments("*bf16", softcap, class_weight, 0) | block
        given |= arguments("*fp32", "row_scale_ptr factor_ptr label_gradient_ptr", if_=gradient)
        given |= {"loss_ptr": "*fp32", "z_loss": "fp32"}
        yield f"{softcap}{class_weight}{gradient}", given, warps


def scale(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton.scale import BLOCK

    for dtype, size in itertools.product(DTYPES, ("i32", "i64")):
        given = arguments(dtype, "second_ptr", if_=size == "i64") | {"first_ptr": dtype}
        given |= arguments(size, "first_size second_size")
        given |= {"factor_ptr": "*fp32", "stride": "i32", "BLOCK": BLOCK}
        yield f"{dtype[1:]}-{size}", given, 8


def scale_rows(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton.scale import ROW_BLOCK

    # float32 products to gradients of both dtypes, and hidden states to scaled ones
    of_products = ("*fp32", "*bf16", 0), ("*fp32", "*fp32", 1), ("*fp32", "*fp32", 0)
    for values, out, rows in (*of_products, ("*bf16", "*bf16", 0)):
        is_product = values == "*fp32"
        given = {"values_ptr": values, "out_ptr": out, "factors_ptr": "*fp32", "BLOCK": ROW_BLOCK}
        given |= arguments("i32", "values_stride out_stride columns")
        given |= arguments("*i64", "rows_ptr", if_=rows)
        given |= arguments("*i64", "labels_ptr", if_=is_product)
        given |= arguments("*fp32", "label_gradients_ptr", if_=is_product)
        given |= arguments("*bf16", "weight_ptr", if_=is_product)
        given |= arguments("i32", "weight_stride", if_=is_product)
        yield f"{values[1:]}-{out[1:]}-{rows}", given, 4


ODDS_CONSTANTS = ("GROUPED_TILES", "TILE_ROWS", "TILE_V", "TILE_H", "PARTS")
ODDS_WITH_STATISTICS = (  # softcap, writes, rank, sums: every pair of two flags' values
    (0, 0, 0, 3),
    (1, 1, 0, 3),
    (0, 1, 16, 3),
    (1, 0, 16, 3),
    (1, 0, 64, 3),
    (0, 1, 64, 3),
)


def odds(target: GPUTarget) -> Cases:
    """What it serves: bf16 on Hopper. Of B200 and B300, where it is not launched, heads without
    adapters: Triton 3.7's compiler fails at those for sm_100.
    """
    from liger_patch.kernels.head import odds as kernels

    if target.arch not in (90, 100, 103) or kernels.TensorDescriptor is None:
        return
    everything = itertools.product((0, 1), (0, 1), (0, 16, 64), (2,))
    for softcap, writes, rank, sums in [*everything, *ODDS_WITH_STATISTICS]:
        if rank and target != FULL:
            continue
        constants = kernels.tile_constants(4096, rank)
        rows, classes, columns = kernels.TILE_ROWS, kernels.TILE_V, kernels.TILE_H
        given = arguments(_tile(rows, rank), "low_rank", if_=rank)
        given |= arguments(_tile(classes, rank), "low_rank_weight", if_=rank)
        given |= {"x": _tile(rows, columns), "weight": _tile(classes, columns)}
        given |= arguments(_tile(rows, classes // constants["PARTS"]), "odds", if_=writes)
        given |= arguments("*i64", "labels_ptr counts_ptr") | {"overflow_ptr": "*i32"}
        given |= arguments("*fp32", "reference_ptr partial_ptr")
        given |= arguments("i32", "start only_on_overflow rows hidden_size vocab_size")
        given |= arguments("fp32", "softcap", if_=softcap) | {"logit_scale": "fp32", "SUMS": sums}
        given |= {name: constants[name] for name in ODDS_CONSTANTS}
        yield f"{softcap}{writes}-{rank}-{sums}", given, constants["num_warps"]


def _tile(rows: int, columns: int) -> str:
    return f"tensordesc<bf16[{rows},{columns}]>"


def label_logit(target: GPUTarget) -> Cases:
    from liger_patch.kernels.head import odds as kernels

    for softcap, rank in itertools.product((0, 1), repeat=2):
        given = arguments("*bf16", "low_rank_ptr low_rank_weight_ptr", if_=rank)
        given |= arguments("i32", "low_rank_stride low_rank_weight_stride rank", if_=rank)
        given |= arguments("*bf16", "x_ptr weight_ptr")
        given |= arguments("i32", "x_stride weight_stride hidden_size vocab_size")
        given |= arguments("*i64", "rows_ptr labels_ptr counts_ptr") | {"overflow_ptr": "*i32"}
        given |= arguments("*fp32", "label_logit_ptr label_z_ptr reference_ptr")
        given |= arguments("fp32", "softcap", if_=softcap) | {"logit_scale": "fp32"}
        yield f"{softcap}{rank}", given | kernels.DOT, 4


def finish(target: GPUTarget) -> Cases:
    from liger_patch.kernels.head import odds as kernels

    flags = itertools.product((0, 1), repeat=4)
    for softcap, class_weight, writes, statistics in flags:
        if class_weight and statistics:  # losses have the one, log-probabilities the other
            continue
        if target != FULL and {softcap, writes} != {statistics}:  # not served there
            continue
        given = arguments("*fp32", "partial_ptr label_logit_ptr label_z_ptr reference_ptr")
        given |= arguments("*fp32", "loss_ptr factor_ptr label_gradient_ptr")
        given |= arguments("*i64", "labels_ptr counts_ptr") | {"overflow_ptr": "*i32"}
        given |= arguments("*fp32", "row_scale_ptr", if_=writes)
        weights = "*bf16" if softcap else "*fp32"
        given |= arguments(weights, "class_weight_ptr", if_=class_weight)
        given |= arguments("*fp32", "entropy_ptr lse_ptr", if_=statistics)
        given |= arguments("*i1", "is_top1_ptr", if_=statistics)
        given |= arguments("i32", "start only_on_overflow rows v_tiles vocab_size")
        given |= arguments("fp32", "softcap", if_=softcap) | arguments("fp32", "logit_scale z_loss")
        given |= {"SUMS": 3 if statistics else 2, "TILE_V": kernels.TILE_V, **kernels.FINISHED}
        yield f"{softcap}{class_weight}{writes}{statistics}", given, 4


def order_tokens(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton import labels as kernels

    given = arguments("*i64", "labels_ptr rows_ptr counts_ptr") | {"means_ptr": "*fp32"}
    given |= arguments("i32", "tokens vocab_size ignore_index") | {"BLOCK": kernels.ORDER_BLOCK}
    for labels in ("*i64", "*i32", "*i16", "*i8", "*u8"):
        yield labels[1:], {"given_ptr": labels, **given}, kernels.ORDER_WARPS


def add_label_rows(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton import labels as kernels

    for dweight, rows in itertools.product(("*bf16", "*fp32"), (0, 1)):
        given = {"labels_ptr": "*i32", "order_ptr": "*i64", "label_gradients_ptr": "*fp32"}
        given |= {"x_ptr": "*bf16", "dweight_ptr": dweight, **kernels.BLOCKS}
        given |= arguments("i32", "x_stride dweight_stride tokens hidden_size")
        given |= arguments("*i64", "rows_ptr", if_=rows)
        yield f"{dweight[1:]}-{rows}", given, kernels.WARPS


def row_sums(target: GPUTarget) -> Cases:
    # softcap, class weight, label smoothing, 1 for gradients of entropy and 2 for statistics
    flags = ((0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 1, 0), (0, 0, 1, 0), (1, 0, 0, 2), (0, 0, 0, 1))
    for name, block_v, warps, dtype, each in _two_walks(target, flags):
        softcap, class_weight, smoothing, statistics = each
        given = _row_arguments(dtype, softcap, class_weight, block_v)
        given |= arguments("*fp32", "weighted_ptr weight_sum_ptr", if_=smoothing)
        given |= arguments("*fp32", "moment_ptr", if_=statistics)
        given |= arguments("*fp32", "squares_ptr z_sum_ptr top_ptr", if_=statistics == 2)
        given |= arguments("*fp32", "highest_ptr others_ptr label_distance_ptr")
        yield name, given, warps


def row_gradients(target: GPUTarget) -> Cases:
    # softcap, class weight, label smoothing, entropy
    flags = ((0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 1, 0), (0, 0, 1, 0), (1, 0, 0, 1), (0, 0, 0, 1))
    for name, block_v, warps, dtype, each in _two_walks(target, flags):
        softcap, class_weight, smoothing, entropy = each
        given = _row_arguments(dtype, softcap, class_weight, block_v)
        given |= arguments("*fp32", "smooth_ptr", if_=smoothing)
        given |= arguments("*fp32", "entropy_factor_ptr mean_distance_ptr", if_=entropy)
        given |= arguments("*fp32", "highest_ptr factor_ptr label_gradient_ptr")
        yield name, given, warps


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


def _row_arguments(dtype: str, softcap: int, class_weight: int, block_v: int) -> dict[str, object]:
    given = {"logits_ptr": dtype, "labels_ptr": "*i64", "logit_scale": "fp32", "BLOCK_V": block_v}
    given |= arguments("i32", "logits_stride vocab_size")
    given |= arguments("*fp32", "class_weight_ptr", if_=class_weight)
    return given | arguments("fp32", "softcap", if_=softcap)
