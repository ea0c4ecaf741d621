"""The GPUs that every Triton kernel is compiled for, what a program may use there, and how a case
names its arguments' types.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

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
DTYPES = ("*bf16", "*fp16", "*fp32")
MULTIPLE = "i32 multiple of 16"  # as a launch specialises it
CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")

Cases = Iterator[tuple[str, dict[str, Any], int]]  # name, arguments: types or values, warps


def arguments(kind: Any, names: str, *, if_: object = True) -> dict[str, Any]:
    """Arguments of one type; None of those that are not given."""
    return dict.fromkeys(names.split(), kind if if_ else None)


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
