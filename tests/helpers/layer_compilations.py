"""The compilations of the layers' kernels: norms, gates, rotary embeddings, adapters, quantized
weights, experts, delta rules and their convolutions.
"""

from typing import Any

from compile_targets import DTYPES, MULTIPLE, SHARED_KIB, Case, absent, cases_of, each, rows

from liger_patch.kernels import delta_rule, mxfp4
from liger_patch.kernels.backend import TensorDescriptor
from liger_patch.kernels.triton import causal_conv as conv
from liger_patch.kernels.triton import delta_rule as delta
from liger_patch.kernels.triton import delta_rule_backward as delta_backward
from liger_patch.kernels.triton import dropout, expert_rows, experts, fp8, gated_norm, rms_norm
from liger_patch.kernels.triton import gated as gates
from liger_patch.kernels.triton import gated_lora as adapters
from liger_patch.kernels.triton import nf4 as packed
from liger_patch.kernels.triton import rotary as rotations


@cases_of("_rms_norm_kernel")
@rows(
    ("bf16", 4096, "*bf16"),
    ("bf16", 4096, "*fp32"),  # whose dtype the result has
    ("fp16", 128, "*fp16"),
    ("fp32", 33, None),
)
def rms_norm_forward(target, dtype, hidden_size, weight):
    blocks, warps = rms_norm.tile(hidden_size)
    given = {"weight_ptr": weight, "y_ptr": weight or f"*{dtype}"} | _columns(hidden_size)
    return Case(dtype, given | blocks, warps)


@cases_of("_rms_norm_backward_kernel")
@rows(
    ("bf16", 4096, "*bf16", 64),
    ("bf16", 4096, "*fp32", 64),  # and dy as wide as it
    ("bf16", 4096, "frozen", 64),
    ("bf16", 2304, "*bf16", 64),
    ("bf16", 2304, "*fp32", 64),
    ("bf16", 5120, "*bf16", 64),
    ("bf16", 640, "*bf16", 227),
    ("bf16", 5120, "*bf16", 227),
    ("bf16", 5120, "*fp32", 227),
    ("bf16", 8192, "*bf16", 99),
    ("bf16", 10240, "*bf16", 99),
    ("fp16", 128, "*fp16", 64),
    ("fp32", 33, None, 64),
    ("fp32", 2304, None, 227),
    ("fp32", 32768, "*fp32", 227),
)
def rms_norm_backward(target, dtype, hidden_size, weight, shared_kib):
    """For tiles of a GPU with so much shared memory."""
    if shared_kib > SHARED_KIB[target]:
        return None
    dy = weight if weight == "*fp32" else f"*{dtype}"
    element_bytes = sum(4 if kind == "*fp32" else 2 for kind in (f"*{dtype}", dy))
    blocks, warps = rms_norm.backward_tile(hidden_size, element_bytes, shared_kib * 1024)
    given = {"dy_ptr": dy, "weight_ptr": f"*{dtype}" if weight == "frozen" else weight}
    given |= {"dweight_ptr": None if weight in (None, "frozen") else "*fp32"}
    return Case(dtype, given | _columns(hidden_size) | blocks, warps)


def _columns(size: int, name: str = "hidden_size") -> dict[str, Any]:
    return {name: "i32" if size % 16 else MULTIPLE}


@cases_of("_gated_norm_kernel", "_gated_norm_backward_kernel")
@rows(
    ("bf16", "*bf16", 128, True, False),
    ("bf16", "*fp32", 128, False, False),
    ("bf16", "*bf16", 8192, True, True),
    ("fp16", "*fp16", 2048, True, True),
    ("fp32", "*fp32", 33, False, False),
    ("fp32", "*fp32", 8192, True, True),
    last=("*fp32", None),
)
def gated_norms(target, dtype, weight, group_size, is_silu, gate_first, dweight):
    blocks, warps = gated_norm.tile(group_size)
    given = {"weight_ptr": weight, "dweight_ptr": dweight} | _columns(group_size, "group_size")
    given |= each("y_ptr dy_ptr", weight if gate_first else f"*{dtype}")
    return Case(dtype, given | {"IS_SILU": is_silu, "GATE_FIRST": gate_first, **blocks}, warps)


@cases_of("_sum_parts_kernel")
@rows(*zip(DTYPES))
def sum_parts(target, dtype):
    blocks = {"BLOCK_P": rms_norm.SUM_PARTS, "BLOCK_H": rms_norm.SUM_COLUMNS}
    return Case(dtype, blocks, rms_norm.SUM_WARPS)


GATED = (  # dtype, activation, whether up is the second half of gate
    ("bf16", "silu", 0),
    ("fp16", "gelu_tanh", 0),
    ("fp32", "silu", 1),
    ("bf16", "gelu_tanh", 1),
    ("bf16", "gelu", 0),
    ("fp32", "gelu", 1),
)


@cases_of("_gated_kernel")
@rows(*GATED)
def gated(target, dtype, activation, halves):
    given = {"ACTIVATION": gates.KINDS.index(activation)} | absent("up_ptr", unless=not halves)
    return Case(dtype, given, gates.WARPS)


@cases_of("_gated_backward_kernel")
@rows(*GATED, last=(False, True))
def gated_backward(target, dtype, activation, halves, wants_y):
    given = {"ACTIVATION": gates.KINDS.index(activation), "BLOCK": gates.BACKWARD_BLOCK}
    given |= absent("up_ptr dup_ptr", unless=not halves) | absent("y_ptr", unless=wants_y)
    return Case(dtype, given, gates.WARPS)


@cases_of("_rotary_kernel")
@rows(
    ("bf16", "bf16", True, "halves", 2, 0),
    ("bf16", "fp32", True, "halves", 2, 0),
    ("fp16", "fp16", False, "halves", 1, 64),
    ("fp32", "fp32", True, "halves", 0, 8),
    ("bf16", "bf16", False, "pairs", 2, 64),
    ("bf16", "fp32", False, "pairs", 2, 0),
    ("fp32", "fp32", True, "pairs", 8, 0),
    ("bf16", "bf16", False, "grouped", 1, 0),
    ("bf16", "bf16", True, "grouped", 1, 0),
    ("fp32", "fp32", True, "grouped", 0, 8),
)
def rotary(target, dtype, table, backward, layout, k_heads, rest):
    blocks, warps = rotations.tile(32, k_heads, 128 + rest, 128)
    given = each("cos_ptr sin_ptr", f"*{table}") | blocks
    # strides of the tables: specialised where they are 1
    given |= each("cos_stride sin_stride", 1 if layout == "halves" else "i32")
    given |= {"INTERLEAVED": layout != "halves", "GROUPED": layout == "grouped"}
    return Case(dtype, given | {"BACKWARD": backward}, warps)


@cases_of("_gated_lora_kernel", "_gated_lora_backward_kernel")
@rows(
    ("bf16", 16, "silu", False),
    ("bf16", 32, "gelu_tanh", True),
    ("bf16", 64, "silu", True),
    ("fp16", 16, "gelu_tanh", False),
    ("bf16", 16, "gelu", False),
    last=(False, True),
)
def gated_lora(target, dtype, rank, activation, has_dropout, is_tiled):
    """Of pointers, and of tiles through the tensor memory accelerator where there is one."""
    has_tiles = target.backend == "cuda" and target.arch >= 90 and TensorDescriptor is not None
    if is_tiled and not has_tiles:
        return None
    is_large = rank >= adapters.LARGE_RANK
    block_i = adapters.BLOCK_I_OF_LARGE_RANK if is_large else adapters.BLOCK_I
    tile = f"tensordesc<{dtype}[{adapters.BLOCK_N},{block_i}]>" if is_tiled else f"*{dtype}"
    given = {"ACTIVATION": adapters.KINDS.index(activation), "HAS_DROPOUT": has_dropout}
    given |= {"IS_TILED": is_tiled, "RANK": rank, "BLOCK_I": block_i}
    given |= {"STAGES": adapters.TILED_STAGES if is_tiled else adapters.STAGES}
    return Case(dtype, given | each("da gate up a_out dup_out", tile), adapters.WARPS)


@cases_of("_dropped_product_kernel", "_dropped_gradients_kernel")
@rows(
    ("bf16", 16, "*bf16"),
    ("bf16", 32, "*fp32"),
    ("bf16", 64, "*fp32"),
    ("bf16", 64, None),
    ("fp16", 32, "*fp16"),
)
def dropped(target, dtype, rank, dx):
    return Case(dtype, {"RANK": rank, "dx_ptr": dx}, dropout.WARPS)


@cases_of("_nf4_kernel")
@rows(
    ("bf16", 64, MULTIPLE, 256),
    ("bf16", 64, MULTIPLE, 0),
    ("bf16", 4096, MULTIPLE, 256),
    ("bf16", 64, "i64", 256),
    ("bf16", 32, "i32", 256),
    ("fp16", 64, MULTIPLE, 256),
    ("fp32", 64, MULTIPLE, 256),
    ("fp32", 128, "i32", 0),
    ("bf16", mxfp4.BLOCK, MULTIPLE, mxfp4.ALL_BLOCKS),
)
def nf4(target, dtype, blocksize, place, nested):
    warps = packed.TILE // 8 // target.warp_size if target.backend == "cuda" else 4
    width = min(blocksize, packed.TILE)
    given = {"BLOCKSIZE": blocksize, "NESTED_BLOCKSIZE": nested or 1, "WIDTH": width}
    given |= {"ROWS": packed.TILE // width, "packed_ptr": "*u8", **each("numbers", place)}
    given |= {"scales_ptr": "*u8" if nested else "*fp32"}
    given |= absent("nested_code_ptr nested_scales_ptr offset_ptr", unless=nested)
    return Case(dtype, given, warps)


@cases_of("_quantize_rows_kernel")
@rows(("bf16", 1, False), ("bf16", 2, True), ("bf16", 4, True), ("fp32", 1, False))
def quantize_rows(target, dtype, number, folded):
    """Of GPUs that have e4m3."""
    if target.backend != "cuda" or target.arch < 89:
        return None
    block = fp8.WIDE_BLOCK if number > 1 else fp8.BLOCK
    given: dict[str, Any] = {"out_ptr": "*fp8e4nv", "BLOCK": block}
    for i, name in enumerate(("first", "second", "third", "fourth")):
        given |= each(f"{name}_stride {name}_columns", MULTIPLE)
        given |= absent(f"{name}_ptr", unless=i < number)
        given |= {f"{name}_factors_ptr": "*fp32" if i < number and folded else None}
    return Case(dtype, given, block // fp8.WARP_COLUMNS)


@cases_of("_transpose_kernel")
@rows((MULTIPLE,), ("i32",))
def transpose(target, size):
    given = each("out_words words out_stride", size) | {"TILE_WORDS": fp8.TILE // 4}
    return Case("i32", given, fp8.TILE_WARPS)


@cases_of("_experts_gated_kernel", "_experts_gated_backward_kernel")
@rows(
    ("bf16", "silu", False, False, 16, 16, 128),
    ("bf16", "clamped", True, True, 64, 64, 32),
    ("bf16", "clamped", False, True, 0, 0, 256),
    ("bf16", "gelu_tanh", False, False, 0, 32, 8),
    ("fp16", "gelu", False, False, 32, 0, 64),
)
def experts_gated(target, dtype, activation, is_interleaved, has_bias, rank, down_rank, number):
    of_down = "ddown_thin_ptr a_ptr down_thin_ptr weighted_ptr"
    given = {"STEP": 2, "up_column": 1} if is_interleaved else {"STEP": 1}
    given |= {"ACTIVATION": experts.KINDS.index(activation), "EXPERTS": number}
    given |= {"RANK": rank or 16, "DOWN_RANK": down_rank or 16}
    given |= {"weighted_ptr": f"*{dtype}"} | absent("bias_ptr", unless=has_bias)
    given |= absent("thin_ptr b_ptr dthin_ptr", unless=rank) | absent(of_down, unless=down_rank)
    return Case(dtype, given, expert_rows.WARPS)


@cases_of("_add_thin_kernel")
@rows(
    ("bf16", 16, False, 128),
    ("bf16", 64, True, 256),  # A of the first product, in the backward pass
    ("fp16", 32, False, 8),
)
def add_thin(target, dtype, rank, is_a, number):
    given = {"RANK": rank, "EXPERTS": number, "b_stride" if is_a else "b_rank_stride": 1}
    return Case(dtype, given, expert_rows.WARPS)


@cases_of("_gather_kernel")
@rows(
    ("bf16", 16, False, 128),
    ("bf16", 64, True, 256),  # B of the second product, in the backward pass
    ("bf16", 0, False, 32),
    ("fp16", 32, False, 8),
)
def gather(target, dtype, rank, is_b, number):
    given: dict[str, Any] = {"SLOTS": 8, "RANK": rank or 16, "EXPERTS": number}
    given |= {"BLOCK_H": expert_rows.GATHER_BLOCK, "features": MULTIPLE, "rows_ptr": f"*{dtype}"}
    if rank:
        given["a_rank_stride" if is_b else "a_stride"] = 1
    else:
        given |= absent("a_ptr thin_ptr") | each("a_expert_stride a_rank_stride a_stride", 0)
    return Case(dtype, given, expert_rows.WARPS)


@cases_of("_count_slots_kernel", "_order_slots_kernel")
@rows((8,), (128,), (512,))
def count_slots(target, number):
    return Case("", {"counts_ptr": "*i32", "EXPERTS": number}, expert_rows.ORDER_WARPS)


@cases_of("_sum_slots_kernel")
@rows(
    ("bf16", "*bf16", True, 4),
    ("bf16", "*fp32", False, 8),
    ("bf16", None, False, 8),  # of the gradient of x
    ("fp32", "*fp32", True, 2),
    ("fp16", "*fp16", False, 1),
)
def sum_slots(target, dtype, weights, has_bias, slots):
    given = {"weights_ptr": weights, "SLOTS": slots, "BLOCK_H": expert_rows.SUM_BLOCK}
    given |= absent("bias_ptr index_ptr", unless=has_bias)
    return Case(dtype, given, expert_rows.WARPS)


DELTA = (  # dtype, K and V, heads of v for one of k, several sequences, L2 norms
    ("bf16", 128, 2, True, True),
    ("fp16", 128, 1, False, True),
    ("bf16", 16, 1, True, False),
)


@cases_of("_prepare_kernel", "_states_kernel", "_outputs_kernel", "_state_gradients_kernel")
@rows(*DELTA)
def delta_states(target, *row):
    """``_prepare_kernel`` as in the backward pass, which computes more."""
    is_pipelined = SHARED_KIB[target] * 1024 >= delta.PIPELINED
    return _delta(*row, delta.STATE_BLOCK, delta.WARPS, STAGES=2 if is_pipelined else 1)


@cases_of("_chunk_gradients_kernel")
@rows(*DELTA)
def chunk_gradients(target, *row):
    return _delta(*row, delta_backward.BLOCK, delta_backward.GRADIENT_WARPS)


def _delta(dtype, dim, group, is_packed, normalizes, block, warps, **others):
    given = each("q_stride k_stride v_stride do_stride", MULTIPLE)
    given |= absent("ids_ptr", unless=is_packed)
    given |= {"GROUP": group, "DIM_K": dim, "DIM_V": dim, "NORMALIZE": normalizes}
    given |= {"CHUNK": delta_rule.CHUNK, "BLOCK_V": min(block, dim)}
    return Case(dtype, given | others, warps) if TensorDescriptor is not None else None


@cases_of("_causal_conv_kernel")
@rows(
    ("bf16", False, False, True),
    ("bf16", True, True, True),
    ("fp16", True, False, False),
    ("fp32", True, True, True),
)
def causal_conv(target, dtype, has_bias, is_packed, is_silu):
    given = each("x_batch_stride x_stride channels", MULTIPLE) | {"IS_SILU": is_silu, "WIDTH": 4}
    given |= absent("bias_ptr", unless=has_bias) | absent("ids_ptr", unless=is_packed)
    return Case(dtype, given, conv.WARPS)


@cases_of("_causal_conv_backward_kernel")
def causal_conv_backward(target):
    more = {"ROWS": conv.BACKWARD_ROWS} | each("dy_batch_stride dy_stride", MULTIPLE)
    return [case._replace(given=case.given | more) for case in causal_conv(target)]
