"""Every Triton kernel is compiled to machine code ahead of time, which needs no GPU.

The cases are in loss_compilations and layer_compilations. A quick run compiles the most demanding
case of each kernel for one target, `make test-all` all cases for all targets. A kernel without
cases fails `test_every_kernel_is_in_the_matrix`.
"""

import importlib
import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_forms import INTERPRETED

import liger_patch

pytest.importorskip("triton")

import layer_compilations  # noqa: F401 - its kernels' cases are in CASES
import loss_compilations  # noqa: F401
from compile_targets import (
    CASES,
    FULL,
    MULTIPLE,
    SHARED_KIB,
    TARGETS,
    Compilation,
    compilations,
    spilled_bytes,
)
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from liger_patch.kernels.backend import TensorDescriptor

pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 replaces the compiler")

IS_TRITON_3_2 = "constexprs" not in inspect.signature(ASTSource).parameters
FOLDER = Path(liger_patch.__file__).parent / "kernels" / "triton"
SPILLED_BYTES = 64  # of a thread that are allowed: more is a tile that is too large
SPILLED_BYTES_OF = {
    # sums over rows are in registers. On an H200, smaller tiles that spill less took longer
    "_dropped_gradients_kernel": 1024,
    "_dropped_product_kernel": 1024,
    # sums of 64 rows of q, k and w at once: on sm_80 with Triton 3.9, 7296 with 3.7; on sm_90 80
    "_chunk_gradients_kernel": 11016,
    # gate, up, dh, both slopes: clamped with a rank of 64 on sm_80 with Triton 3.9, 624 with 3.7;
    # with silu on sm_90 72
    "_experts_gated_backward_kernel": 688,
    "_gated_lora_backward_kernel": 1024,
    "_gated_lora_kernel": 1024,
    # float32 groups of 8192 on sm_103 with Triton 3.9; with 3.7, 96 on sm_120 and 16 on sm_90
    "_gated_norm_backward_kernel": 112,
    "_prepare_kernel": 112,  # in fp16 on sm_89; 0 on sm_90
    # with a softcap and three sums on sm_90 with Triton 3.9; with 3.7, 8 there and 96 on sm_100
    "odds_kernel": 144,
    "_rms_norm_backward_kernel": 2424,  # float32 rows of 32768 on sm_103: 0 on sm_90
    "_row_gradients_kernel": 192,  # with a softcap on sm_120: 8 on sm_90
    "_state_gradients_kernel": 96,  # on sm_120; 0 on sm_90
    "_states_kernel": 80,  # on sm_103 with Triton 3.9; 0 on sm_90
}
SPILLED_BYTES_OF_RADEON = 2048  # half of the threads of an MI300 for the same tile: slow, but right
GEFORCE = GPUTarget("cuda", 89, 32)
LARGEST_OF = {  # the case that a quick run compiles, and the most KiB of shared memory on GEFORCE
    "_add_thin_kernel": ("bf16-64-True-256", 26),
    "_chunk_gradients_kernel": ("bf16-128-2-True-True", 80),
    "_dropped_gradients_kernel": ("bf16-64-*fp32", 32),
    "_experts_gated_kernel": ("bf16-clamped-True-True-64-64-32", 28),
    "_gated_lora_backward_kernel": ("bf16-64-silu-True-False", 48),
    "_gated_lora_kernel": ("bf16-64-silu-True-False", 28),
    "_order_slots_kernel": ("512", 64),
    "_outputs_kernel": ("bf16-128-2-True-True", 80),
    "_prepare_kernel": ("bf16-128-2-True-True", 32),
    "_rms_norm_backward_kernel": ("bf16-10240-*bf16-99", 97),  # with Triton 3.9; 81 with 3.7
    "_state_gradients_kernel": ("bf16-128-2-True-True", 40),
    "_states_kernel": ("bf16-128-2-True-True", 40),
}
SMALL_KIB = 24  # of kernels that have no row there
OPTIONS_OF = {"_nf4_kernel": {"enable_fp_fusion": False}}  # as it is launched
BINARY = {"cuda": "cubin", "hip": "hsaco"}


def jit_functions() -> dict[str, JITFunction]:
    """Every function under @triton.jit in the package's kernels, by name."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        module = importlib.import_module(f"liger_patch.kernels.triton.{path.stem}")
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and value.module == module.__name__:
                found[name] = value
    return found


def compiled(function: JITFunction, case: Compilation, target: GPUTarget, **options: Any) -> Any:
    multiples = {n for n, v in case.arguments.items() if v == MULTIPLE}
    types = case.arguments | dict.fromkeys(multiples, "i32")
    constants = {n: v for n, v in types.items() if not isinstance(v, str)}
    if IS_TRITON_3_2:
        signature = {n: types[n] for n in function.arg_names if n not in constants}
        source = ASTSource(function, signature, constants=constants)
    else:
        signature = {n: "constexpr" if n in constants else types[n] for n in function.arg_names}
        # PyTorch's tensors start at multiples of 16 bytes: loads are as wide as in a real launch
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(function.arg_names)
            if signature[n].startswith("*") or n in multiples
        }
        source = ASTSource(function, signature, constexprs=constants, attrs=aligned)
    return compile_kernel(source, target=target, options={"num_warps": case.warps} | options)


def lacking(target: GPUTarget) -> str:
    """What the installed Triton lacks to compile for the target; empty if nothing."""
    if target.backend == "cuda":
        is_new = target.arch >= 100
        return f"sm_{target.arch} came with Triton 3.3" if is_new and IS_TRITON_3_2 else ""
    from triton.backends.amd.compiler import HIPBackend

    try:  # newer ones bring their linker
        getattr(HIPBackend, "path_to_rocm_lld", lambda: None)()
    except Exception as error:
        return str(error)
    return ""


def quick_case(name: str) -> str:
    """The case of the kernel that a quick run compiles: that of the largest tiles, of those the one
    with most switches on.
    """

    def demand(case: Compilation) -> tuple[int, int]:
        values = case.arguments.values()
        tiles = (value for value in values if type(value) is int and value > 0)
        return math.prod(tiles), sum(value not in (None, False) for value in values)

    if name in LARGEST_OF:
        return LARGEST_OF[name][0]
    return max(compilations(KERNELS[name], FULL), key=demand).name


def marks_of(target: GPUTarget, name: str, case: str) -> list[pytest.MarkDecorator]:
    reason = lacking(target)
    skipped = pytest.mark.skipif(bool(reason), reason=reason)
    is_quick = target == FULL and QUICK[name] == case
    return [skipped] if is_quick else [skipped, pytest.mark.slow]


def spilled_at_most(name: str, target: GPUTarget) -> int:
    if target.backend == "hip" and target.warp_size == 32:
        return max(SPILLED_BYTES_OF_RADEON, SPILLED_BYTES_OF.get(name, 0))
    return SPILLED_BYTES_OF.get(name, SPILLED_BYTES)


# an old Triton has no descriptors: then a kernel that needs them has no case
KERNELS = jit_functions()
SERVED = [name for name in CASES if name in KERNELS and compilations(KERNELS[name], FULL)]
QUICK = {name: quick_case(name) for name in SERVED}
MATRIX = [
    pytest.param(
        target,
        name,
        case,
        id=f"{target.backend}-{target.arch}-{name.strip('_')}-{case.name}",
        marks=marks_of(target, name, case.name),
    )
    for target in TARGETS
    for name in QUICK
    for case in compilations(KERNELS[name], target)
]


def test_cases_name_parameters_of_their_kernels():
    for function in set(CASES.values()):
        alike = [KERNELS[name] for name, other in CASES.items() if other is function]
        parameters = {name for kernel in alike for name in kernel.arg_names}
        assert all(case.given.keys() <= parameters for case in function(FULL)), alike


def test_every_kernel_is_in_the_matrix():
    sources = {name: kernel.src for name, kernel in KERNELS.items()}
    helpers = {
        name
        for name in sources
        for other in sources
        if other != name and re.search(rf"\b{name}\(", sources[other])
    }
    assert KERNELS.keys() - helpers == CASES.keys()
    assert "_rms_norm_backward_kernel" in CASES  # whose tiles test_compiles reads
    quick = [name for _, name, _ in (c.values for c in MATRIX if pytest.mark.slow not in c.marks)]
    assert sorted(quick) == sorted(SERVED), "a row of LARGEST_OF names no case"
    assert LARGEST_OF.keys() | SPILLED_BYTES_OF.keys() <= KERNELS.keys()
    assert TensorDescriptor is None or list(CASES) == SERVED


@pytest.mark.parametrize(("target", "name", "case"), MATRIX)
def test_compiles(target, name, case):
    """And fits a GPU of its kind; with -rP, pytest prints what it needs there."""
    compilation = compiled(KERNELS[name], case, target, **OPTIONS_OF.get(name, {}))
    assert len(compilation.asm[BINARY[target.backend]])
    shared, spilled = compilation.metadata.shared, spilled_bytes(compilation, target)
    print(f"{shared / 1024:.0f} KiB of {SHARED_KIB[target]} shared, {spilled} bytes spilled")
    assert shared <= SHARED_KIB[target] * 1024
    if not IS_TRITON_3_2:  # which takes more of both
        assert spilled <= spilled_at_most(name, target)
        if target == GEFORCE:
            _, most = LARGEST_OF.get(name, ("", SMALL_KIB))
            assert shared <= most * 1024
    if target.backend == "cuda" and name == "_rms_norm_backward_kernel":
        assert_tiles_on_their_way(shared, case)


def assert_tiles_on_their_way(shared: int, case: Compilation) -> None:
    """That they fit the memory there is, the last part of a case's name, and are held there."""
    assert shared <= int(case.name.split("-")[-1]) * 1024
    arguments = case.arguments
    if arguments["STAGES"] > 1 and not IS_TRITON_3_2:
        pair = (arguments["dy_ptr"], arguments["x_ptr"])
        element_bytes = sum(4 if each == "*fp32" else 2 for each in pair)
        columns = arguments["BLOCK_H"] + arguments["BLOCK_REST"]
        tile_bytes = element_bytes * arguments["BLOCK_ROWS"] * columns
        assert shared >= (arguments["STAGES"] - 1) * tile_bytes


def test_scales_of_nf4_are_rounded_between_product_and_sum(monkeypatch):
    """By the options of a launch: others have a fused multiply-add there."""
    from liger_patch.kernels.triton import nf4

    launches: list[dict[str, Any]] = []

    class Launched:
        def __getitem__(self, grid):
            return lambda *_, **options: launches.append(options)

    kernel, case = KERNELS["_nf4_kernel"], compilations(KERNELS["_nf4_kernel"], FULL)[0]
    monkeypatch.setattr(nf4, "_nf4_kernel", Launched())
    packed = torch.zeros(64, dtype=torch.uint8)
    nf4.dequantized(packed, torch.ones(16), torch.ones(2), None, 64, 128, torch.float32)
    (launch,) = launches
    options = OPTIONS_OF["_nf4_kernel"]
    assert launch.items() >= options.items()
    assert "fma.rn" not in compiled(kernel, case, FULL, **options).asm["ptx"]
    assert "fma.rn" in compiled(kernel, case, FULL).asm["ptx"]
