"""Names that several benchmarks share: contenders, and what tables say of them."""

LOWER_BOUND = "matmul-only bound"
EAGER = "eager"
OURS = "liger_patch"  # how the names of all of ours begin
OURS_LAYERS = f"{OURS}, layers"  # in files of STEPS: with layers on kernels, as is the default
STEPS = "steps", "sft_steps", "convergence"  # lists of reports, of whole models
KERNELS_OF_OTHERS = "other GPUs"  # of ours, on a Hopper GPU
OTHER_GPUS = f"{OURS}, {KERNELS_OF_OTHERS}"
OF_HOPPER = f"{OURS}, of Hopper"  # for small batches, which run those of others
PYTORCH, QUACK, UNSLOTH = "PyTorch", "QuACK", "Unsloth"
COPY = "copy"
FLEX = f"{OURS}, flex attention"  # of models with sliding windows
FP8 = f"{OURS}, FP8"  # its frozen base
COMPILED = f"{OURS}, compiled by layer"


def by_default(report: dict) -> dict:
    """Return a report with the names that documents and pictures show for whole models:
    "liger_patch" is the default, ``layers=True``, as it is everywhere else.
    """
    return report | {
        key: [row | {"contender": _by_default(row["contender"])} for row in report[key]]
        for key in STEPS
        if key in report
    }


def _by_default(contender: str) -> str:
    if contender.startswith(OURS_LAYERS):
        return OURS + contender.removeprefix(OURS_LAYERS)
    if contender.startswith(OURS):
        return f"{OURS_LAYERS}=False{contender.removeprefix(OURS)}"
    return contender
