"""The examples for several processes, as their commands start them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import ROOT
from gloo_group import COMMON

pytest.importorskip("accelerate", minversion="1.15")
pytest.importorskip("bitsandbytes")
pytest.importorskip("deepspeed")
pytest.importorskip("peft")

DOCUMENT = ROOT / "docs" / "distributed.md"


def printed_by(*module: str) -> str:
    """Run a module of Python in the root of the repository, and return what it prints."""
    how: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-m", *module], env=os.environ | COMMON, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_the_examples_configurations_train(engine: str) -> None:
    """As ``accelerate launch`` starts them, by the functions of examples/train.py."""
    launch = ("accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0")
    config = ("--config_file", f"examples/{engine}.yaml")
    printed = printed_by(*launch, *config, "tests/helpers/launched_training.py")
    (found,) = re.findall(r"^\{.*\}$", printed, re.M)
    result = json.loads(found)
    wrappers = {"ddp": "DistributedDataParallel", "zero3": "DeepSpeedEngine"}
    assert result["wrapper"] == wrappers.get(engine, "FSDPLlamaForCausalLM")
    assert (result["processes"], result["ordinary_because"]) == (2, None)


@pytest.mark.slow
def test_the_example_of_tensor_parallelism_trains() -> None:
    """As its command starts it, on CPUs."""
    script = "examples/tensor_parallel.py"
    assert f"\ntorchrun --nproc-per-node 2 {script}\n" in DOCUMENT.read_text(encoding="utf-8")
    launch = ("torch.distributed.run", "--nproc-per-node", "2", script, "--device", "cpu")
    printed = printed_by(*launch, "--steps", "3", "--vocab-size", "300")
    lines = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+)$", printed, re.M)
    losses = torch.tensor([[float(each) for each in line] for line in lines])
    assert len(losses) == 3
    torch.testing.assert_close(losses[:, 1], losses[:, 0])
    assert losses[-1, 0] < losses[0, 0] - 0.01


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_configuration_says_what_starts_it(path: Path) -> None:
    config = pytest.importorskip("accelerate.commands.config.config_args")
    given = config.load_config_from_file(str(path))
    assert given.num_processes == 2
    if given.deepspeed_config:
        file = ROOT / given.deepspeed_config["deepspeed_config_file"]
        stage = json.loads(file.read_text(encoding="utf-8"))["zero_optimization"]["stage"]
        assert path.stem == f"zero{stage}"
    command = f"accelerate launch --config_file examples/{path.name} examples/train.py"
    assert command in path.read_text(encoding="utf-8")
    document = DOCUMENT.read_text(encoding="utf-8")
    assert f"`{path.name}`" in document or f"\n{command}\n" in document
