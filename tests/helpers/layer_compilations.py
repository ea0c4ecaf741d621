"""The compilations of the kernels of norms, gates and rotary embeddings: what their arguments are,
and how many warps.
"""

from collections.abc import Iterator
from typing import Any

from compile_targets import MULTIPLE, SHARED_KIB, Cases, arguments
from triton.backends.compiler import GPUTarget


def rms_norm(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton.rms_norm import tile

    for dtype, hidden_size, weight in (
        ("*bf16", 4096, "*bf16"),
        ("*bf16", 4096, "*fp32"),  # whose dtype the result has
        ("*fp16", 128, "*fp16"),
        ("*fp32", 33, None),
    ):
        blocks, warps = tile(hidden_size)
        given = {"x_ptr": dtype, "weight_ptr": weight, "y_ptr": weight or dtype}
        yield f"{dtype[1:]}-{hidden_size}-{weight}", given | _norm(hidden_size) | blocks, warps


def rms_norm_backward(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton.rms_norm import backward_tile

    for dtype, hidden_size, weight, shared_kib in (
        ("*bf16", 4096, "*bf16", 64),
        ("*bf16", 4096, "*fp32", 64),  # and dy as wide as it
        ("*bf16", 4096, "frozen", 64),
        ("*bf16", 2304, "*bf16", 64),
        ("*bf16", 2304, "*fp32", 64),
        ("*bf16", 5120, "*bf16", 64),
        ("*bf16", 640, "*bf16", 227),
        ("*bf16", 5120, "*bf16", 227),
        ("*bf16", 5120, "*fp32", 227),
        ("*bf16", 8192, "*bf16", 99),
        ("*bf16", 10240, "*bf16", 99),
        ("*fp16", 128, "*fp16", 64),
        ("*fp32", 33, None, 64),
        ("*fp32", 2304, None, 227),
        ("*fp32", 32768, "*fp32", 227),
    ):
        if shared_kib > SHARED_KIB[target]:
            continue
        dy = weight if weight == "*fp32" else dtype
        element_bytes = sum(4 if each == "*fp32" else 2 for each in (dtype, dy))
        blocks, warps = backward_tile(hidden_size, element_bytes, shared_kib * 1024)
        given = {"dy_ptr": dy, "weight_ptr": dtype if weight == "frozen" else weight}
        given |= arguments(dtype, "x_ptr dx_ptr")
        given |= arguments("*fp32", "dweight_ptr", if_=weight not in (None, "frozen"))
        name = f"{dtype[1:]}-{hidden_size}-{weight}-{shared_kib}"
        yield name, given | _norm(hidden_size) | blocks, warps


def _norm(hidden_size: int) -> dict[str, Any]:
    columns = "i32" if hidden_size % 16 else MULTIPLE
    return {"rows": "i32", "hidden_size": columns} | arguments("fp32", "eps offset")


GATED_NORMS = (  # dtype, weight's, G, whether it is silu, whether the gate is first
    ("*bf16", "*bf16", 128, True, False),
    ("*bf16", "*fp32", 128, False, False),
    ("*bf16", "*bf16", 8192, True, True),
    ("*fp16", "*fp16", 2048, True, True),
    ("*fp32", "*fp32", 33, False, False),
    ("*fp32", "*fp32", 8192, True, True),
)


def gated_norm(target: GPUTarget) -> Cases:
    for name, pointers, others, warps in _gated_norms():
        dtype, weight = pointers
        y = weight if others["GATE_FIRST"] else dtype
        strides = dict.fromkeys(("x_stride", "gate_stride"), "i32")
        tensors = {"x_ptr": dtype, "gate_ptr": dtype, "weight_ptr": weight, "y_ptr": y}
        yield name, {**tensors, "rstd_ptr": "*fp32", "eps": "fp32", **strides, **others}, warps


def gated_norm_backward(target: GPUTarget) -> Cases:
    for name, pointers, others, warps in _gated_norms():
        dtype, weight = pointers
        dy = weight if others["GATE_FIRST"] else dtype
        strides = dict.fromkeys(("dy_stride", "x_stride", "gate_stride"), "i32")
        tensors = dict.fromkeys(("x_ptr", "gate_ptr", "dx_ptr", "dgate_ptr"), dtype)
        tensors |= {"dy_ptr": dy, "weight_ptr": weight, "rstd_ptr": "*fp32"}
        for dweight in ("*fp32", None):
            arguments = {**tensors, "dweight_ptr": dweight, **strides, **others}
            yield f"{name}-{dweight}", arguments, warps


def _gated_norms() -> Iterator[tuple[str, tuple[str, str], dict[str, Any], int]]:
    from liger_patch.kernels.triton.gated_norm import tile

    for dtype, weight, group_size, is_silu, gate_first in GATED_NORMS:
        blocks, warps = tile(group_size)
        sizes = {"rows": "i32", "group_size": "i32" if group_size % 16 else MULTIPLE}
        flags = {"IS_SILU": is_silu, "GATE_FIRST": gate_first}
        name = f"{dtype[1:]}-{weight[1:]}-{group_size}-{is_silu}-{gate_first}"
        yield name, (dtype, weight), {**sizes, **flags, **blocks}, warps


def sum_parts(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton import rms_norm as kernels

    for dtype in ("*bf16", "*fp16", "*fp32"):
        sizes = {"parts": "i32", "hidden_size": "i32"}
        blocks = {"BLOCK_P": kernels.SUM_PARTS, "BLOCK_H": kernels.SUM_COLUMNS}
        given = {"parts_ptr": "*fp32", "sum_ptr": dtype, **sizes, **blocks}
        yield dtype[1:], given, kernels.SUM_WARPS


GATED = (
    ("*bf16", "silu", 0),
    ("*fp16", "gelu_tanh", 0),
    ("*fp32", "silu", 1),
    ("*bf16", "gelu_tanh", 1),
    ("*bf16", "gelu", 0),
    ("*fp32", "gelu", 1),
)


def gated(target: GPUTarget) -> Cases:
    from liger_patch.kernels.gated import ACTIVATIONS
    from liger_patch.kernels.triton import gated as kernels

    for dtype, activation, halves in GATED:
        pointers = dict.fromkeys(("gate_ptr", "up_ptr", "y_ptr"), dtype)
        if halves:
            pointers["up_ptr"] = None
        number = ACTIVATIONS.index(activation)
        others = {"columns": "i32", "ACTIVATION": number, "BLOCK": kernels.BLOCK}
        yield f"{dtype[1:]}-{activation}-{halves}", pointers | others, kernels.WARPS


def gated_backward(target: GPUTarget) -> Cases:
    from liger_patch.kernels.gated import ACTIVATIONS
    from liger_patch.kernels.triton import gated as kernels

    for dtype, activation, halves in GATED:
        number = ACTIVATIONS.index(activation)
        names = ("dy_ptr", "gate_ptr", "up_ptr", "dgate_ptr", "dup_ptr")
        pointers = dict.fromkeys(names, dtype)
        if halves:
            pointers |= {"up_ptr": None, "dup_ptr": None}
        for wants_y in (False, True):
            pointers["y_ptr"] = dtype if wants_y else None
            others = {"columns": "i32", "ACTIVATION": number, "BLOCK": kernels.BACKWARD_BLOCK}
            name = f"{dtype[1:]}-{activation}-{halves}-{wants_y}"
            yield name, pointers | others, kernels.WARPS


def rotary(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton import rotary as kernels

    cases = (
        ("*bf16", "*bf16", True, "halves", 2, 0),
        ("*bf16", "*fp32", True, "halves", 2, 0),
        ("*fp16", "*fp16", False, "halves", 1, 64),
        ("*fp32", "*fp32", True, "halves", 0, 8),
        ("*bf16", "*bf16", False, "pairs", 2, 64),
        ("*bf16", "*fp32", False, "pairs", 2, 0),
        ("*fp32", "*fp32", True, "pairs", 8, 0),
        ("*bf16", "*bf16", False, "grouped", 1, 0),
        ("*bf16", "*bf16", True, "grouped", 1, 0),
        ("*fp32", "*fp32", True, "grouped", 0, 8),
    )
    for dtype, table, backward, layout, k_heads, rest in cases:
        interleaved = layout != "halves"
        blocks, warps = kernels.tile(32, k_heads, 128 + rest, 128)
        pointers = dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), dtype)
        pointers |= dict.fromkeys(("cos_ptr", "sin_ptr"), table)
        sizes = [f"{x}_{part}_stride" for x in "qk" for part in ("batch", "head", "token")]
        sizes += [f"{x}_{part}_stride" for x in ("cos", "sin") for part in ("batch", "token")]
        sizes += ["tokens", "q_num_heads", "k_num_heads", "size", "turned"]
        # of the tables: specialised where it is 1
        strides = dict.fromkeys(("cos_stride", "sin_stride"), "i32" if interleaved else 1)
        constants = {
            "BACKWARD": backward,
            "INTERLEAVED": interleaved,
            "GROUPED": layout == "grouped",
            **blocks,
        }
        arguments = pointers | dict.fromkeys(sizes, "i32")
        name = f"{dtype[1:]}-{table[1:]}-{backward}-{layout}-{k_heads}-{rest}"
        yield name, arguments | strides | constants, warps
