"""The compilations of the kernels of experts: their arguments, and how many warps."""

from typing import Any

from compile_targets import MULTIPLE, Cases, arguments
from triton.backends.compiler import GPUTarget

EXPERTS = (  # dtype, activation, whether it is interleaved, has biases, rank, that of down, experts
    ("*bf16", "silu", False, False, 16, 16, 128),
    ("*bf16", "clamped", True, True, 64, 64, 32),
    ("*bf16", "clamped", False, True, 0, 0, 256),
    ("*bf16", "gelu_tanh", False, False, 0, 32, 8),
    ("*fp16", "gelu", False, False, 32, 0, 64),
)


def gated(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton import expert_rows as kernels

    for dtype, activation, is_interleaved, has_bias, rank, down_rank, experts in EXPERTS:
        yield (
            _name(dtype, activation, rank, experts),
            {
                **_gated(dtype, activation, is_interleaved, has_bias, rank, experts),
                **arguments(dtype, "a_ptr down_thin_ptr", if_=down_rank),
                "h_ptr": dtype,
                "DOWN_RANK": down_rank or 16,
            },
            kernels.WARPS,
        )


def gated_backward(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton import expert_rows as kernels

    for dtype, activation, is_interleaved, has_bias, rank, down_rank, experts in EXPERTS:
        yield (
            _name(dtype, activation, rank, experts),
            {
                **_gated(dtype, activation, is_interleaved, has_bias, rank, experts),
                **arguments(dtype, "dh_ptr dgate_up_ptr weights_ptr"),
                **arguments(dtype, "dthin_ptr", if_=rank),
                **arguments(
                    dtype, "ddown_thin_ptr a_ptr down_thin_ptr weighted_ptr", if_=down_rank
                ),
                "dweights_ptr": dtype,
                "slots_ptr": "*i32",
                "DOWN_RANK": down_rank or 16,
            },
            kernels.WARPS,
        )


def _name(dtype: str, activation: str, rank: int, experts: int) -> str:
    return f"{dtype[1:]}-{activation}-{rank}-{experts}"


def _gated(
    dtype: str, activation: str, is_interleaved: bool, has_bias: bool, rank: int, experts: int
) -> dict[str, Any]:
    from liger_patch.kernels.triton import experts as kernels

    return {
        "gate_up_ptr": dtype,
        **arguments(dtype, "bias_ptr", if_=has_bias),
        **arguments(dtype, "thin_ptr b_ptr", if_=rank),
        **arguments("i32", "columns"),
        "up_column": 1 if is_interleaved else "i32",
        **arguments("fp32", "alpha limit shift"),
        "STEP": 2 if is_interleaved else 1,
        "ACTIVATION": kernels.KINDS.index(activation),
        "RANK": rank or 16,
        "BLOCK_I": kernels.BLOCK_I,
        **_tiles(experts),
    }


def _tiles(experts: int) -> dict[str, Any]:
    """What tells a program its rows."""
    from liger_patch.kernels.triton import expert_rows as kernels

    offsets = {"offsets_ptr": "*i32", "experts": "i32"}
    return {**offsets, "EXPERTS": experts, "BLOCK_S": kernels.BLOCK_S}


def add_thin(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton import expert_rows as kernels

    for dtype, rank, is_a, experts in (
        ("*bf16", 16, False, 128),
        ("*bf16", 64, True, 256),  # A of the first product, in the backward pass
        ("*fp16", 32, False, 8),
    ):
        strides = {"b_expert_stride": "i32", "b_stride": "i32", "b_rank_stride": "i32"}
        strides["b_stride" if is_a else "b_rank_stride"] = 1  # type: ignore[assignment]
        yield (
            f"{dtype[1:]}-{rank}-{experts}",
            {
                **arguments(dtype, "y_ptr thin_ptr b_ptr"),
                **strides,
                "features": "i32",
                "RANK": rank,
                "BLOCK_H": kernels.BLOCK_H,
                **_tiles(experts),
            },
            kernels.WARPS,
        )


def gather(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton import expert_rows as kernels

    for dtype, rank, is_b, experts in (
        ("*bf16", 16, False, 128),
        ("*bf16", 64, True, 256),  # B of the second product, in the backward pass
        ("*bf16", 0, False, 32),
        ("*fp16", 32, False, 8),
    ):
        strides = {f"a_{name}stride": "i32" if rank else 0 for name in ("expert_", "rank_", "")}
        if rank:
            strides["a_rank_stride" if is_b else "a_stride"] = 1
        yield (
            f"{dtype[1:]}-{rank}-{experts}",
            {
                **arguments(dtype, "x_ptr rows_ptr"),
                **arguments(dtype, "a_ptr thin_ptr", if_=rank),
                **strides,
                "slots_ptr": "*i32",
                "features": MULTIPLE,
                "SLOTS": 8,
                "RANK": rank or 16,
                "BLOCK_H": kernels.GATHER_BLOCK,
                **_tiles(experts),
            },
            kernels.WARPS,
        )


def count_slots(target: GPUTarget) -> Cases:
    yield from _order("counts_ptr", "slots steps")


def order_slots(target: GPUTarget) -> Cases:
    pointers = "counts_ptr offsets_ptr slots_ptr places_ptr"
    yield from _order(pointers, "slots experts steps blocks")


def _order(pointers: str, sizes: str) -> Cases:
    from liger_patch.kernels.triton import expert_rows as kernels

    for experts in (8, 128, 512):
        constants = {"EXPERTS": experts, "STEP": kernels.STEP}
        given = {"index_ptr": "*i64", **arguments("*i32", pointers), **arguments("i32", sizes)}
        yield str(experts), given | constants, kernels.ORDER_WARPS


def sum_slots(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton import expert_rows as kernels

    for dtype, weights, has_bias, slots in (
        ("*bf16", "*bf16", True, 4),
        ("*bf16", "*fp32", False, 8),
        ("*bf16", None, False, 8),  # of the gradient of x
        ("*fp32", "*fp32", True, 2),
        ("*fp16", "*fp16", False, 1),
    ):
        yield (
            f"{dtype[1:]}-{weights}-{has_bias}-{slots}",
            {
                **arguments(dtype, "y_ptr out_ptr"),
                **arguments(dtype, "bias_ptr", if_=has_bias),
                **arguments("*i64", "index_ptr", if_=has_bias),
                "place_ptr": "*i32",
                "weights_ptr": weights,
                "features": "i32",
                "SLOTS": slots,
                "BLOCK_H": kernels.SUM_BLOCK,
            },
            kernels.WARPS,
        )
