"""Models in 4 bits with LoRA adapters beside eager: layers, checkpoints, Trainer, generation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import assert_no_worse, assert_same_bits
from lora_models import ALL, MLP, OUT, QKV, Calls, adapted
from slow_cases import slow_but
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from trainers import losses_and_norms
from training_step import Float64, assert_fused, assert_right, joined, step
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from liger_patch import apply_patch, patch_status, revert_patch  # noqa: E402
from liger_patch.deferred.tensor import DeferredLogits  # noqa: E402
from liger_patch.kernels import chunk_sizes, gated_mlp  # noqa: E402
from liger_patch.layers import checks  # noqa: E402
from liger_patch.readers.bitsandbytes import PACKED  # noqa: E402
from liger_patch.readers.quantized_weights import quantized_weight  # noqa: E402

# PEFT says so where an adapter touches a tied head.
pytestmark = pytest.mark.filterwarnings("ignore:Model (has|with) .tie_word_embeddings:UserWarning")
Q_AND_V = "q_proj", "v_proj"


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny model in bf16, from a folder."""
    config = tiny_model(request.param).config
    # on CPUs with AVX-512, bitsandbytes 0.50 takes the scales of wrong blocks for a layer whose
    # inputs are no multiple of 64
    config.hidden_size, config.intermediate_size = 64, 128
    config.head_dim = 64 // config.num_attention_heads
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def load(plain: Any, compute_dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """In 4 bits, but for the head and what is not a linear layer."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=["lm_head"],
    )
    model = type(plain).from_pretrained(
        plain.name_or_path, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    assert isinstance(model.model.layers[0].self_attn.q_proj, bnb.nn.Linear4bit)
    assert type(model.lm_head) is nn.Linear
    return model.train()


def with_lora(model: nn.Module, targets: Sequence[str] = Q_AND_V) -> Any:
    return adapted(base=model, target_modules=list(targets))


def for_training(plain: Any, targets: Sequence[str], use_reentrant: bool | None) -> Any:
    """In 4 bits with LoRA, with gradient checkpointing of this kind, or without for None."""
    how: dict[str, Any] = {"use_gradient_checkpointing": use_reentrant is not None}
    if use_reentrant is not None:
        how["gradient_checkpointing_kwargs"] = {"use_reentrant": use_reentrant}
    return with_lora(peft.prepare_model_for_kbit_training(load(plain), **how), targets)


def dequantized(model: Any) -> Any:
    """The same model with the quantized weights written out, in float64."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
                readable = quantized_weight(child, torch.bfloat16)
                assert readable is not None
                weight = readable.dequantized()
                plain = nn.Linear(child.in_features, child.out_features, bias=False)
                plain.weight = nn.Parameter(weight, requires_grad=False)
                setattr(module, name, plain)
    model.gradient_checkpointing_disable()  # Float64 is not there for what is computed again
    return model.double()


@pytest.mark.filterwarnings("ignore:liger_patch. PEFT.s own forward runs")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "targets", [pytest.param(Q_AND_V, marks=pytest.mark.slow), ALL], ids=["q and v", "all"]
)
@pytest.mark.parametrize("use_reentrant", slow_but([None, False], [None, False, True]))
def test_lora_on_a_4_bit_model_trains_as_eager(
    plain: Any,
    use_reentrant: bool | None,
    targets: Sequence[str],
    autocast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On kernels under autocast: without it, PEFT casts x to the adapters' float32."""
    batch, calls = tiny_batch(plain), Calls(monkeypatch)
    eager_model, model = (for_training(plain, targets, use_reentrant) for _ in range(2))
    apply_patch(model)
    eager = step(eager_model, batch, autocast=autocast)
    calls.clear()
    ours = step(model, batch, autocast=autocast)
    groups, by_peft = calls.taken(model)
    if autocast:
        expected = [QKV, OUT, MLP] if targets is ALL else [tuple(targets)]
        assert by_peft == []
        assert groups[: len(expected)] == expected
    else:
        assert groups == []
    assert_fused(model)
    truth = step(dequantized(eager_model), batch)
    assert_right(ours, eager, truth, torch.bfloat16)
    revert_patch(model)
    assert not isinstance(model(**batch).logits, DeferredLogits)


def test_a_4_bit_model_of_another_dtype_than_autocasts(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' default of bnb_4bit_compute_dtype is float32."""
    batch, calls = tiny_batch(plain), Calls(monkeypatch)
    model = apply_patch(with_lora(load(plain, torch.float32)))
    with pytest.warns(UserWarning, match="Set bnb_4bit_compute_dtype=torch.bfloat16$"):
        step(model, batch, autocast=True)
    groups, by_peft = calls.taken(model)
    assert groups == []
    reason = "the base computes in torch.float32, other products in torch.bfloat16"
    assert f"{len(by_peft)} in PEFT's own forward: {reason}" in str(patch_status(model))


def test_few_tokens_on_a_cpu_pack_no_weight(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes 0.50 packs a weight in such a call, and trains wrongly from then on."""
    batch, calls = tiny_batch(plain), Calls(monkeypatch)
    model = apply_patch(with_lora(load(plain), ALL))
    before = step(model, batch, autocast=True)
    calls.clear()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.eval()(input_ids=batch["input_ids"][:1, :4])
    assert calls.taken(model)[1] == []
    after = step(model.train(), batch, autocast=True)
    assert_same_bits(after, before)
    assert calls.taken(model)[1] == []


def test_a_weight_that_is_packed_for_inference_is_said(plain: Any) -> None:
    model = apply_patch(with_lora(load(plain), ALL))
    for layer in model.modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            layer.weight.quant_state.packing_format_for_cpu = True
    assert f"{2 * len(ALL)} in PEFT's own forward: {PACKED}" in str(patch_status(model))


@pytest.mark.skipif(checks.TOP_HOOKS is None, reason="torch 2.6 does not tell its hooks")
@pytest.mark.parametrize(
    ("targets", "use_reentrant"),
    slow_but(
        [(Q_AND_V, False), (ALL, True)], list(itertools.product([Q_AND_V, ALL], [False, True]))
    ),
)
def test_feed_forward_layers_of_a_4_bit_model_in_slices(
    plain: Any,
    targets: Sequence[str],
    use_reentrant: bool,
    monkeypatch: pytest.MonkeyPatch,
    record: Callable[..., list[int]],
) -> None:
    """With adapters, and without. On three batches: the largest error of one is luck."""
    monkeypatch.setattr(chunk_sizes, "LONG_BYTES", 0)
    monkeypatch.setattr(chunk_sizes, "SLICE_BYTES", 5 * 2 * 128 * 20)  # 20 tokens
    runs = record(gated_mlp, "_result_of_slices", lambda x, layer, slices, *_: len(slices))
    eager_model, model, wide = (for_training(plain, targets, use_reentrant) for _ in range(3))
    apply_patch(model)
    dequantized(wide)
    again = use_reentrant or plain.config.model_type == "gemma2"  # a norm keeps y
    found: list[list[Tensor]] = [[], [], []]
    for seed in range(3):
        batch = tiny_batch(plain, length=33, seed=seed)
        eager, ours = (step(each, batch, autocast=True) for each in (eager_model, model))
        assert runs == [4] * (4 if again else 2)
        runs.clear()
        for values, each in zip(found, joined(step(wide, batch), eager, ours), strict=True):
            values.extend(each.values())
    truth, eager, ours = ({"loss and gradients": torch.cat(values)} for values in found)
    assert_no_worse(ours, eager, truth, torch.bfloat16)


def test_trainer_trains_a_4_bit_model_as_eager(plain: Any, tmp_path: Path) -> None:
    def train(model: nn.Module, **how: Any) -> Tensor:  # (2, 2)
        options = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3, **how}
        return losses_and_norms(model, tmp_path, batch, gradient_accumulation_steps=2, **options)

    batch = tiny_batch(plain, batch=4)
    eager_model, model, wide = (for_training(plain, Q_AND_V, False) for _ in range(3))
    eager, ours = (train(each, bf16=True) for each in (eager_model, apply_patch(model)))
    assert patch_status(model).fused
    with Float64():
        truth = train(dequantized(wide))
    ours, eager, truth = ({"losses": e[:, 0], "norms": e[:, 1]} for e in (ours, eager, truth))
    # eager's two may be exact by luck
    assert_no_worse(ours, eager, truth, torch.bfloat16, eps=4)
