"""The benchmark of whole training steps: its models, and what it does to them."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from benchmarks import training_step
from benchmarks.__main__ import main
from benchmarks.heads import IGNORE_INDEX
from benchmarks.model_contenders import (
    FLEX_LAYERS,
    MASKED,
    NAMES,
    NORMS_LEFT,
    shared_copy,
    some_contenders,
)
from benchmarks.model_contenders import contenders as model_contenders
from benchmarks.models import FULL_WIDTH, MODELS, OTHER_ROWS, Model
from benchmarks.names import LOWER_BOUND
from benchmarks.training_step import run_model
from liger_patch import apply_patch, patch_status
from liger_patch.layers import masked_attention
from liger_patch.layers.replace import count_layers

PARAMETERS = {"Llama-3.2-1B": 1.24, "Qwen3-0.6B": 0.60, "Gemma-2-2B": 2.61, "Gemma-3-270M": 0.268}
(WITH_LORA,) = (m for m in MODELS if m.lora_rank is not None and not m.quantized)
PARAMETERS["Qwen3-8B"] = 8.19  # 10^9, as the models' cards give them


def tiny(model: Model) -> Model:
    config = copy.deepcopy(model.config)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    for name, size in (sizes | heads).items():
        setattr(config, name, size)
    return replace(model, config=config, sequences=2, length=9)


def raising(*_) -> torch.Tensor:
    raise ValueError("weight is too long\nand a second line")


def test_models_have_names_of_their_own():
    assert len({model.name for model in MODELS}) == len(MODELS)


def test_linear_layers_of_a_quantized_model_are_in_4_bits_and_the_head_is_not():
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
    rows = run_model(tiny(model), rounds=1, device="cpu")
    assert rows[0]["contender"] == "eager"  # no lower bound of 4-bit matmuls


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_models_have_the_sizes_of_their_names(model: Model):
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    weights = dict(built.named_parameters())
    if model.config.tie_word_embeddings:  # Transformers 5.0 does not tie on the meta device
        weights.pop("lm_head.weight", None)
    expected = PARAMETERS[re.split(r",| \+", model.name)[0]]
    assert sum(p.numel() for p in weights.values()) / 1e9 == pytest.approx(expected, rel=0.01)


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
    rows = run_model(tiny(model), rounds=1, device="cpu")
    rows = {row["contender"]: row for row in rows}
    assert list(rows)[:2] == [LOWER_BOUND, "eager"]
    assert rows[LOWER_BOUND]["ms"] > 0
    assert rows["liger_patch"]["loss"] == pytest.approx(rows["eager"]["loss"], rel=1e-3)
    for name in ("eager", "liger_patch", "liger_patch, layers"):
        assert rows[name]["ms"] > 0
        assert rows[name]["gradient_norm"] > 0


@pytest.mark.parametrize("model", FULL_WIDTH, ids=lambda model: model.name)
def test_the_lower_bound_has_as_many_operations_as_eagers_matmuls(model: Model):
    """Except those of the head for tokens that are not supervised."""
    built, batch = tiny(model).build("cpu"), tiny(model).batch("cpu")
    batch["labels"][:, 0] = batch["input_ids"][:, 0]  # which nothing predicts
    inner = built if model.lora_rank is None else built.get_base_model()

    def step() -> None:
        built(**batch).loss.backward()

    def operations(function: Callable[[], object]) -> int:
        with FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops()

    predicted = [label for row in batch["labels"].tolist() for label in row[1:]]
    left_out = batch["labels"].numel() - sum(label != IGNORE_INDEX for label in predicted)
    sizes = inner.config.hidden_size * inner.config.vocab_size
    products = 3 if inner.get_output_embeddings().weight.requires_grad else 2
    bound = training_step.step_bound(step, built, batch)
    assert left_out > len(batch["labels"])
    assert operations(bound) == operations(step) - 2 * products * left_out * sizes > 0


def test_a_lower_bound_that_fails_is_reported_and_stops_nothing(monkeypatch: pytest.MonkeyPatch):
    def failing(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(training_step, "step_matmuls", failing)
    rows = run_model(tiny(MODELS[0]), rounds=1, device="cpu")
    assert rows[0] == {
        "model": MODELS[0].name,
        "contender": LOWER_BOUND,
        "failure": "out of memory",
    }
    assert all("ms" in row for row in rows if row["contender"] in ("eager", "liger_patch"))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")
def test_steps_of_trl_are_run_with_its_head_and_with_ours():
    pytest.importorskip("trl")
    from benchmarks.sft_step import contenders

    rows = run_model(tiny(MODELS[0]), rounds=1, device="cpu", of=contenders)
    rows = {row["contender"]: row for row in rows}
    assert list(rows) == ["TRL", "liger_patch", "liger_patch, layers"]
    assert rows["liger_patch"]["loss"] == pytest.approx(rows["TRL"]["loss"], rel=1e-3)
    assert all(row["ms"] > 0 for row in rows.values())


def test_a_model_whose_loss_differs_is_wrong_and_one_that_fails_is_reported():
    def with_others(model: nn.Module, **options):
        def halved():
            loss = model_contenders(model, **options)["eager"]()
            return lambda batch: loss(batch) / 2

        return {**model_contenders(model, **options), "halved": halved, "fails": lambda: raising}

    rows = run_model(tiny(MODELS[0]), rounds=1, device="cpu", of=with_others)
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
        "liger_patch, layers": 0,
    }


def test_contenders_can_be_chosen_by_name():
    built = tiny(MODELS[0]).build("cpu")
    chosen = some_contenders(["torch.compile", "liger_patch, layers"], built, compiled=True)
    assert list(chosen) == ["eager", "torch.compile", "liger_patch, layers"]
    everything = some_contenders(None, built, compiled=False)
    assert list(everything) == list(model_contenders(built))
    assert list(some_contenders([FLEX_LAYERS], built, compiled=False)) == ["eager"]  # not Llama's


def test_every_contender_has_a_name_that_can_be_asked_for(monkeypatch: pytest.MonkeyPatch):
    module = sys.modules[model_contenders.__module__]
    monkeypatch.setattr(module, "find_spec", lambda name: True)  # Liger-Kernel is not installed
    found = set()
    for model in (each for each in MODELS if not each.quantized):  # these need bitsandbytes
        found |= model_contenders(tiny(model).build("cpu"), compiled=True).keys()
        found |= model_contenders(tiny(model).build("cpu"), masked=True).keys()
    assert found == set(NAMES)


def test_a_contender_is_not_left_out_in_silence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit, match="needs --compile"):
        main(["training_step", "--contender", "torch.compile"])
    monkeypatch.setattr(training_step, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="needs liger-kernel"):
        main(["training_step", "--contender", "Liger, all kernels"])
    with pytest.raises(SystemExit):
        main(["training_step", "--contender", "ours"])


@pytest.mark.parametrize("model", OTHER_ROWS, ids=lambda model: model.name)
def test_masks_of_packed_and_padded_rows_can_be_left_in(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    read = []

    def segments_of(*arguments: Any) -> None:
        read.append(1)

    monkeypatch.setattr(masked_attention, "serves_flash_attention", lambda *_: True)
    monkeypatch.setattr(masked_attention, "segments_of", segments_of)
    case = replace(tiny(model), length=950)  # more than a sequence has
    made = model_contenders(case.build("cpu"), masked=True)
    for name, expected in {"liger_patch, layers": 1, MASKED: 0, "liger_patch": 0}.items():
        read.clear()
        made[name]()(case.batch("cpu"))
        assert len(read) == expected, name


def test_packed_rows_hold_several_sequences_and_padded_ones_end_early():
    packed, padded = (replace(each, length=2048, sequences=3) for each in OTHER_ROWS[:2])
    batch = packed.batch("cpu")
    places, labels = batch["position_ids"], batch["labels"]
    starts = places == 0
    assert 2 < starts.sum() / 3 < 12
    assert (places.diff()[~starts[:, 1:]] == 1).all()
    assert (labels[starts] == -100).all()
    batch = padded.batch("cpu")
    mask, labels = batch["attention_mask"], batch["labels"]
    assert mask.sum(1).tolist() == [512, 1280, 2048]
    assert (labels[mask == 0] == -100).all()
    assert (labels[mask == 1] != -100).any()


def test_flex_attention_is_a_contender_where_windows_slide():
    gemma = next(model for model in MODELS if model.name.startswith("Gemma-3"))
    built = tiny(gemma).build("cpu")
    loss: Any = model_contenders(built)[FLEX_LAYERS]()
    (own,) = loss.args
    assert own.config._attn_implementation == "flex_attention"
    assert built.config._attn_implementation == "sdpa"
    assert patch_status(own).patched
    assert FLEX_LAYERS not in model_contenders(tiny(MODELS[0]).build("cpu"))


def test_layers_are_compiled_apart():
    """Nothing is compiled before the first call: that the layers are set up to be is seen."""
    built = tiny(MODELS[0]).build("cpu")
    make = model_contenders(built, compiled=True)["liger_patch, layers, compiled by layer"]
    compiled = make().args[0]
    assert all(layer._compiled_call_impl is not None for layer in compiled.model.layers)
    assert compiled._compiled_call_impl is None
    assert all(layer._compiled_call_impl is None for layer in built.model.layers)
    others = model_contenders(built, compiled=True)[NORMS_LEFT]().args[0]
    assert all(layer._compiled_call_impl is not None for layer in others.model.layers)
    assert count_layers(compiled)["rms_norm"] > 0
    assert count_layers(others) == {**count_layers(compiled), "rms_norm": 0}
