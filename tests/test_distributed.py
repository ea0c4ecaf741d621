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


@pytest.mark.parametrize("wrapper", ["ddp", "ddp_unused", pytest.param("fsdp2", marks=on_the_cpu)])
@pytest.mark.parametrize("layers", ["layers", "loss"])
def test_a_step_is_eagers_and_computes_no_logits(wrapper: str, layers: str, tmp_path: Path) -> None:
    arguments = [wrapper, str(tmp_path / "group"), layers]
    finished = subprocess.run(
        [sys.executable, str(TESTS / "distributed_step.py"), *arguments],
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
