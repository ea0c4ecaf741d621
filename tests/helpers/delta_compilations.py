"""The compilations of the kernels of delta rules and their convolutions: what their arguments are,
and how many warps.
"""

from typing import Any

from compile_targets import MULTIPLE, SHARED_KIB, Cases, arguments
from triton.backends.compiler import GPUTarget

from liger_patch.kernels.backend import TensorDescriptor

FORMS = (  # dtype, K and V, heads of v for one of k, are there several sequences, L2 norms
    ("*bf16", 128, 2, True, True),
    ("*fp16", 128, 1, False, True),
    ("*bf16", 16, 1, True, False),
)


def _cases(names: str, strides: str, *, block: int = 0, stages: bool = False) -> Any:
    """The cases of a kernel, with pointers of these names and strides beside the others."""

    def cases(target: GPUTarget) -> Cases:
        from liger_patch.kernels.delta_rule import CHUNK
        from liger_patch.kernels.triton import delta_rule as kernels

        forms = FORMS if TensorDescriptor is not None else ()
        for dtype, dim, group, is_packed, normalizes in forms:
            given: dict[str, Any] = arguments(dtype, names)
            given |= arguments("*fp32", "total_ptr")
            given |= arguments("*i32", "ids_ptr", if_=is_packed)
            given |= arguments(MULTIPLE, strides)
            given |= arguments("i32", "tokens heads")
            given |= {"GROUP": group, "DIM_K": dim, "DIM_V": dim, "CHUNK": CHUNK}
            given["NORMALIZE"] = normalizes
            if block:
                given["BLOCK_V"] = min(block, dim)
            if stages:
                given["STAGES"] = 2 if SHARED_KIB[target] * 1024 >= kernels.PIPELINED else 1
            yield f"{dtype[1:]}-{dim}-{group}-{is_packed}", given, kernels.WARPS

    return cases


def _with(cases: Any, warps: int | None = None, **others: Any) -> Any:
    def all_of(target: GPUTarget) -> Cases:
        for name, given, own_warps in cases(target):
            yield name, given | others, warps or own_warps

    return all_of


def prepare(target: GPUTarget) -> Cases:
    """Of the backward pass, which computes more."""
    from liger_patch.kernels.triton.delta_rule import HALF

    names = "q_ptr k_ptr v_ptr do_ptr inverse_ptr w_ptr u_ptr dnew_ptr"
    cases = _cases(names, "q_stride k_stride v_stride do_stride")
    return _with(cases, g_ptr="*fp32", beta_ptr="*bf16", scale="fp32", HALF=HALF)(target)


def states(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton.delta_rule import STATE_BLOCK

    names = "k_ptr w_ptr new_ptr states_ptr"
    cases = _cases(names, "k_stride", block=STATE_BLOCK, stages=True)
    return _with(cases, chunks="i32")(target)


def outputs(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton.delta_rule import STATE_BLOCK

    names = "q_ptr k_ptr new_ptr states_ptr o_ptr"
    return _with(_cases(names, "q_stride k_stride", block=STATE_BLOCK), scale="fp32")(target)


def state_gradients(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton.delta_rule import STATE_BLOCK

    names = "q_ptr k_ptr do_ptr w_ptr dnew_ptr dstates_ptr"
    cases = _cases(names, "q_stride k_stride do_stride", block=STATE_BLOCK, stages=True)
    return _with(cases, chunks="i32", scale="fp32")(target)


def chunk_gradients(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton.delta_rule_backward import BLOCK, GRADIENT_WARPS

    names = "q_ptr k_ptr v_ptr do_ptr inverse_ptr new_ptr dnew_ptr states_ptr dstates_ptr"
    cases = _cases(
        f"{names} dq_ptr dk_ptr dv_ptr", "q_stride k_stride v_stride do_stride", block=BLOCK
    )
    given = {"dg_ptr": "*fp32", "scale": "fp32"} | arguments("*bf16", "beta_ptr dbeta_ptr")
    return _with(cases, GRADIENT_WARPS, **given)(target)


CONVOLUTIONS = (  # dtype, whether there is a bias, several sequences, an activation
    ("*bf16", False, False, True),
    ("*bf16", True, True, True),
    ("*fp16", True, False, False),
    ("*fp32", True, True, True),
)


def _convolutions(names: str, strides: str, rows: int) -> Cases:
    from liger_patch.kernels.triton import causal_conv as kernels

    for dtype, has_bias, is_packed, is_silu in CONVOLUTIONS:
        given: dict[str, Any] = arguments(dtype, names) | arguments(MULTIPLE, strides)
        given |= arguments(dtype, "bias_ptr", if_=has_bias)
        given |= arguments("*i32", "ids_ptr", if_=is_packed)
        given |= {"tokens": "i32", "channels": MULTIPLE, "IS_SILU": is_silu, "WIDTH": 4}
        given |= {"ROWS": rows, "BLOCK_C": kernels.BLOCK_C}
        yield f"{dtype[1:]}-{has_bias}-{is_packed}-{is_silu}", given, kernels.WARPS


def causal_conv(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton.causal_conv import ROWS

    return _convolutions("x_ptr weight_ptr y_ptr", "x_batch_stride x_stride", ROWS)


def causal_conv_backward(target: GPUTarget) -> Cases:
    from liger_patch.kernels.triton.causal_conv import BACKWARD_ROWS

    strides = "dy_batch_stride dy_stride x_batch_stride x_stride"
    cases = _convolutions("dy_ptr x_ptr weight_ptr dx_ptr", strides, BACKWARD_ROWS)
    return ((name, given | {"sums_ptr": "*fp32"}, warps) for name, given, warps in cases)
