"""Names that several benchmarks share: contenders, and what tables say of them."""

LOWER_BOUND = "matmul-only bound"
EAGER = "eager"
OURS = "liger_patch"  # how the names of all of ours begin
OFFLOADED = f"{OURS}, offloaded"  # where checkpoints are kept alone
KERNELS_OF_OTHERS = "other GPUs"  # of ours, on a Hopper GPU
OTHER_GPUS = f"{OURS}, {KERNELS_OF_OTHERS}"
OF_HOPPER = f"{OURS}, of Hopper"  # for small batches, which run those of others
PYTORCH, QUACK, UNSLOTH = "PyTorch", "QuACK", "Unsloth"
COPY = "copy"
FP8 = f"{OURS}, FP8"  # its frozen base
