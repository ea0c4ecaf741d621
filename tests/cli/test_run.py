"""``python -m liger_patch try`` and ``run``, on training scripts that know nothing of the patch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gloo_group import COMMON, HELPERS, run_alone
from slow_cases import slow_but
from tiny_models import tiny_model
from tiny_text import preferences, prompts_and_completions, tiny_tokenizer

LOAD = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from helper import STEPS

model = AutoModelForCausalLM.from_pretrained("model")
ids = torch.arange(20, 28)
rows = [{"input_ids": ids + i, "labels": ids + i} for i in range(8)]
"""
ARGUMENTS = """output_dir="out", max_steps=STEPS, save_strategy="steps", save_steps=1,
    per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True, bf16=False,
    report_to="none", learning_rate=float(sys.argv[2]), disable_tqdm=True"""
TRAIN = f"""
trainer = Trainer(model=model, args=TrainingArguments({ARGUMENTS}), train_dataset=rows)
trainer.train()
trainer.save_model("final")
print("saved by", __name__, sys.argv)
"""
LORA = """
from peft import LoraConfig, get_peft_model
model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
"""
QLORA = f"""
from peft import prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
model = AutoModelForCausalLM.from_pretrained("model", quantization_config=bits)
model = prepare_model_for_kbit_training(model)
{LORA}"""
SFT = f"""
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
data = load_dataset("json", data_files="sft.jsonl", split="train")
SFTTrainer("model", args=SFTConfig({ARGUMENTS}), train_dataset=data).train()
"""
COPIED = f"""
import copy
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer
data = load_dataset("json", data_files="dpo.jsonl", split="train")
tokenizer = AutoTokenizer.from_pretrained("model")
arguments = DPOConfig({ARGUMENTS})
arguments.learning_rate = 1e-3  # Adam turns a rounding of a gradient near 0 into a whole step
reference = copy.deepcopy(model)
trainer = DPOTrainer(
    model, reference, args=arguments, train_dataset=data, processing_class=tokenizer
)
trainer.train()
"""
LOOP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(STEPS):
    batch = torch.stack([row["input_ids"] for row in rows])
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a data set."""
    folder = tmp_path_factory.mktemp("made")
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    if find_spec("datasets"):
        prompts_and_completions().to_json(folder / "sft.jsonl")
        preferences().to_json(folder / "dpo.jsonl")
    return folder


def start(
    folder: Path, made: Path, code: str, *command: str, steps: int = 9, launcher: str = ""
) -> Any:
    """Run a command of liger_patch on a script in a folder of its own, from another folder.

    Args:
        launcher: a module of Python, and its arguments. Without one, no process imports again what
            is imported.
    """
    for each in made.iterdir():
        (folder / each.name).symlink_to(each)
    (folder / "scripts").mkdir()
    (folder / "scripts/train.py").write_text(code)
    (folder / "scripts/helper.py").write_text(f"STEPS = {steps}\n")
    given = [*command, "scripts/train.py", "--lr", "0.1"]
    if not launcher:
        run_alone(HELPERS / "command.py", str(folder), *given, folder=folder)
        done = {name: (folder / name).read_text() for name in ("stdout", "stderr", "status")}
        return SimpleNamespace(**done | {"returncode": int(done["status"])})
    return subprocess.run(
        [sys.executable, "-m", *launcher.split(), *given],
        cwd=folder,
        env={**os.environ, **COMMON, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def tried(
    folder: Path, made: Path, code: str, steps: int = 9, launcher: str = ""
) -> tuple[str, dict[str, Any]]:
    """Return the table and the JSON of ``try``; both runs have the same losses, and fused ones."""
    options = ["--steps", "3", "--json", "table.json"]
    done = start(folder, made, code, "try", *options, steps=steps, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "table.json").read_text())
    eager, patched = report["runs"]["as it is"], report["runs"]["patched"]
    count = min(steps, 3)
    assert len(eager["losses"]) == len(patched["losses"]) == count
    assert patched["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert len(patched["milliseconds"]) == count - 1
    assert patched["peak_bytes"] > 2**20
    assert eager["status"] is None
    assert patched["fused"]
    assert "layers are the model's own" in done.stdout
    assert f"loss, step {count}" in done.stdout
    (times,) = (line for line in done.stdout.splitlines() if line.startswith("ms a step"))
    assert "%" not in times  # of so few steps
    assert "z-loss" not in done.stdout
    assert "unset" not in done.stdout
    assert "at from_pretrained" not in done.stderr  # the table says it, without a Trainer
    return done.stdout, report


needs = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}")
    for name in ("accelerate", "bitsandbytes", "peft", "trl")
}


@needs["accelerate"]
@pytest.mark.parametrize("launcher", slow_but([""], ["", "liger_patch"]))
def test_a_script_with_a_trainer_is_compared_and_ended(
    launcher: str, tmp_path: Path, made: Path
) -> None:
    table, report = tried(tmp_path, made, LOAD + TRAIN, launcher=launcher)
    assert table.startswith("scripts/train.py, Trainer\n")
    assert "LlamaForCausalLM is patched in Trainer" in report["notes"]
    assert "5 rms_norm" in dict(report["runs"]["patched"]["status"])["layers"]
    assert "saved by" not in table
    assert not (tmp_path / "final").exists()
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.slow
@needs["trl"]
def test_a_deep_copy_as_the_reference_is_patched_by_its_trainer(tmp_path: Path, made: Path) -> None:
    _, report = tried(tmp_path, made, LOAD + COPIED)
    assert report["notes"][0] == "LlamaForCausalLM is patched in DPOTrainer"
    assert not any("itself" in note for note in report["notes"])


def test_a_loop_of_its_own_is_patched_at_from_pretrained(tmp_path: Path, made: Path) -> None:
    table, report = tried(tmp_path, made, LOAD + LOOP)
    assert "a loop of its own" in table
    assert any("is patched at from_pretrained" in note for note in report["notes"])


@pytest.mark.slow  # each starts processes that import everything
@needs["bitsandbytes"]
@needs["peft"]
def test_a_script_with_qlora(tmp_path: Path, made: Path) -> None:
    _, report = tried(tmp_path, made, LOAD + QLORA + TRAIN)
    assert "14 lora" in dict(report["runs"]["patched"]["status"])["layers"]


@needs["trl"]
def test_a_script_with_trls_trainer_and_the_name_of_a_model(tmp_path: Path, made: Path) -> None:
    table, report = tried(tmp_path, made, LOAD + SFT)
    assert "SFTTrainer" in table
    assert report["notes"][0] == "LlamaForCausalLM is patched in SFTTrainer"


def test_a_script_that_fails_as_it_is_runs_patched(tmp_path: Path, made: Path) -> None:
    fails = """
from liger_patch import patch_status
if not patch_status(model).patched:
    raise torch.OutOfMemoryError("no\\n  memory")
"""
    code = LOAD + LOOP + fails  # behind step 2 of 3
    done = start(tmp_path, made, code, "try", "--steps", "3", steps=2)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[-2] for row in rows if row[:1] == ["loss,"]] == ["-", "-"]
    for name in ("ms a step, median", "peak memory, MiB (process)"):
        (row,) = (line for line in done.stdout.splitlines() if line.startswith(name))
        before, after = row.removeprefix(name).split()
        assert before == "-"
        assert float(after) > 0
    assert "note: failed as it is: OutOfMemoryError: no memory" in done.stdout
    assert "note: scripts/train.py ended after 2 of 3 steps" in done.stdout


def test_a_model_that_is_not_patched_is_said_first(tmp_path: Path, made: Path) -> None:
    load = 'AutoModelForCausalLM.from_pretrained("model")'
    config = "transformers.AutoConfig.from_pretrained('model')"
    made_here = f"AutoModelForCausalLM.from_config({config})"
    code = "import transformers\n" + LOAD.replace(load, made_here) + LOOP
    done = start(tmp_path, made, code, "try", "--steps", "1")
    assert done.returncode == 1
    assert done.stdout.startswith("nothing was patched: no model reached a Trainer or came")
    (times,) = (line for line in done.stdout.splitlines() if line.startswith("ms a step"))
    assert times.split()[-2:] == ["-", "-"]  # the time between two steps
    assert "not patched  change" in done.stdout


@needs["accelerate"]
def test_a_trainer_has_one_note_and_a_loop_has_it_at_the_end(tmp_path: Path, made: Path) -> None:
    for name, code, how in (
        ("trainer", TRAIN, "in Trainer"),
        ("loop", LOOP + "sys.exit(0)\n", "at from_pretrained: no Trainer came"),
    ):
        (tmp_path / name).mkdir()
        done = start(tmp_path / name, made, LOAD + code, "run", steps=1)
        assert done.returncode == 0, done.stderr
        said = [line for line in done.stderr.splitlines() if line.startswith("liger_patch: ")]
        assert said == [f"liger_patch: LlamaForCausalLM is patched {how}"]


def test_a_script_that_raises_or_never_trains_is_one_sentence(tmp_path: Path, made: Path) -> None:
    for name, code, said in (
        ("raises", "raise LookupError('no data')", "train.py failed patched: LookupError: no data"),
        ("nothing", "print('hello')", "scripts/train.py never trains: it calls neither"),
    ):
        (tmp_path / name).mkdir()
        done = start(tmp_path / name, made, code, "try")
        assert done.returncode == 1
        assert done.stdout == ""
        assert said in done.stderr.splitlines()[-1]
        assert ("LookupError: no data" in done.stderr) == (name == "raises")


@pytest.mark.slow
@needs["accelerate"]
@pytest.mark.parametrize(
    "launcher",
    [
        "torch.distributed.run --nproc_per_node 1 -m",
        "accelerate.commands.launch --cpu --num_processes 1 -m",
    ],
)
def test_run_trains_to_the_end_under_a_launcher(launcher: str, tmp_path: Path, made: Path) -> None:
    launcher += " liger_patch"
    done = start(tmp_path, made, LOAD + TRAIN, "run", steps=2, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LlamaForCausalLM is patched in Trainer" in done.stderr
    assert "saved by __main__ ['scripts/train.py', '--lr', '0.1']" in done.stdout
    assert (tmp_path / "final/model.safetensors").exists()
    assert (tmp_path / "out/checkpoint-2").exists()
