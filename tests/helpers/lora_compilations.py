"""The compilations of the kernels of LoRA and QLoRA: their arguments, and how many warps."""

import itertools
from collections.abc import Iterator
from typing import Any

from compile_targets import MULTIPLE
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
) -> Iterator[tuple[str, dict[str, Any], int]]:
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


def gated_lora(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    thin = dict.fromkeys(("s_ptr", "gate_b_ptr", "up_b_ptr", "down_a_ptr"), "")
    others = {**thin, "parts_ptr": "*fp32"}
    return _gated_lora(target, ("gate", "up", "a_out"), others, "PROGRAM_COLUMNS")


def gated_lora_backward(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    thin = ("s_ptr", "ds_down_ptr", "gate_b_ptr", "up_b_ptr", "down_a_ptr")
    others = {**dict.fromkeys(thin, ""), "sums_ptr": "*fp32"}
    return _gated_lora(target, ("da", "gate", "up", "dup_out"), others, "PROGRAM_ROWS")


def dropped_product(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.triton import dropout as kernels

    for dtype, rank in (("*bf16", 16), ("*bf16", 32), ("*bf16", 64), ("*fp16", 32)):
        yield (
            f"{dtype[1:]}-{rank}",
            {
                **dict.fromkeys(("x_ptr", "a_ptr", "s_ptr"), dtype),
                **dict.fromkeys(("rows", "columns", "rank", "s_stride", "seed"), "i32"),
                "dropout": "fp32",
                "RANK": rank,
                "BLOCK_N": kernels.BLOCK_N,
                "BLOCK_H": kernels.BLOCK_H,
            },
            kernels.WARPS,
        )


def dropped_gradients(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.triton import dropout as kernels

    for dtype, rank, dx in (
        ("*bf16", 16, "*bf16"),
        ("*bf16", 32, "*fp32"),
        ("*bf16", 64, "*fp32"),
        ("*bf16", 64, None),
        ("*fp16", 32, "*fp16"),
    ):
        yield (
            f"{dtype[1:]}-{rank}-{dx}",
            {
                **dict.fromkeys(("x_ptr", "a_ptr", "ds_ptr"), dtype),
                "dx_ptr": dx,
                "sums_ptr": "*fp32",
                **dict.fromkeys(("rows", "columns", "rank", "ds_stride", "seed"), "i32"),
                "dropout": "fp32",
                "RANK": rank,
                "BLOCK_N": kernels.BLOCK_N,
                "BLOCK_H": kernels.BLOCK_H,
                "PROGRAM_ROWS": kernels.PROGRAM_ROWS,
            },
            kernels.WARPS,
        )


def nf4(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.triton.nf4 import TILE

    warps = TILE // 8 // target.warp_size if target.backend == "cuda" else 4
    for out, blocksize, place, nested in (
        ("*bf16", 64, MULTIPLE, 1),
        ("*bf16", 64, MULTIPLE, 0),
        ("*bf16", 4096, MULTIPLE, 1),
        ("*bf16", 64, "i64", 1),
        ("*bf16", 32, "i32", 1),
        ("*fp16", 64, MULTIPLE, 1),
        ("*fp32", 64, MULTIPLE, 1),
        ("*fp32", 128, "i32", 0),
    ):
        width = min(blocksize, TILE)
        yield (
            f"{out[1:]}-{blocksize}-{place[:3]}-{'nested' if nested else 'plain'}",
            {
                "packed_ptr": "*u8",
                "code_ptr": "*fp32",
                "scales_ptr": "*u8" if nested else "*fp32",
                "nested_code_ptr": "*fp32" if nested else None,
                "nested_scales_ptr": "*fp32" if nested else None,
                "offset_ptr": "*fp32" if nested else None,
                "out_ptr": out,
                "start": place,
                "stop": place,
                "BLOCKSIZE": blocksize,
                "NESTED_BLOCKSIZE": 256 if nested else 1,
                "ROWS": TILE // width,
                "WIDTH": width,
            },
            warps,
        )
