"""The compilations of the kernels of LoRA and QLoRA: their arguments, and how many warps."""

import itertools
from typing import Any

from compile_targets import MULTIPLE, Cases, arguments
from triton.backends.compiler import GPUTarget

GATED_LORA = (  # dtype, rank, activation, whether features are dropped
    ("bf16", 16, "silu", False),
    ("bf16", 32, "gelu_tanh", True),
    ("bf16", 64, "silu", True),
    ("fp16", 16, "gelu_tanh", False),
    ("bf16", 16, "gelu", False),
)


def _gated_lora(
    target: GPUTarget, matrices: tuple[str, ...], others: dict[str, str], program: str
) -> Cases:
    """Of pointers, and of tiles through the tensor memory accelerator where there is one."""
    from liger_patch.kernels.gated import ACTIVATIONS
    from liger_patch.kernels.triton import gated_lora as kernels

    has_tiles = target.backend == "cuda" and target.arch >= 90 and kernels.TensorDescriptor
    forms = (False, True) if has_tiles else (False,)
    for (dtype, rank, activation, has_dropout), is_tiled in itertools.product(GATED_LORA, forms):
        is_large = rank >= kernels.LARGE_RANK
        block_i = kernels.BLOCK_I_OF_LARGE_RANK if is_large else kernels.BLOCK_I
        tile = f"tensordesc<{dtype}[{kernels.BLOCK_N},{block_i}]>" if is_tiled else f"*{dtype}"
        sizes = ("rows", "columns", "gate_rank", "up_rank", "down_rank", "seed")
        numbers = ("gate_scaling", "up_scaling", "dropout")
        pointers = {name: kind or f"*{dtype}" for name, kind in others.items()}
        yield (
            f"{dtype}-{rank}-{activation}-{has_dropout}-{is_tiled}",
            {
                **dict.fromkeys(matrices, tile),
                **pointers,
                **dict.fromkeys(sizes, "i32"),
                **dict.fromkeys(numbers, "fp32"),
                "ACTIVATION": ACTIVATIONS.index(activation),
                "HAS_DROPOUT": has_dropout,
                "IS_TILED": is_tiled,
                "RANK": rank,
                "BLOCK_N": kernels.BLOCK_N,
                "BLOCK_I": block_i,
                program: getattr(kernels, program),
                "STAGES": kernels.TILED_STAGES if is_tiled else kernels.STAGES,
            },
            kernels.WARPS,
        )


def gated_lora(target: GPUTarget) -> Cases:
    thin = dict.fromkeys(("s_ptr", "gate_b_ptr", "up_b_ptr", "down_a_ptr"), "")
    others = {**thin, "parts_ptr": "*fp32"}
    return _gated_lora(target, ("gate", "up", "a_out"), others, "PROGRAM_COLUMNS")


def gated_lora_backward(target: GPUTarget) -> Cases:
    thin = ("s_ptr", "ds_down_ptr", "gate_b_ptr", "up_b_ptr", "down_a_ptr")
    others = {**dict.fromkeys(thin, ""), "sums_ptr": "*fp32"}
    return _gated_lora(target, ("da", "gate", "up", "dup_out"), others, "PROGRAM_ROWS")


def dropped_product(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton import dropout as kernels

    for dtype, rank in (("*bf16", 16), ("*bf16", 32), ("*bf16", 64), ("*fp16", 32)):
        given = arguments(dtype, "x_ptr a_ptr s_ptr") | {"s_stride": "i32"}
        yield f"{dtype[1:]}-{rank}", given | _dropped(rank), kernels.WARPS


def dropped_gradients(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton import dropout as kernels

    for dtype, rank, dx in (
        ("*bf16", 16, "*bf16"),
        ("*bf16", 32, "*fp32"),
        ("*bf16", 64, "*fp32"),
        ("*bf16", 64, None),
        ("*fp16", 32, "*fp16"),
    ):
        given = arguments(dtype, "x_ptr a_ptr ds_ptr") | {"dx_ptr": dx, "sums_ptr": "*fp32"}
        given |= {"ds_stride": "i32", "PROGRAM_ROWS": kernels.PROGRAM_ROWS}
        yield f"{dtype[1:]}-{rank}-{dx}", given | _dropped(rank), kernels.WARPS


def _dropped(rank: int) -> dict[str, Any]:
    from liger_patch.kernels.triton import dropout as kernels

    sizes = arguments("i32", "rows columns rank seed") | {"dropout": "fp32", "RANK": rank}
    return sizes | {"BLOCK_N": kernels.BLOCK_N, "BLOCK_H": kernels.BLOCK_H}


def nf4(target: GPUTarget) -> Cases:
    from liger_patch.kernels import mxfp4
    from liger_patch.kernels.triton.nf4 import TILE

    warps = TILE // 8 // target.warp_size if target.backend == "cuda" else 4
    for out, blocksize, place, nested in (
        ("*bf16", 64, MULTIPLE, 256),
        ("*bf16", 64, MULTIPLE, 0),
        ("*bf16", 4096, MULTIPLE, 256),
        ("*bf16", 64, "i64", 256),
        ("*bf16", 32, "i32", 256),
        ("*fp16", 64, MULTIPLE, 256),
        ("*fp32", 64, MULTIPLE, 256),
        ("*fp32", 128, "i32", 0),
        ("*bf16", mxfp4.BLOCK, MULTIPLE, mxfp4.ALL_BLOCKS),
    ):
        width = min(blocksize, TILE)
        given = {"packed_ptr": "*u8", "code_ptr": "*fp32", "out_ptr": out}
        given |= {"scales_ptr": "*u8" if nested else "*fp32"} | arguments(place, "start stop")
        given |= arguments("*fp32", "nested_code_ptr nested_scales_ptr offset_ptr", if_=nested)
        given |= {"BLOCKSIZE": blocksize, "NESTED_BLOCKSIZE": nested or 1}
        given |= {"ROWS": TILE // width, "WIDTH": width}
        name = f"{out[1:]}-{blocksize}-{place[:3]}-{nested or 'plain'}"
        yield name, given, warps


def quantize_rows(target: GPUTarget) -> Cases:
    """Of GPUs that have e4m3."""
    from liger_patch.kernels.triton import fp8 as kernels

    if target.backend != "cuda" or target.arch < 89:
        return
    names = ("first", "second", "third", "fourth")
    for dtype, number, folded in (
        ("*bf16", 1, False),
        ("*bf16", 2, True),
        ("*bf16", 4, True),
        ("*fp32", 1, False),
    ):
        block = kernels.WIDE_BLOCK if number > 1 else kernels.BLOCK
        given = {"out_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "BLOCK": block}
        for i, name in enumerate(names):
            is_there = i < number
            given |= arguments(dtype, f"{name}_ptr", if_=is_there)
            given |= arguments("*fp32", f"{name}_factors_ptr", if_=is_there and folded)
            given |= arguments(MULTIPLE, f"{name}_stride {name}_columns")
        yield f"{dtype[1:]}-{number}-{folded}", given, block // kernels.WARP_COLUMNS


def transpose(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton import fp8 as kernels

    for size in (MULTIPLE, "i32"):
        given = arguments("*i32", "words_ptr out_ptr")
        given |= arguments(size, "out_words words out_stride")
        yield size[:3] + size[-2:], given | {"TILE_WORDS": kernels.TILE // 4}, kernels.TILE_WARPS
