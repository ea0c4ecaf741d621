"""The longest row of a model in memory is that of ``estimate`` for its config and options."""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from slow_cases import slow_but
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.models import Model
from liger_patch import apply_patch, patch_status, quantize_base, quantize_experts
from liger_patch.estimate.contenders import EAGER, OURS, OURS_HEAD, Contender
from liger_patch.estimate.estimate import GIB, longest_rows
from liger_patch.estimate.model import EXPERTS_IN_4_BITS, TrainingStep, build
from liger_patch.memory import longest_row

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning"
)
CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
)


def model_of(**options: Any) -> Any:
    return Model("tiny", copy.deepcopy(CONFIG), 1, **options).build("cpu")


def in_status(model: Any) -> str:
    return dict(patch_status(model).rows)["longest row"]


def estimated(contender: Contender, config: Any = CONFIG, **options: Any) -> int:
    """Return the tokens for a GPU of 16 GiB."""
    config, step = copy.deepcopy(config), TrainingStep(adapter_dtype=torch.bfloat16, **options)
    _, sizes = build(config, step)
    return longest_rows(config, step, contender, sizes, GIB, [16])[16].tokens


def test_all_weights_of_a_model_patched_or_not() -> None:
    model = model_of()
    random = torch.get_rng_state()
    assert longest_row(model, gib=16) == estimated(EAGER)
    for layers, contender in ((True, OURS), (False, OURS_HEAD)):
        apply_patch(model, layers=layers)
        assert "longest row" not in dict(patch_status(model).rows)
        tokens = longest_row(model, gib=16)
        assert tokens == estimated(contender)
        assert in_status(model).startswith(f"1 x {tokens:,} tokens in 16 GiB, estimated for bfl")
    assert torch.equal(torch.get_rng_state(), random)
    assert model.config._attn_implementation == "sdpa"
    assert model.device.type == "cpu"


@pytest.mark.slow
def test_a_bar_counts_the_steps_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of()
    longest_row(model, gib=16)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    longest_row(model, gib=16)
    shown = capsys.readouterr().err
    assert "tracing eager, 16 tokens:  20%" in shown
    assert "4/5" in shown


def test_options_are_read_where_they_are() -> None:
    model = model_of(lora_rank=4)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_patch(model, chunk_mib=2, checkpoint_offload=0.5)
    options = {"lora_rank": 4, "checkpointing": True, "chunk_mib": 2, "checkpoint_offload": True}
    options |= {"host_gib": 0.5, "batch": 3, "optimizer": "adamw-8bit"}
    tokens = longest_row(model, gib=16, batch=3, optimizer="adamw-8bit")
    assert tokens == estimated(OURS, **options)
    assert in_status(model).startswith(f"3 x {tokens:,} tokens in 16 GiB")
    assert "LoRA of rank 4, checkpointing, offloaded by liger_patch to 0.5" in in_status(model)
    assert longest_row(model, gib=16, autocast=False, reserve_gib=2) < tokens * 3


def test_a_base_in_fp8() -> None:
    model = apply_patch(quantize_base(model_of(lora_rank=4)))
    tokens = longest_row(model, gib=16)
    assert tokens == estimated(OURS, lora_rank=4, fp8_base=True)
    assert "base in FP8" in in_status(model)


@pytest.mark.skipif(
    transformers.__version__.startswith("5.0."),
    reason="it asks which experts have tokens: none have values here",
)
@pytest.mark.parametrize("quant_type", slow_but(["nf4"], [None, "nf4", "mxfp4"]))
def test_adapters_on_experts(quant_type: str | None) -> None:
    peft = pytest.importorskip("peft")
    if quant_type == "nf4":
        pytest.importorskip("bitsandbytes")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Qwen3MoeConfig(**{**CONFIG.to_diff_dict(), "model_type": "qwen3_moe", **sizes})
    model = Qwen3MoeForCausalLM(copy.deepcopy(config)).bfloat16()
    targets: dict[str, Any] = {"target_modules": ["q_proj"]}
    targets["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=4, **targets), autocast_adapter_dtype=False
    )
    if quant_type is not None:
        quantize_experts(model, "cpu", quant_type=quant_type)
    apply_patch(model)
    options = {"lora_parameters": tuple(targets["target_parameters"]), "lora_targets": ("q_proj",)}
    options["expert_bytes"] = EXPERTS_IN_4_BITS.get(quant_type or "")
    assert longest_row(model, gib=16) == estimated(OURS, config, lora_rank=4, **options)
    assert ("experts in 4 bits" in in_status(model)) == (quant_type is not None)


def test_a_loss_that_is_not_fused_holds_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply_patch(model_of(), layers=False)
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    assert longest_row(model, gib=16) == estimated(EAGER)


@torch.inference_mode()
def test_models_of_other_threads_train_on() -> None:
    """What a trace puts in the place of kernels has uninitialized results."""
    losses, done = [], threading.Event()
    with torch.inference_mode(False):
        model, other = apply_patch(model_of()), apply_patch(model_of())
        ids = torch.arange(24).view(2, 12)
        mask = (ids != 10).long()

    def train() -> None:
        while not (done.is_set() and losses):
            loss = other(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
            loss.backward()
            other.zero_grad()
            losses.append(loss.item())

    thread = threading.Thread(target=train)
    thread.start()
    longest_row(model, gib=16)
    done.set()
    thread.join()
    assert len(set(losses)) == 1


def test_weights_in_4_bits() -> None:
    pytest.importorskip("bitsandbytes")
    model = apply_patch(model_of(lora_rank=4, quantized=True))
    expected = estimated(OURS, lora_rank=4, bits=4, double_quant=True)
    assert longest_row(model, gib=16) == expected


@pytest.mark.parametrize(
    ("adapters", "options"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, {}),
        ({"target_modules": ["down_proj"], "layers_to_transform": [1]}, {}),
        ({"target_modules": "all-linear", "lora_dropout": 0.25}, {"lora_dropout": 0.25}),
    ],
)
def test_adapters_on_some_layers_and_with_dropout(
    adapters: dict[str, Any], options: dict[str, Any]
) -> None:
    model = apply_patch(with_adapters(**adapters).bfloat16())
    targets = tuple(
        n for n, each in model.get_base_model().named_modules() if hasattr(each, "lora_A")
    )
    assert 0 < len(targets) < 15
    expected = estimated(OURS, lora_rank=4, lora_targets=targets, **options)
    assert longest_row(model, gib=16) == expected
    # dropout keeps nothing on kernels
    assert (expected == estimated(OURS, lora_rank=4)) == bool(options)


def frozen_in_part() -> Any:
    model = model_of()
    model.lm_head.requires_grad_(False)
    return model


def with_adapters(**options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    given = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return get_peft_model(LlamaForCausalLM(copy.deepcopy(CONFIG)), LoraConfig(**given | options))


def in_fp8() -> Any:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    model = model_of()
    size = CONFIG.hidden_size
    model.model.layers[1].self_attn.q_proj = FP8Linear(size, size, block_size=(16, 16))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (in_fp8, "or by bitsandbytes or .*, got a FP8Linear whose"),
        (
            frozen_in_part,
            "model must train all weights, or LoRA adapters of one rank on linear",
        ),
        (lambda: with_adapters(target_modules=["q_proj", "lm_head"]), "but not on the head: "),
        (lambda: with_adapters(rank_pattern={"q_proj": 2}), "of one rank on linear layers"),
        (lambda: with_adapters(use_dora=True), "of one rank on linear layers"),
        (
            lambda: LlamaForSequenceClassification(copy.deepcopy(CONFIG)),
            "model must be a LlamaForCausalLM, got",
        ),
    ],
)
def test_a_model_that_is_not_estimated_has_a_reason(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        longest_row(make(), gib=16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "gib must be given where a model is not on one CUDA GPU, got one on cpu"),
        ({"gib": 1}, "gib must be a finite number > reserve_gib=1.0, got 1"),
        ({"gib": math.nan}, "gib must be a finite number > reserve_gib=1.0, got nan"),
        ({"gib": "24"}, "gib must be a finite number > reserve_gib=1.0, got '24'"),
        ({"gib": True, "reserve_gib": 0}, "gib must be a finite number > reserve_gib=0, got True"),
        ({"gib": 8, "reserve_gib": -1}, "reserve_gib must be a finite number >= 0, got -1"),
        ({"gib": 8, "reserve_gib": math.nan}, "reserve_gib must be a finite number >= 0, got nan"),
        ({"gib": 8, "reserve_gib": "1"}, "reserve_gib must be a finite number >= 0, got '1'"),
        ({"gib": 16, "batch": 0}, "batch must be a whole number >= 1, got 0"),
        ({"gib": 16, "batch": "2"}, "batch must be a whole number >= 1, got '2'"),
        ({"gib": 16, "batch": None}, "batch must be a whole number >= 1, got None"),
        ({"gib": 16, "batch": 1.5}, "batch must be a whole number >= 1, got 1.5"),
        ({"gib": 16, "batch": True}, "batch must be a whole number >= 1, got True"),
        ({"gib": 16, "optimizer": "sgd"}, "optimizer must be one of none, adamw, .*, got 'sgd'"),
        ({"gib": 16, "optimizer": []}, r"optimizer must be one of none, adamw, .*, got \[\]"),
        ({"gib": 16, "autocast": "no"}, "autocast must be True or False, got 'no'"),
    ],
)
def test_an_argument_out_of_range_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        longest_row(LlamaForCausalLM(copy.deepcopy(CONFIG)), **options)


def test_the_status_says_where_positions_end_and_where_nothing_fits() -> None:
    model = apply_patch(model_of())
    tokens = longest_row(model, gib=16, reserve_gib=0)
    assert tokens > CONFIG.max_position_embeddings
    assert in_status(model).endswith("; the model's positions end at 2,048")
    assert longest_row(model, gib=16, batch=10**9) == 0
    status = in_status(model)
    assert status.startswith("not even 1,000,000,000 x 1 tokens fit 16 GiB, estimated for bf")
    assert "positions" not in status


def test_a_loop_over_tokens_is_not_traced_at_long_lengths() -> None:
    config = MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=131, state_size=4)
    model: Any = MambaForCausalLM(config)
    with pytest.raises(ValueError, match="model must make as many tensors at any length, got Mam"):
        longest_row(model.to(torch.bfloat16), gib=16)


def test_errors_name_the_argument_model() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"num_layers": 1, "d_model": 64, "d_kv": 8, "d_ff": 64, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=512, **sizes))
    with pytest.raises(ValueError, match=r"^model must be a decoder that generates text"):
        longest_row(model, gib=16)


@pytest.mark.gpu
def test_a_gpu_has_what_is_free_there() -> None:
    model = apply_patch(model_of().to("cuda"))
    most = torch.cuda.get_device_properties(0).total_memory / GIB
    assert 0 < longest_row(model) <= longest_row(model, gib=most)
