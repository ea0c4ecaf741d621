"""The examples, run as a user runs them, without a network."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import liger_patch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
STEPS = 12


def run_example(script: str, *arguments: str, cwd: Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(liger_patch.__file__).parent.parent),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.parametrize(
    ("model_type", "dtype", "accumulation"),
    [
        ("qwen3", "float32", 1),
        pytest.param("gemma2", "bfloat16", 2, marks=pytest.mark.slow),
    ],
)
def test_train_compares_patched_with_unpatched(
    model_type: str, dtype: str, accumulation: int, tmp_path: Path
):
    options = {
        "--model-type": model_type,
        "--dtype": dtype,
        "--gradient-accumulation-steps": accumulation,
        "--vocab-size": 4096,
        "--hidden-size": 64,
        "--length": 128,
        "--batch-size": 8 // accumulation,
        "--chunk-mib": 1,
        "--steps": STEPS,
        "--output": "figures",
    }
    printed = run_example(
        "train.py", *(str(part) for option in options.items() for part in option), cwd=tmp_path
    )
    assert printed.splitlines()[-1] == (
        f"patched and unpatched AGREE, as closely as {dtype} allows."
    )
    assert f"step {STEPS} " in printed

    assert (tmp_path / "figures/comparison.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "figures/comparison.json").read_text())
    unpatched, patched = report["runs"]["unpatched"], report["runs"]["patched"]
    assert report["settings"]["model_type"] == model_type
    assert patched["ordinary_because"] is None
    assert len(patched["loss"]) == len(patched["grad_norm"]) == STEPS
    assert patched["loss"][0] == pytest.approx(math.log(4096), rel=0.05)  # uniform guessing
    assert patched["loss"][-1] < patched["loss"][0] - 0.3
    assert patched["tokens_per_second"] > 0
    logits_mib = 8 // accumulation * 128 * 4096 * 4 / 2**20  # eager holds several such tensors
    assert patched["peak_memory_mib"] < unpatched["peak_memory_mib"] - logits_mib


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--model-type", "gemma3", "must be a text model of liger_patch.registry (cohere, "),
        ("--hidden-size", "100", "must be a positive multiple of 64"),
        ("--vocab-size", "256", "must be 257 or more"),
        ("--steps", "2", "must be 3 or more"),
    ],
)
def test_train_names_the_argument_that_does_not_fit(
    option: str, value: str, expected: str, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(EXAMPLES)
    import train

    monkeypatch.setattr(sys, "argv", ["train.py", option, value])
    with pytest.raises(SystemExit):
        train.parse_arguments()
    error = capsys.readouterr().err
    assert f"{option} {expected}" in error
    assert value in error.splitlines()[-1]


@pytest.mark.parametrize("wrong", [5.0001, math.nan])
@pytest.mark.parametrize("figure", ["loss", "grad_norm", "evaluation_loss"])
def test_a_wrong_figure_is_a_disagreement(figure: str, wrong: float, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from comparison import differences
    from training import Run

    right = Run(
        parameters=1,
        loss=[5.0] * 3,
        grad_norm=[5.0] * 3,
        evaluation_loss=5.0,
        tokens_per_second=1.0,
        peak_memory_mib=1.0,
        ordinary_because=None,
    )
    runs = {"unpatched": right, "control": right, "patched": right}
    assert all(row.agrees for row in differences(runs))
    runs["patched"] = replace(
        right, **{figure: wrong if figure == "evaluation_loss" else [5.0, wrong, 5.0]}
    )
    loss, gradient_norm = differences(runs)
    assert loss.agrees == (figure == "grad_norm")
    assert gradient_norm.agrees == (figure != "grad_norm")


def test_apply_patch_trains_fused(tmp_path: Path):
    printed = run_example("apply_patch.py", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert losses[-1] < losses[0] - 1
    assert re.search(r"last loss +fused", printed)


def test_return_logits_gives_the_same_loss(tmp_path: Path):
    printed = run_example("return_logits.py", cwd=tmp_path)
    losses = re.findall(r"loss (\S+)", printed)
    assert losses[0] == losses[1]
    assert printed.splitlines()[-1] == "same loss, same gradients"
