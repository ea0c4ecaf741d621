"""The benchmarks, but for their times: what they measure, and what they make of it."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import measure as measuring
import pytest
import torch
from attempts import Failure, Unsupported, attempt
from contenders import BUDGETS_MIB, OURS, contenders, eager, ours, step, sweep_contenders
from gradient_check import TOKENS, gradient_errors, is_right
from heads import HEADS, IGNORE_INDEX, SWEEP, SWEEP_TOKENS, Head, batch
from kinds_of_heads import KINDS as KINDS_OF_HEADS
from kinds_of_heads import Kind, run_kind
from linear_cross_entropy import run_case
from measure import Measurement, measure
from model_contenders import contenders as model_contenders
from model_contenders import shared_copy
from models import MODELS, Model
from picture import draw_all
from provenance import command_line
from report import FLOOR, RESULTS, readme_table, steps_table, sweep_table, terminal_table
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from liger_patch import apply_patch, patch_status

TINY = Head("tiny", 16, 64, 40, ignored=0.3)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PARAMETERS = {"Llama-3.2-1B": 1.24, "Qwen3-0.6B": 0.60, "Gemma-2-2B": 2.61, "Gemma-3-270M": 0.268}
(WITH_LORA,) = (m for m in MODELS if m.lora_rank is not None and not m.quantised)
PARAMETERS["Qwen3-8B"] = 8.19  # 10^9, as the models' cards give them


def load_training_step():
    """By its path: a module of the tests has the same name."""
    path = RESULTS.parent / "training_step.py"
    spec = importlib.util.spec_from_file_location("benchmarks_training_step", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


training_step = load_training_step()


def tiny(model: Model) -> Model:
    config = copy.deepcopy(model.config)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    for name, size in (sizes | heads).items():
        setattr(config, name, size)
    return replace(model, config=config, sequences=2, length=9)


def out_of_memory(*_) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024 GiB.")


def raising(*_) -> torch.Tensor:
    raise ValueError("weight is too long\nand a second line")


def wrong(hidden_states, weight, labels) -> torch.Tensor:
    return 1.1 * eager(TINY)(hidden_states, weight, labels)


def measured(case: str, contender: str, ms: float, **fields) -> dict:
    row = {"case": case, "tokens": 512, "contender": contender}
    numbers = dict.fromkeys(("ms", "ms_low", "ms_high", "host_ms"), ms)
    numbers |= {"peak_mib": 512.0, "floor_over_time": 1 / ms}
    return row | numbers | fields


REPORT = {
    "command": "python benchmarks/linear_cross_entropy.py",
    "date": "2026-01-01",
    "gpu": "GPU",
    "versions": {"torch": "2.6", "triton": "3.2"},
    "results": [
        measured("head", FLOOR, 1.0, peak_mib=0.0),
        measured("head", "eager", 2.0, gradient_errors=[0.002, 0.001]),
        {"case": "head", "tokens": 512, "contender": "TRL", "failure": "out of memory"},
        {
            "case": "head",
            "tokens": 512,
            "contender": "QuACK",
            "failure": "does not run: ValueError: no",
        },
        {
            "case": "head",
            "tokens": 512,
            "contender": "CCE",
            "wrong": True,
            "gradient_errors": [0.02, 0.25],
        },
        measured("head", "liger_patch", 1.5, gradient_errors=[0.002, 0.001]),
    ],
    "sweep": [
        measured("head", contender, 1.5, tokens=tokens)
        for tokens in (512, 1024)
        for contender in (FLOOR, "eager", "liger_patch")
    ],
}
STEPS = {
    **{name: REPORT[name] for name in ("command", "date", "gpu", "versions")},
    "steps": [
        {"model": "model", "contender": "eager", "ms": 300.0, "host_ms": 90.0, "peak_mib": 2048.0},
        {"model": "model", "contender": "Liger", "failure": "out of memory"},
        {"model": "model", "contender": "other", "wrong": True, "loss": 1.0, "gradient_norm": 2.0},
        {"model": "model", "contender": "liger_patch", "ms": 200.0, "peak_mib": 1024.0},
    ],
}


def test_cases_have_names_of_their_own():
    assert len({head.name for head in HEADS}) == len(HEADS)
    assert len({model.name for model in MODELS}) == len(MODELS)


def test_cases_are_heads_that_can_be_trained():
    for head in (*HEADS, *SWEEP):
        assert min(head.hidden_size, head.vocab_size, head.tokens) > 0, head
        assert 0 <= head.ignored < 1, head
        assert 0 <= head.mistaken < 1, head
        assert head.softcap is None or head.softcap > 0, head
        assert (head.tokens % 8, head.vocab_size % 8) == (0, 0), f"QuACK cannot take {head}"


def test_the_sweep_varies_only_the_tokens():
    heads = {head.name: head for head in HEADS}
    names = {head.name for head in SWEEP}
    assert names == {"Llama-3-8B", "Gemma-3-270M"}
    assert {(head.name, head.tokens) for head in SWEEP} == {
        (name, tokens) for name in names for tokens in SWEEP_TOKENS
    }
    assert all(head == replace(heads[head.name], tokens=head.tokens) for head in SWEEP)


def test_the_check_is_on_a_number_of_tokens_whose_inverse_is_rounded():
    assert TOKENS & (TOKENS - 1) != 0
    assert TOKENS % 8 == 0, "QuACK asks for it"


def test_linear_layers_of_a_quantised_model_are_in_4_bits_and_the_head_is_not():
    bnb = pytest.importorskip("bitsandbytes")
    (model,) = (m for m in MODELS if m.name.startswith("Llama-3.2-1B + QLoRA"))
    built = tiny(model).build("cpu")
    layers = [m for m in built.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(layers) >= 7 * tiny(model).config.num_hidden_layers
    assert type(built.get_base_model().lm_head) is nn.Linear
    trained = {name for name, p in built.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    apply_patch(built)
    built(**tiny(model).batch("cpu")).loss.backward()
    assert patch_status(built).fused


@pytest.mark.parametrize("kind", KINDS_OF_HEADS, ids=lambda kind: kind.name)
def test_every_kind_of_head_is_compared_with_eager_and_measured(kind: Kind):
    if kind.quantised:
        pytest.importorskip("bitsandbytes")
    small = replace(TINY, frozen=True, hidden_size=64)
    rows = run_kind(replace(kind, head=small), rounds=1, device="cpu")
    assert [row["contender"] for row in rows] == [FLOOR, "eager", "liger_patch"]
    assert all(row["ms"] > 0 for row in rows)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_models_have_the_sizes_of_their_names(model: Model):
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    weights = dict(built.named_parameters())
    if model.config.tie_word_embeddings:  # Transformers 5.0 does not tie on the meta device
        weights.pop("lm_head.weight", None)
    expected = PARAMETERS[re.split(r",| \+", model.name)[0]]
    assert sum(p.numel() for p in weights.values()) / 1e9 == pytest.approx(expected, rel=0.01)


def test_a_batch_plants_the_labels():
    head = replace(TINY, tokens=400, hidden_size=256, peak=40.0, mistaken=0.25)
    hidden_states, weight, labels = batch(head, device="cpu")
    assert hidden_states.shape == (400, 256)
    assert weight.shape == (64, 256)
    assert hidden_states.dtype == weight.dtype == torch.bfloat16
    assert hidden_states.requires_grad
    assert weight.requires_grad
    supervised = labels != IGNORE_INDEX
    assert supervised.float().mean().item() == pytest.approx(0.7, abs=0.1)
    logits = (hidden_states @ weight.t()).float()
    certain = supervised & (logits.softmax(-1).amax(-1) > 0.99)
    right = logits.argmax(-1) == labels
    assert right[certain].float().mean().item() == pytest.approx(0.75, abs=0.1)


def test_zipfs_labels_are_as_frequent_as_words():
    head = replace(TINY, tokens=4096, ignored=0.0, zipf=True)
    _, _, labels = batch(head, device="cpu")
    counts = labels.bincount(minlength=head.vocab_size)
    assert len(counts) == head.vocab_size
    share = math.log(2) / math.log(head.vocab_size)  # of the first rank
    assert counts[0].item() / head.tokens == pytest.approx(share, abs=0.02)
    assert (counts[:4].diff() < 0).all()


def test_a_short_load_runs_as_often_as_it_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measuring, "_ms", lambda function, kind: 9.0)
    assert measuring._times_to_last(lambda: None, 40.0, "cuda") == 5
    assert measuring._times_to_last(lambda: None, 5.0, "cuda") == 1
    monkeypatch.setattr(measuring, "_ms", lambda function, kind: 0.0)
    assert measuring._times_to_last(lambda: None, 40.0, "cuda") == measuring.MOST_LOADS


def test_a_batch_is_the_same_for_the_same_seed():
    first, again, other = (batch(TINY, device="cpu", seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_a_frozen_head_gets_no_gradient():
    inputs = batch(replace(TINY, frozen=True), device="cpu")
    assert not inputs[1].requires_grad
    assert len(step(eager(TINY), *inputs)) == 2


def test_eager_comes_first_and_the_sweep_has_fewer():
    names = list(contenders(TINY, compiled=False))
    assert names[0] == "eager"
    assert names[-4:] == [OURS, *(f"{OURS} {budget} MiB" for budget in BUDGETS_MIB)]
    assert set(sweep_contenders(TINY)) <= {"eager", "Liger-Kernel", "liger_patch"}


@pytest.mark.parametrize("head", [TINY, replace(TINY, softcap=5.0), replace(TINY, frozen=True)])
def test_the_check_passes_what_is_right_and_nothing_else(head: Head):
    losses = {"eager": eager(head), "liger_patch": ours(head), "wrong": wrong, "fails": raising}
    errors = gradient_errors(head, losses, device="cpu")
    assert {name for name in losses if is_right(errors[name], errors["eager"])} == {
        "eager",
        "liger_patch",
    }
    assert len(errors["eager"]) == (1 if head.frozen else 2)
    assert isinstance(errors["fails"], Failure)


def test_a_gradient_of_nan_is_not_right():
    assert not is_right([0.001, float("nan")], [0.001, 0.001])
    assert not is_right([float("nan"), 0.001], [0.001, 0.001])


def test_large_errors_are_right_where_eager_has_them_too():
    assert is_right([0.05], [0.03])
    assert not is_right([0.05], [0.02])
    assert not is_right([0.05], Failure("out of memory"))


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="from torch 2.13 on")
def test_pytorchs_own_loss_is_right_and_has_no_softcap():
    pytorch = contenders(TINY, compiled=False)["PyTorch"]
    errors = gradient_errors(TINY, {"eager": eager(TINY), "PyTorch": pytorch}, device="cpu")
    assert is_right(errors["PyTorch"], errors["eager"])
    capped = replace(TINY, softcap=5.0)
    with pytest.raises(Unsupported, match="no softcap"):
        contenders(capped, compiled=False)["PyTorch"](*batch(capped, device="cpu"))


def test_failures_are_told_in_words():
    assert attempt(lambda: 3) == 3
    assert attempt(out_of_memory) == Failure("out of memory")
    assert attempt(raising) == Failure("does not run: ValueError: weight is too long")

    def unsupported():
        raise Unsupported("no softcap")

    assert attempt(unsupported) == Failure("does not run: no softcap")


@pytest.mark.parametrize("device", DEVICES)
def test_a_contender_that_fails_is_reported_and_stops_nothing(device: str):
    losses = {
        "eager": eager(TINY),
        "huge": lambda *_: torch.empty(2**56, device=device),
        "raises": raising,
        "wrong": wrong,
        "liger_patch": ours(TINY),
    }
    rows = {row["contender"]: row for row in run_case(TINY, losses, rounds=1, device=device)}
    assert list(rows) == [FLOOR, *losses]
    for name in (FLOOR, "eager", "liger_patch"):
        assert rows[name]["ms"] > 0
        assert rows[name]["floor_over_time"] > 0
        assert rows[name]["host_ms"] > 0
    for name in ("eager", "liger_patch"):
        assert len(rows[name]["gradient_errors"]) == 2
        assert len(rows[name]["gradient_errors_power_of_two"]) == 2
    assert "ms" not in rows["huge"]
    assert device == "cpu" or rows["huge"]["failure"] == "out of memory"
    assert rows["raises"]["failure"] == "does not run: ValueError: weight is too long"
    assert rows["wrong"]["wrong"] is True
    assert rows["wrong"]["gradient_errors"][0] == pytest.approx(0.1, rel=0.1)
    assert json.loads(json.dumps(list(rows.values()))) == list(rows.values())


def test_a_case_without_room_for_its_inputs_is_reported():
    huge = replace(TINY, vocab_size=2**56)
    (row,) = run_case(huge, {"eager": eager(huge)}, rounds=1, device="cpu")
    assert row["contender"] == FLOOR
    assert row["failure"].startswith("does not run: RuntimeError")


@pytest.mark.parametrize("call", [4, 7], ids=["in its turn", "after its turns"])
def test_a_function_that_fails_between_others_has_no_more_turns(call: int):
    calls = []

    def fails_late():
        calls.append(1)
        if len(calls) == call:
            out_of_memory()

    results = measure({"late": fails_late, "fine": lambda: None}, rounds=3, device="cpu")
    assert results["late"] == Failure("out of memory")
    assert isinstance(results["fine"], Measurement)
    assert len(calls) == call


def test_the_command_says_what_was_measured_but_not_where_it_went():
    arguments = argparse.Namespace(
        part=None, case="Gemma-2", rounds=3, no_compile=True, output=Path("somewhere")
    )
    assert command_line("/a/b/linear_cross_entropy.py", arguments) == (
        "python benchmarks/linear_cross_entropy.py --case Gemma-2 --rounds 3 --no-compile"
    )


@pytest.mark.parametrize("model", [MODELS[0], WITH_LORA], ids=lambda model: model.name)
def test_contenders_of_a_model_share_weights_and_nothing_else(model: Model):
    built = tiny(model).build("cpu")
    own = shared_copy(built)
    weights = list(built.parameters())
    assert all(a is b for a, b in zip(own.parameters(), weights, strict=True))
    assert {p.dtype for p in weights} == {torch.bfloat16}
    modules = [(a, b) for a, b in zip(own.modules(), built.modules(), strict=True)]
    assert all(a is not b for a, b in modules)
    apply_patch(own)
    inputs = tiny(model).batch("cpu")
    assert type(built(**inputs).logits) is torch.Tensor


@pytest.mark.parametrize("model", [MODELS[0], WITH_LORA], ids=lambda model: model.name)
def test_a_model_is_run_eager_and_patched(model: Model):
    rows = training_step.run_model(tiny(model), rounds=1, device="cpu")
    rows = {row["contender"]: row for row in rows}
    assert next(iter(rows)) == "eager"
    assert rows["liger_patch"]["loss"] == pytest.approx(rows["eager"]["loss"], rel=1e-3)
    for name in ("eager", "liger_patch"):
        assert rows[name]["ms"] > 0
        assert rows[name]["gradient_norm"] > 0


def test_a_model_whose_loss_differs_is_wrong_and_one_that_fails_is_reported(monkeypatch):
    def with_others(model: nn.Module, **options):
        def halved():
            loss = model_contenders(model, **options)["eager"]()
            return lambda batch: loss(batch) / 2

        return {**model_contenders(model, **options), "halved": halved, "fails": lambda: raising}

    monkeypatch.setattr(training_step, "contenders", with_others)
    rows = training_step.run_model(tiny(MODELS[0]), rounds=1, device="cpu")
    rows = {row["contender"]: row for row in rows}
    assert rows["halved"]["wrong"] is True
    assert "ms" not in rows["halved"]
    assert rows["fails"]["failure"] == "does not run: ValueError: weight is too long"
    assert "ms" in rows["liger_patch"]


def test_what_liger_kernel_does_to_all_models_is_undone_for_the_others(tmp_path, monkeypatch):
    stand_in = tmp_path / "liger_kernel" / "transformers"
    stand_in.mkdir(parents=True)
    for folder in (stand_in, stand_in.parent):
        (folder / "__init__.py").touch()
    (stand_in / "monkey_patch.py").write_text(
        "from transformers.models.llama import modeling_llama\n"
        "rotary, calls = modeling_llama.apply_rotary_pos_emb, []\n"
        "def counting(*arguments, **options):\n"
        "    calls.append(1)\n"
        "    return rotary(*arguments, **options)\n"
        "def _apply_liger_kernel_to_instance(model, rope=True, **kernels):\n"
        "    if rope:\n"
        "        modeling_llama.apply_rotary_pos_emb = counting\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    case = tiny(MODELS[0])
    rotary = modeling_llama.apply_rotary_pos_emb
    losses = {n: make() for n, make in model_contenders(case.build("cpu")).items()}
    from liger_kernel.transformers.monkey_patch import calls

    called = {}
    for name, loss in losses.items():
        calls.clear()
        loss(case.batch("cpu"))
        called[name] = len(calls)
        assert modeling_llama.apply_rotary_pos_emb is rotary
    assert called == {
        "eager": 0,
        "Liger, loss only": 0,
        "Liger, all kernels": 2,
        "liger_patch": 0,
    }


def test_tables_name_every_outcome():
    table = readme_table(REPORT)
    line = "| head | 1.0 | 2.0 / 0.5 | out of memory | does not run | gradient off by 25.0% |"
    assert f"{line} 1.5 / 0.5 |" in table
    assert "| head, 1024 tokens | 1.5 | 1.5 / 0.5 | 1.5 / 0.5 |" in sweep_table(REPORT)
    assert "| model | 300.0 / 2.0 | out of memory | wrong | 200.0 / 1.0 |" in steps_table(STEPS)
    said = terminal_table(REPORT["results"])
    assert "does not run: ValueError: no" in said
    assert "wrong gradients" in said
    assert "0.200%, 0.100%" in said
    said = training_step.terminal_steps_table(STEPS["steps"])
    assert "out of memory" in said
    assert "wrong" in said


DRAWN = ("linear_cross_entropy", "training_step", "qlora_step")  # kinds_of_heads is a table alone


@pytest.mark.parametrize(
    "report",
    [
        REPORT,
        STEPS,
        *(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in DRAWN),
    ],
    ids=["heads", "models", *DRAWN],
)
def test_pictures_are_drawn_of_what_was_measured(report: dict, tmp_path: Path):
    drawn = draw_all(report, tmp_path / "report.json")
    parts = [key for key in ("results", "sweep", "steps") if report.get(key)]
    assert len(set(drawn)) == len(parts) > 0
    assert all(path.stat().st_size > 10_000 for path in drawn)


def test_nothing_is_drawn_where_nothing_ran(tmp_path: Path):
    failed = {"case": "head", "contender": "eager", **asdict(Failure("out of memory"))}
    report = {**REPORT, "results": [REPORT["results"][0], failed], "sweep": []}
    assert draw_all(report, tmp_path / "report.json") == []
