"""The table in docs/distributed.md, which test_distributed runs (UPDATE_README=1 writes it), and
the examples for several processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_cases import table
from sections import check_section

pytest.importorskip("accelerate", minversion="1.15")
pytest.importorskip("bitsandbytes")
pytest.importorskip("deepspeed")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "distributed.md"


def test_the_document_has_the_table_of_the_cases() -> None:
    check_section(DOCUMENT, "engines", table())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_the_examples_configurations_train(engine: str) -> None:
    """As ``accelerate launch`` starts them, by the functions of examples/train.py."""
    folders = [str(ROOT / "tests" / "helpers"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    launch += ["--config_file", f"examples/{engine}.yaml", "--main_process_port", "0"]
    done = subprocess.run(
        [*launch, "tests/helpers/launched_training.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(r"^\{.*\}$", done.stdout, re.M)
    result = json.loads(found)
    wrappers = {"ddp": "DistributedDataParallel", "zero3": "DeepSpeedEngine"}
    assert result["wrapper"] == wrappers.get(engine, "FSDPLlamaForCausalLM")
    assert (result["processes"], result["ordinary_because"]) == (2, None)


@pytest.mark.slow
def test_the_example_of_tensor_parallelism_trains() -> None:
    """As its command starts it, on CPUs."""
    script = "examples/tensor_parallel.py"
    assert f"`torchrun --nproc-per-node 2 {script}`" in DOCUMENT.read_text(encoding="utf-8")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    done = subprocess.run(
        [*launch, "--device", "cpu", "--steps", "3", "--vocab-size", "300"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+)$", done.stdout, re.M)
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
    assert f"`{command}`" in DOCUMENT.read_text(encoding="utf-8")
