"""Estimate the longest rows of contenders with ``python -m liger_patch estimate``'s own functions,
for searches that begin there.

They trace a step without a GPU, in processes of their own: beside the GPU's work, and where neither
Liger-Kernel nor attention within blocks has replaced what is traced.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from liger_patch.estimate.contenders import EAGER, OURS
from liger_patch.estimate.estimate import longest_rows
from liger_patch.estimate.model import TrainingStep, build

from .lora_contenders import LORA, OFFLOADED, Setting
from .models import IGNORED

ESTIMATED = {"eager": EAGER, "liger_patch": OURS, OFFLOADED: OURS}


def estimated_longest(
    config: Any,
    contender: str,
    setting: Setting,
    limits: Sequence[float],
    host_gib: float | None,
) -> dict[float, int]:
    """Return the tokens of the longest rows that are expected to fit limits in GiB, without a
    reserve; none for a contender that is not estimated.
    """
    if contender not in ESTIMATED:
        return {}
    is_offloaded = contender == OFFLOADED
    step = TrainingStep(
        lora_rank=LORA["r"],
        bits=4 if setting.quantized else None,
        double_quant=setting.quantized,
        checkpointing=setting.checkpointing,
        checkpoint_offload=is_offloaded,
        host_gib=host_gib if is_offloaded else None,
        optimizer="none",
        supervised=1 - IGNORED,
    )
    _, sizes = build(config, step)
    rows = longest_rows(config, step, ESTIMATED[contender], sizes, 0, limits)
    return {gib: row.tokens for gib, row in rows.items()}


Guesses = tuple[tuple[float, int], ...]


@contextmanager
def estimating(
    config: Any, contenders: Sequence[str], *step: Any
) -> Iterator[Callable[[str], Guesses]]:
    """Start to estimate all contenders; yield a function that waits for those of one.

    Args:
        step: the arguments of ``estimated_longest`` behind the contender.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(contenders), mp_context=spawn) as pool:
        found = {each: pool.submit(estimated_longest, config, each, *step) for each in contenders}
        yield lambda contender: tuple(found[contender].result().items())
