"""Each cell of the table in docs/distributed.md, in two or four processes. UPDATE_README=1 writes
it.
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
from engine_cases import ROWS, cases_of, table
from gloo_group import run
from sections import check_section

pytest.importorskip("accelerate", minversion="1.15")
pytest.importorskip("bitsandbytes")
pytest.importorskip("deepspeed")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "distributed.md"
SPLIT = ("context", "ulysses")
DEEPSPEED = ("zero1", "zero2", "zero3")  # replaces torch's linear for the rest of the process
GRID = ("transformers_fsdp_tp",)  # of two times two processes
OTHERS = tuple(row.engine for row in ROWS if row.engine not in (*SPLIT, *DEEPSPEED, *GRID))


@pytest.mark.slow
@pytest.mark.parametrize("engines", [OTHERS[:6], OTHERS[6:], DEEPSPEED], ids="-".join)
def test_engines(engines: tuple[str, ...], tmp_path: Path) -> None:
    run("distributed_step.py", str(tmp_path / "group"), "cpu", *cases_of(*engines))


@pytest.mark.slow
def test_engines_of_a_grid(tmp_path: Path) -> None:
    cases = cases_of(*GRID)
    run("distributed_step.py", str(tmp_path / "group"), "cpu", *cases, processes=4)


def test_trainer_with_split_sequences(tmp_path: Path) -> None:
    """Also where a process has no label, and ``loss_average="sequence"`` says why it cannot be."""
    run("sequence_trainer.py", str(tmp_path), "cpu", *cases_of(*SPLIT))


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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", ["context --layers --bf16", "ulysses --layers"])
def test_split_sequences_on_gpus(case: str, tmp_path: Path) -> None:
    """With PyTorch's ring attention, which has kernels for GPUs alone, and stays in its process."""
    run("sequence_trainer.py", str(tmp_path), "cuda", case)


@pytest.mark.slow
def test_split_sequences_in_bf16(tmp_path: Path) -> None:
    run("sequence_trainer.py", str(tmp_path), "cpu", "context --layers --bf16")
