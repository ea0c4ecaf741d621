"""The examples, run as a user runs them, without a network."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import ROOT
from gloo_group import COMMON, run_alone

from liger_patch.__main__ import _parser

EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "distributed.md"  # which says how those for several processes start
STEPS = 12


def held_out(name: str, printed: str) -> list[float]:
    """Before and after training."""
    (found,) = re.findall(rf"held out {name} +([\d.]+) -> +([\d.]+)", printed)
    return [float(value) for value in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "dtype", "accumulation"), [("qwen3", "float32", 1), ("gemma2", "bfloat16", 2)]
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
    given = (str(part) for option in options.items() for part in option)
    printed = run_alone(EXAMPLES / "train.py", *given, folder=tmp_path)
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
        step_seconds=[1.0] * 3,
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
    printed = run_alone(EXAMPLES / "apply_patch.py", folder=tmp_path)
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert losses[-1] < losses[0] - 1
    assert re.search(r"last loss +fused", printed)


@pytest.mark.slow
def test_distillation_brings_a_student_near_its_teacher(tmp_path: Path):
    printed = run_alone(EXAMPLES / "distillation.py", folder=tmp_path)
    before, after = held_out("KL", printed)
    assert after < before / 5
    assert re.search(r"last loss +fused", printed)


def test_return_logits_gives_the_same_loss(tmp_path: Path):
    printed = run_alone(EXAMPLES / "return_logits.py", folder=tmp_path)
    losses = re.findall(r"loss (\S+)", printed)
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6)
    assert printed.splitlines()[-1] == "same loss, same gradients"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
def test_sft_logs_the_same_with_and_without_the_flag(tmp_path: Path):
    options = {
        "conversations": 300,
        "vocab_size": 1024,
        "hidden_size": 64,
        "max_length": 64,
        "packing": "true",
        "max_steps": 6,
        "logging_steps": 1,
    }
    lines = [f"{name}: {value}\n" for name, value in options.items()]
    (tmp_path / "sft.yaml").write_text("".join(lines))

    def run(flag: str) -> str:
        options = ["--config", "sft.yaml", "--use_liger_patch", flag, "--output_dir", flag]
        return run_alone(EXAMPLES / "sft.py", *options, folder=tmp_path)

    logged = {}
    status = {
        "false": r"Trained with TRL's own loss\..* add:\n +--use_liger_patch true\n\Z",
        "true": r"With use_liger_patch:\n(.*\n)+last loss +fused\n",
    }
    for flag in status:
        printed = run(flag)
        assert "285 conversations, 15 held out; " in printed
        assert [name for name in status if re.search(status[name], printed)] == [flag]
        rows = re.findall(r"^ *(\d+|held out) +([\d.]+) +([\d.]+) +([\d.]+)%$", printed, re.M)
        assert [step for step, *_ in rows] == ["1", "2", "3", "4", "5", "6", "held out"]
        logged[flag] = torch.tensor([[float(value) for value in row] for _, *row in rows])
    torch.testing.assert_close(logged["true"], logged["false"])
    losses = logged["true"][:, 0]
    assert losses[0] == pytest.approx(math.log(1024), rel=0.05)  # uniform guessing
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_qlora_trains_and_measures_without_logits(tmp_path: Path):
    options = ["--conversations", "100", "--hidden-size", "64", "--length", "48", "--steps", "4"]
    printed = run_alone(EXAMPLES / "qlora.py", *options, folder=tmp_path)
    found = dict(re.findall(r"held out (\w+) +([\d.]+)$", printed, re.M))  # on a CPU, once
    loss, perplexity, accuracy, entropy = map(float, found.values())
    assert [*found] == ["loss", "perplexity", "accuracy", "entropy"]
    assert loss < math.log(2197) - 0.02  # the tokens of its vocabulary, in uniform guessing
    assert perplexity == pytest.approx(math.exp(loss), rel=0.05)
    assert 0 <= accuracy <= 1
    assert 0 < entropy < math.log(2197)
    assert re.search(r"last loss +fused", printed)


def code_cells(notebook: str) -> list[str]:
    cells = json.loads((EXAMPLES / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    return ["".join([*cell["source"], "\n"]) for cell in cells if cell["cell_type"] == "code"]


def run_notebook(name: str, lines_of_shell: int, folder: Path) -> str:
    """Run its Python, and return what it prints. Lines of the shell install, and estimate."""
    lines = "".join(code_cells(name)).splitlines()
    python = [line for line in lines if not line.startswith(("%", "!"))]
    assert len(lines) == len(python) + lines_of_shell
    if python[-1].startswith("patch_status("):  # which a notebook shows
        python[-1] = f"print({python[-1]})"
    (folder / "notebook.py").write_text("\n".join(python))
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(EXAMPLES)  # which a process that is started has too
        printed = run_alone(folder / "notebook.py", folder=folder)
    assert re.search(r"last loss +fused", printed)
    assert re.search(r"layers .* 28 lora", printed)
    return printed


@pytest.mark.slow  # as the example of QLoRA does
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_the_notebook_trains_on_a_cpu(tmp_path: Path):
    printed = run_notebook("qlora_16gb", 2, tmp_path)
    loss, perplexity = held_out("loss", printed), held_out("perplexity", printed)
    assert loss[1] < loss[0] - 0.1
    assert perplexity == pytest.approx([math.exp(each) for each in loss], rel=0.05)
    assert (tmp_path / "outputs/notebook/adapter/adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_the_notebook_of_packed_rows_trains_on_a_cpu(tmp_path: Path):
    printed = run_notebook("qlora_packed", 2, tmp_path)
    ((before, after),) = re.findall(r"^loss +([\d.]+) +([\d.]+)$", printed, re.M)
    assert float(before) == pytest.approx(float(after), abs=2e-4)
    assert (tmp_path / "outputs/packed/adapter/adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    None in (find_spec("trl"), find_spec("peft")), reason="needs the extras trl and peft"
)
def test_the_notebook_of_dpo_trains_on_a_cpu(tmp_path: Path):
    printed = run_notebook("dpo", 1, tmp_path)
    ((before, after),) = re.findall(r"^loss +([\d.]+) +([\d.]+)$", printed, re.M)
    assert float(before) == pytest.approx(math.log(2), abs=1e-3)
    assert float(after) < float(before) - 0.05


@pytest.mark.parametrize(
    ("notebook", "values"),
    [
        ("qlora_16gb", {"BATCH": "4", "LENGTH": "2048"}),
        ("qlora_packed", {"LENGTH": "4096", "DTYPE": "bfloat16"}),
    ],
)
def test_a_notebook_estimates_what_it_trains(notebook: str, values: dict[str, str]):
    _, settings, _, estimate, *_ = code_cells(notebook)
    (options,) = re.findall(r'^options = f"(.*)"', estimate, re.M)
    for name, value in values.items():
        assert name in settings
        options = options.replace(f"{{{name}}}", value)
    assert "MODEL = " in settings
    assert estimate.splitlines()[-1] == "!python -m liger_patch estimate {MODEL} {options}"
    _parser().parse_args(["estimate", "model", *options.split()])  # exits where one is unknown


@pytest.mark.slow  # TRL's trainer of preferences has quick tests in integrations/trl
@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
def test_dpo_trains_fused(tmp_path: Path):
    options = "--max_steps 4 --logging_steps 1 --conversations 60"
    options += " --vocab_size 1024 --hidden_size 64 --max_length 48"
    printed = run_alone(EXAMPLES / "dpo.py", *options.split(), folder=tmp_path)
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-3)  # model and reference are the same
    assert max(losses[1:]) < losses[0] - 0.05
    assert re.search(r"last loss +fused", printed)


@pytest.fixture
def new_accelerate() -> None:
    pytest.importorskip("accelerate", minversion="1.15")


def printed_by(*module: str) -> str:
    """Run a module of Python in the root of the repository, and return what it prints."""
    how: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-m", *module], env=os.environ | COMMON, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("new_accelerate")
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_the_examples_configurations_train(engine: str) -> None:
    """As ``accelerate launch`` starts them, by the functions of examples/train.py."""
    pytest.importorskip("deepspeed")
    launch = ("accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0")
    config = ("--config_file", f"examples/{engine}.yaml")
    printed = printed_by(*launch, *config, "tests/helpers/launched_training.py")
    (found,) = re.findall(r"^\{.*\}$", printed, re.M)
    result = json.loads(found)
    wrappers = {"ddp": "DistributedDataParallel", "zero3": "DeepSpeedEngine"}
    assert result["wrapper"] == wrappers.get(engine, "FSDPLlamaForCausalLM")
    assert (result["processes"], result["ordinary_because"]) == (2, None)


@pytest.mark.slow
@pytest.mark.usefixtures("new_accelerate")
def test_the_example_of_tensor_parallelism_trains() -> None:
    """As its command starts it, on CPUs."""
    script = "examples/tensor_parallel.py"
    assert f"\ntorchrun --nproc-per-node 2 {script}\n" in PAGE.read_text(encoding="utf-8")
    launch = ("torch.distributed.run", "--nproc-per-node", "2", script, "--device", "cpu")
    printed = printed_by(*launch, "--steps", "3", "--vocab-size", "300")
    lines = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+)$", printed, re.M)
    losses = torch.tensor([[float(each) for each in line] for line in lines])
    assert len(losses) == 3
    torch.testing.assert_close(losses[:, 1], losses[:, 0])
    assert losses[-1, 0] < losses[0, 0] - 0.01


@pytest.mark.usefixtures("new_accelerate")
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
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
    document = PAGE.read_text(encoding="utf-8")
    assert f"`{path.name}`" in document or f"\n{command}\n" in document
