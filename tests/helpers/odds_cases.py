"""What tests of odds share: which options and statistics are served, and where they run.

Odds are computed in bf16 on Hopper, and in float32 under Triton's interpreter, which multiplies no
bf16. Where Triton is not installed, importing this skips the test file that imports it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from three_ways import OPTIONS
from torch import Tensor

pytest.importorskip("triton")

from liger_patch.kernels.backend import TensorDescriptor, is_hopper

SERVED: dict[str, dict[str, Any]] = {
    **{name: how for name, how in OPTIONS.items() if "label_smoothing" not in how},
    "everything": {
        "softcap": 5.0,
        "logit_scale": 0.5,
        "z_loss": 1e-2,
        "class_weight": True,
        "token_weight": True,
    },
}
STATISTICS = ("entropy", "lse", "is_top1")
IS_HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
MARKS = [
    pytest.mark.skipif(TensorDescriptor is None, reason="Triton < 3.4"),
    # what overflows is computed again; the interpreter's numpy says so
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning"
    ),
]


def in_float32(
    log_probs: Callable[..., Any],
    hidden_states: Tensor,
    weight: Tensor,
    *,
    low_rank: tuple[Tensor, Tensor] | None = None,
    chunk_mib: float | None = None,
    **how: Any,
) -> Any:
    """Call ``log_probs`` with bf16 inputs in float32, for the interpreter.

    An entropy seen from a label far below the largest logit loses digits that bf16 never had: so
    tests of statistics ask for values of bf16.
    """
    return log_probs(
        hidden_states.float(),
        weight.float(),
        low_rank=low_rank and tuple(each.float() for each in low_rank),
        chunk_mib=chunk_mib and 2 * chunk_mib,  # as many rows
        **how,
    )
