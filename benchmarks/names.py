"""Names that several benchmarks share: contenders, and what tables say of them."""

LOWER_BOUND = "matmul-only bound"
EAGER, OURS = "eager", "liger_patch"
KERNELS_OF_OTHERS = "other GPUs"  # of ours, on a Hopper GPU
PYTORCH, QUACK = "PyTorch", "QuACK"
COPY = "copy"
