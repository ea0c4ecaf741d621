"""The compilations of the layers' kernels: what their arguments are, and how many warps."""

from collections.abc import Iterator
from typing import Any

from compile_targets import MULTIPLE
from triton.backends.compiler import GPUTarget


def rms_norm(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.rms_norm_triton import tile

    for dtype, hidden_size, has_weight in (("*bf16", 4096, 1), ("*fp16", 128, 1), ("*fp32", 33, 0)):
        blocks, warps = tile(hidden_size)
        yield (
            f"{dtype[1:]}-{hidden_size}-{has_weight}",
            {
                "x_ptr": dtype,
                "weight_ptr": dtype if has_weight else None,
                "y_ptr": dtype,
                "rstd_ptr": "*fp32",
                "rows": "i32",
                "hidden_size": "i32" if hidden_size % 16 else MULTIPLE,
                "eps": "fp32",
                "offset": "fp32",
                **blocks,
            },
            warps,
        )


def rms_norm_backward(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.rms_norm_triton import backward_tile

    for dtype, hidden_size, has_weight, shared_kib in (
        ("*bf16", 4096, 1, 64),
        ("*bf16", 2304, 1, 64),
        ("*bf16", 5120, 1, 64),
        ("*bf16", 640, 1, 227),
        ("*bf16", 5120, 1, 227),
        ("*bf16", 8192, 1, 99),
        ("*bf16", 10240, 1, 99),
        ("*fp16", 128, 1, 64),
        ("*fp32", 33, 0, 64),
        ("*fp32", 2304, 0, 227),
        ("*fp32", 32768, 1, 227),
    ):
        if target.backend == "hip" and shared_kib > 64:
            continue  # gfx942 has 64
        element_bytes = 8 if dtype == "*fp32" else 4
        blocks, warps = backward_tile(hidden_size, element_bytes, shared_kib * 1024)
        yield (
            f"{dtype[1:]}-{hidden_size}-{has_weight}-{shared_kib}",
            {
                "dy_ptr": dtype,
                "x_ptr": dtype,
                "weight_ptr": dtype if has_weight else None,
                "rstd_ptr": "*fp32",
                "dx_ptr": dtype,
                "dweight_ptr": "*fp32" if has_weight else None,
                "rows": "i32",
                "hidden_size": "i32" if hidden_size % 16 else MULTIPLE,
                "offset": "fp32",
                **blocks,
            },
            warps,
        )


def sum_parts(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels import rms_norm_triton as kernels

    for dtype in ("*bf16", "*fp16", "*fp32"):
        sizes = {"parts": "i32", "hidden_size": "i32"}
        blocks = {"BLOCK_P": kernels.SUM_PARTS, "BLOCK_H": kernels.SUM_COLUMNS}
        yield (
            dtype[1:],
            {"parts_ptr": "*fp32", "sum_ptr": dtype, **sizes, **blocks},
            kernels.SUM_WARPS,
        )


GATED = (("*bf16", True, 0), ("*fp16", False, 0), ("*fp32", True, 1), ("*bf16", False, 1))


def gated(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels import gated_triton as kernels

    for dtype, is_silu, halves in GATED:
        pointers = dict.fromkeys(("gate_ptr", "up_ptr", "y_ptr"), dtype)
        if halves:
            pointers["up_ptr"] = None
        others = {"columns": "i32", "IS_SILU": is_silu, "BLOCK": kernels.BLOCK}
        yield f"{dtype[1:]}-{is_silu}-{halves}", pointers | others, kernels.WARPS


def gated_backward(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels import gated_triton as kernels

    for dtype, is_silu, halves in GATED:
        names = ("dy_ptr", "gate_ptr", "up_ptr", "dgate_ptr", "dup_ptr")
        pointers = dict.fromkeys(names, dtype)
        if halves:
            pointers |= {"up_ptr": None, "dup_ptr": None}
        for wants_y in (False, True):
            pointers["y_ptr"] = dtype if wants_y else None
            others = {"columns": "i32", "IS_SILU": is_silu, "BLOCK": kernels.BACKWARD_BLOCK}
            name = f"{dtype[1:]}-{is_silu}-{halves}-{wants_y}"
            yield name, pointers | others, kernels.WARPS


def rotary(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels import rotary_triton as kernels

    cases = (
        ("*bf16", True, False, 2, 0),
        ("*fp16", False, False, 1, 64),
        ("*fp32", True, False, 0, 8),
        ("*bf16", False, True, 2, 64),
        ("*fp32", True, True, 8, 0),
    )
    for dtype, backward, interleaved, k_heads, rest in cases:
        blocks, warps = kernels.tile(32, k_heads, 128 + rest, 128)
        pointers = ("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr", "cos_ptr", "sin_ptr")
        sizes = [f"{x}_{part}_stride" for x in "qk" for part in ("batch", "head", "token")]
        sizes += [f"{x}_{part}_stride" for x in ("cos", "sin") for part in ("batch", "token")]
        sizes += ["tokens", "q_heads", "k_heads", "size", "turned"]
        # of the tables: specialised where it is 1
        strides = dict.fromkeys(("cos_stride", "sin_stride"), "i32" if interleaved else 1)
        constants = {
            "BACKWARD": backward,
            "INTERLEAVED": interleaved,
            **blocks,
        }
        arguments = dict.fromkeys(pointers, dtype) | dict.fromkeys(sizes, "i32")
        name = f"{dtype[1:]}-{backward}-{interleaved}-{k_heads}-{rest}"
        yield name, arguments | strides | constants, warps
