"""The GPUs that every Triton kernel is compiled for, and how a case names its arguments' types."""

from triton.backends.compiler import GPUTarget

FULL = GPUTarget("cuda", 90, 32)
TARGETS = [
    FULL,
    GPUTarget("cuda", 80, 32),
    GPUTarget("cuda", 100, 32),
    GPUTarget("hip", "gfx942", 64),
]
DTYPES = ("*bf16", "*fp16", "*fp32")
MULTIPLE = "i32 multiple of 16"  # as a launch specialises it
