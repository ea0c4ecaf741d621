"""The patch under wrappers that look at every output: DistributedDataParallel and FSDP, on gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent


on_the_cpu = pytest.mark.skipif(
    torch.__version__.startswith("2.6"), reason="fully_shard of torch 2.6 needs an accelerator"
)


@pytest.mark.parametrize(
    ("wrapper", "size"),
    [("ddp", 2), ("ddp_unused", 2), pytest.param("fsdp2", 1, marks=on_the_cpu)],
)
def test_a_step_is_eagers_and_computes_no_logits(wrapper: str, size: int, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, str(TESTS / "distributed_step.py")),
                *(wrapper, str(rank), str(size), str(tmp_path / "group")),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, "\n".join(outputs)
