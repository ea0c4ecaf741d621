"""The GPUs that every Triton kernel is compiled for, what a program may use there, and what a
kernel's parameters are by their names.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

FULL = GPUTarget("cuda", 90, 32)
SHARED_KIB = {  # memory that programs on one multiprocessor share, of which one may take all
    FULL: 227,
    GPUTarget("cuda", 80, 32): 163,  # A100
    GPUTarget("cuda", 86, 32): 99,  # GeForce RTX 30
    GPUTarget("cuda", 89, 32): 99,  # GeForce RTX 40, L4, L40
    GPUTarget("cuda", 100, 32): 227,  # B200
    GPUTarget("cuda", 103, 32): 227,  # B300
    GPUTarget("cuda", 120, 32): 99,  # GeForce RTX 50
    GPUTarget("hip", "gfx942", 64): 64,  # MI300
    GPUTarget("hip", "gfx950", 64): 160,  # MI350
    GPUTarget("hip", "gfx1100", 32): 64,  # Radeon RX 7900
}
TARGETS = list(SHARED_KIB)
DTYPES = ("bf16", "fp16", "fp32")
MULTIPLE = "i32 multiple of 16"  # as a launch specialises it
CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
NAMES_OF = {  # parameters whose type is the same in most kernels; other pointers have the case's
    "fp32": "alpha beta ce_weight dropout eps factor gate_scaling label_smoothing limit logit_scale"
    " offset scale shift softcap t_factor t_scale t_softcap temperature up_scaling z_loss",
    "*fp32": "class_weight_ptr code_ptr dg_ptr entropy_factor_ptr entropy_ptr factor_ptr"
    " factors_ptr g_ptr highest_ptr label_distance_ptr label_gradient_ptr label_gradients_ptr"
    " label_logit_ptr label_z_ptr loss_ptr lse_ptr mean_distance_ptr means_ptr moment_ptr"
    " nested_code_ptr nested_scales_ptr offset_ptr others_ptr partial_ptr parts_ptr reference_ptr"
    " row_scale_ptr rstd_ptr scales_ptr smooth_ptr squares_ptr sums_ptr top_ptr total_ptr"
    " weight_sum_ptr z_sum_ptr",
    "*bf16": "beta_ptr dbeta_ptr",
    "*i1": "is_top1_ptr",
    "*i32": "ids_ptr offsets_ptr overflow_ptr place_ptr places_ptr slots_ptr words_ptr",
    "*i64": "counts_ptr index_ptr labels_ptr order_ptr rows_ptr",
}
TYPES = {name: kind for kind, names in NAMES_OF.items() for name in names.split()}


class Case(NamedTuple):
    """A compilation of a kernel, or of several alike: each has some of the parameters."""

    dtype: str  # of the pointers whose names tell nothing
    given: dict[str, Any]  # types or values of parameters that are not as their names tell
    warps: int
    name: str = ""  # in a function of ``rows``, which gives one


class Compilation(NamedTuple):
    name: str
    arguments: dict[str, Any]  # types or values, of all parameters
    warps: int


Cases = Callable[[GPUTarget], Iterable[Case]]
CASES: dict[str, Cases] = {}  # by kernel


def cases_of(*kernels: str) -> Callable[[Cases], Cases]:
    """Decorate the function that returns a kernel's cases, or those of several alike."""

    def take(function: Cases) -> Cases:
        CASES.update(dict.fromkeys(kernels, function))
        return function

    return take


def rows(*table: Any, last: Iterable[Any] | None = None) -> Callable[[Any], Cases]:
    """Decorate the function that returns the case of a target and a row, None if it has none there.
    ``last``: values of one more parameter, of which each row gets every one.
    """
    if last is not None:
        table = tuple((*row, value) for row in table for value in last)

    def take(function: Callable[..., Case | None]) -> Cases:
        def cases(target: GPUTarget) -> list[Case]:
            made = ((function(target, *row), named(row)) for row in table)
            return [case._replace(name=name) for case, name in made if case is not None]

        return cases

    return take


def named(row: Iterable[object]) -> str:
    return "-".join(map(str, row))


def absent(names: str, *, unless: object = False) -> dict[str, Any]:
    """Parameters that are None, but where ``unless`` is so."""
    return {} if unless else dict.fromkeys(names.split())


def each(names: str, kind: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


def compilations(kernel: JITFunction, target: GPUTarget) -> list[Compilation]:
    """A kernel's cases for a target; of those that compile the same, the first."""
    found: dict[str, Compilation] = {}
    for case in CASES[kernel.__name__](target):
        each = Compilation(case.name, _arguments(kernel, case), case.warps)
        found.setdefault(repr(each[1:]), each)
    return list(found.values())


def _arguments(kernel: JITFunction, case: Case) -> dict[str, Any]:
    """As the case gives them, else constants of the kernel's module and types by name."""
    constants = vars(sys.modules[kernel.module])
    found = {}
    for parameter in kernel.params:
        name = parameter.name
        if name in case.given:
            found[name] = case.given[name]
        elif parameter.is_constexpr:
            found[name] = constants[name]
        else:
            found[name] = TYPES.get(name, f"*{case.dtype}" if name.endswith("_ptr") else "i32")
    return found


def spilled_bytes(compilation: Any, target: GPUTarget) -> int:
    """What each thread keeps in memory for want of registers."""
    if target.backend == "hip":
        spills = re.findall(r"\.vgpr_spill_count: *(\d+)", compilation.asm["amdgcn"])
        return 4 * sum(map(int, spills))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compilation.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"STACK:(\d+)", printed)))
