"""bitsandbytes on the CPU: 4-bit models, and heads that are quantized themselves."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from exactness import assert_no_worse
from lora_models import ALL, MLP, OUT, QKV, Calls
from slow_cases import slow_but
from tiny_models import Batch, tiny_batch, tiny_model
from torch import nn
from trainers import QUIET
from training_step import joined
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from liger_patch import apply_patch, patch_status, registry, revert_patch
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.kernels import sliced
from liger_patch.kernels.head import logits as head_logits
from liger_patch.layers import checks
from liger_patch.patch.forward import record_of
from liger_patch.patch.offload import CheckpointOffload

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from transformers import Trainer, TrainingArguments  # noqa: E402

from liger_patch.integrations import bitsandbytes  # noqa: E402

ROWS = {row.model_type: row for row in registry.available()}
# peft 0.21 calls Transformers' gradient_checkpointing_enable, which 5.23 has renamed.
# PEFT says so where an adapter touches a tied head.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:Model (has|with) .tie_word_embeddings:UserWarning"),
]
FALLBACK = "liger_patch computes ordinary logits"


class Checkpoint(NamedTuple):
    model: PreTrainedModel
    folder: Path


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    config = tiny_model(ROWS[request.param]).config
    # of other sizes bitsandbytes 0.50 takes the scales of other blocks, on CPUs with AVX-512
    config.hidden_size, config.intermediate_size = 64, 128
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return Checkpoint(model, folder)


def load(checkpoint: Checkpoint, compute_dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """In 4 bits, but for the head and what is not a linear layer."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=["lm_head"],
    )
    model = type(checkpoint.model).from_pretrained(
        checkpoint.folder, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    assert isinstance(model.model.layers[0].self_attn.q_proj, bnb.nn.Linear4bit)
    assert type(model.lm_head) is nn.Linear
    return model


def with_lora(model: nn.Module, targets: Sequence[str] = ("q_proj", "v_proj")) -> nn.Module:
    torch.manual_seed(1)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=list(targets), init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


def results(model: nn.Module, batch: Batch, autocast: bool = False) -> dict[str, Any]:
    model.train()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert any(gradient.any() for gradient in gradients.values())
    return {"loss": loss.detach(), **gradients}


def dequantized(model: nn.Module) -> nn.Module:
    """The same model with the quantized weights written out, in float64."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
                readable = bitsandbytes.quantized_weight(child, torch.bfloat16)
                assert readable is not None
                weight = readable.rows(0, child.out_features)
                plain = nn.Linear(child.in_features, child.out_features, bias=False)
                plain.weight = nn.Parameter(weight, requires_grad=False)
                setattr(module, name, plain)
    return model.double()


@pytest.mark.filterwarnings("ignore:liger_patch. PEFT.s own forward runs")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "targets",
    [pytest.param(("q_proj", "v_proj"), marks=pytest.mark.slow), ALL],
    ids=["q and v", "all"],
)
@pytest.mark.parametrize("use_reentrant", slow_but([None, False], [None, False, True]))
def test_lora_on_a_4_bit_model_trains_as_eager(
    checkpoint: Checkpoint,
    use_reentrant: bool | None,
    targets: Sequence[str],
    autocast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On kernels under autocast: without it, PEFT casts x to the adapters' float32."""
    batch, calls = tiny_batch(checkpoint.model), Calls(monkeypatch)

    def make() -> nn.Module:
        checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
        model = peft.prepare_model_for_kbit_training(
            load(checkpoint),
            use_gradient_checkpointing=use_reentrant is not None,
            **({} if use_reentrant is None else checkpointing),
        )
        return with_lora(model, targets)

    eager_model, model = make(), apply_patch(make())
    eager = results(eager_model, batch, autocast)
    calls.clear()
    ours = results(model, batch, autocast)
    groups, by_peft = calls.taken(model)
    if autocast:
        expected = [QKV, OUT, MLP] if targets is ALL else [tuple(targets)]
        assert by_peft == []
        assert groups[: len(expected)] == expected
    else:
        assert groups == []
    assert (patch_status(model).fused, patch_status(model).reason) == (True, None)
    assert not any(p.grad is not None for n, p in model.named_parameters() if "lora_" not in n)
    truth = results(dequantized(eager_model), batch)
    truth, eager, ours = joined(truth, eager, ours)
    assert_no_worse(ours, eager, truth, torch.bfloat16)
    revert_patch(model)
    assert not isinstance(model(**batch).logits, DeferredLogits)


def test_a_4_bit_model_of_another_dtype_than_autocasts(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' default of bnb_4bit_compute_dtype is float32."""
    batch, calls = tiny_batch(checkpoint.model), Calls(monkeypatch)
    model = apply_patch(with_lora(load(checkpoint, torch.float32)))
    with pytest.warns(UserWarning, match="Set bnb_4bit_compute_dtype=torch.bfloat16$"):
        results(model, batch, autocast=True)
    groups, by_peft = calls.taken(model)
    assert groups == []
    reason = "the base computes in torch.float32, other products in torch.bfloat16"
    assert f"{len(by_peft)} in PEFT's own forward: {reason}" in str(patch_status(model))


@pytest.mark.gpu
def test_generation_on_a_gpu_dequantizes_no_weight(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bitsandbytes has kernels for few tokens."""
    model = apply_patch(with_lora(load(checkpoint), ALL)).cuda().eval()
    calls, ids = Calls(monkeypatch), torch.ones(2, 17, dtype=torch.long, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        model(input_ids=ids[:, :1])  # gradients are recorded
        assert calls.taken(model)[1] == []
        with torch.no_grad():
            model(input_ids=ids)
            assert calls.taken(model)[1] == []
            model(input_ids=ids[:, :16])
            groups, by_peft = calls.taken(model)
    assert (groups, len(by_peft)) == ([], 2 * len(ALL))


def test_few_tokens_on_a_cpu_pack_no_weight(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bitsandbytes 0.50 packs a weight in such a call, and trains wrongly from then on."""
    batch, calls = tiny_batch(checkpoint.model), Calls(monkeypatch)
    model = apply_patch(with_lora(load(checkpoint), ALL))
    before = results(model, batch, autocast=True)
    calls.clear()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.eval()(input_ids=batch["input_ids"][:1, :4])
    assert calls.taken(model)[1] == []
    after = results(model.train(), batch, autocast=True)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert calls.taken(model)[1] == []


def test_a_weight_that_is_packed_for_inference_is_said(checkpoint: Checkpoint) -> None:
    model = apply_patch(with_lora(load(checkpoint), ALL))
    for layer in model.modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            layer.weight.quant_state.packing_format_for_cpu = True
    said = "bitsandbytes packed the base's weight for inference on a CPU"
    assert f"{2 * len(ALL)} in PEFT's own forward: {said}" in str(patch_status(model))


@pytest.mark.skipif(checks.TOP_HOOKS is None, reason="torch 2.6 does not tell its hooks")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ALL], ids=["q and v", "all"])
def test_feed_forward_layers_of_a_4_bit_model_in_slices(
    checkpoint: Checkpoint,
    targets: Sequence[str],
    use_reentrant: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With adapters, and without."""
    batch, runs = tiny_batch(checkpoint.model, length=33), []
    monkeypatch.setattr(sliced, "LONG_BYTES", 0)
    monkeypatch.setattr(sliced, "SLICE_BYTES", 5 * 2 * 128 * 20)  # 20 tokens
    forward = sliced._Run.forward

    def counted(ctx: Any, *arguments: Any) -> Any:
        runs.append(len(arguments[3]))
        return forward(ctx, *arguments)

    monkeypatch.setattr(sliced._Run, "forward", staticmethod(counted))

    def make() -> nn.Module:
        model = peft.prepare_model_for_kbit_training(
            load(checkpoint), gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
        )
        return with_lora(model, targets)

    eager_model, model = make(), apply_patch(make())
    eager, ours = (results(each, batch, autocast=True) for each in (eager_model, model))
    again = use_reentrant or checkpoint.model.config.model_type == "gemma2"  # a norm keeps y
    assert runs == [4] * (4 if again else 2)
    truth = results(dequantized(eager_model), batch)
    truth, eager, ours = joined(truth, eager, ours)
    assert_no_worse(ours, eager, truth, torch.bfloat16)


@pytest.mark.filterwarnings("ignore:liger_patch. PEFT.s own forward runs")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_offloaded_checkpoints_of_a_4_bit_model(
    checkpoint: Checkpoint, use_reentrant: bool
) -> None:
    """The bits of plain checkpoints, as PEFT prepares a model for training."""
    found = []
    for device_types in ((), ("cpu",)):
        base = peft.prepare_model_for_kbit_training(
            load(checkpoint), gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
        )
        model = apply_patch(with_lora(base), checkpoint_offload=True)
        record = record_of(base)
        assert record is not None
        record.offload = CheckpointOffload(device_types, min_bytes=1) if device_types else None
        found.append(results(model, tiny_batch(checkpoint.model)))
    assert str(record.offload).startswith("1 layer inputs")
    plain, offloaded = found
    assert plain.keys() == offloaded.keys()
    assert all(torch.equal(offloaded[name], value) for name, value in plain.items())


def test_trainer_trains_a_4_bit_model_as_eager(checkpoint: Checkpoint, tmp_path: Path) -> None:
    batch = tiny_batch(checkpoint.model, batch=4)
    samples = [{name: value[i] for name, value in batch.items()} for i in range(4)]
    runs = []
    for patch in (False, True):
        base = peft.prepare_model_for_kbit_training(
            load(checkpoint), gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        model = with_lora(base)
        if patch:
            apply_patch(model)
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            bf16=True,
            **QUIET,
        )
        trainer = Trainer(model, arguments, train_dataset=samples)
        trainer.train()
        history = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]
        runs.append(torch.tensor(history, dtype=torch.float64))
    assert patch_status(model).fused
    eager, ours = runs
    assert eager.shape == (2, 2)
    # no float64 of a 4-bit model in Trainer: eager is the truth, in the dtype of the products
    assert_no_worse({"": ours}, {"": eager}, {"": eager}, torch.bfloat16)


def with_quantized_head(model: PreTrainedModel, kind: str = "nf4") -> PreTrainedModel:
    """A copy of the model whose head alone is quantized."""
    model = copy.deepcopy(model)
    weight = model.lm_head.weight.detach().clone()
    if kind == "int8":
        head = bnb.nn.Linear8bitLt(*weight.shape[::-1], bias=False, has_fp16_weights=False)
        head.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        head = bnb.nn.Linear4bit(*weight.shape[::-1], bias=False, compute_dtype=weight.dtype)
        head.weight = bnb.nn.Params4bit(
            weight,
            requires_grad=False,
            quant_type=kind[:3],
            compress_statistics="double" in kind,
            # of the hidden size: bitsandbytes 0.50 takes wrong scales on some CPUs where it is not
            # a multiple of the blocks'
            blocksize=32,
        )
    model.lm_head = head.to("cpu")
    assert not model.lm_head.weight.is_floating_point()
    return model


@pytest.mark.parametrize("trained", ["whole backbone", "lora", "lora on the head"])
@pytest.mark.parametrize("kind", ["nf4", "fp4, double quantisation", "int8"])
def test_a_quantized_head_is_fused(
    checkpoint: Checkpoint, kind: str, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's 16-bit weight exists 16 rows at a time."""
    monkeypatch.setattr(head_logits, "SLICE_BYTES", 16 * 2 * checkpoint.model.config.hidden_size)
    batch = tiny_batch(checkpoint.model)
    targets = ["q_proj", "lm_head"] if "head" in trained else ["q_proj", "v_proj"]

    def make() -> nn.Module:
        model = with_quantized_head(checkpoint.model, kind)
        return model if trained == "whole backbone" else with_lora(model, targets)

    eager_model, model = make(), apply_patch(make(), layers=False)  # the head alone
    eager, ours = results(eager_model, batch), results(model, batch)
    assert (patch_status(model).fused, patch_status(model).reason) == (True, None)
    assert any("lm_head" in name for name in ours) == ("head" in trained)
    truth = results(dequantized(eager_model), batch)
    truth, eager, ours = joined(truth, eager, ours)
    assert_no_worse(ours, eager, truth, torch.bfloat16)


def test_logits_of_a_4_bit_head_are_eagers(checkpoint: Checkpoint) -> None:
    model = with_quantized_head(checkpoint.model).train()
    batch = tiny_batch(model)
    expected = model(**batch).logits
    logits = apply_patch(model, layers=False)(**batch).logits
    assert isinstance(logits, DeferredLogits)
    assert torch.equal(logits + 0, expected)


def test_a_4_bit_head_under_autocast(checkpoint: Checkpoint) -> None:
    model = with_quantized_head(checkpoint.model)
    batch = tiny_batch(model)
    losses = []
    for patch in (False, True):
        if patch:
            apply_patch(model)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(**batch).loss)
    assert patch_status(model).fused
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0)


def test_a_4_bit_head_passes_verification(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGER_PATCH_VERIFY", "1")
    model = apply_patch(with_lora(with_quantized_head(checkpoint.model), ["lm_head"]))
    results(model, tiny_batch(model))
    assert patch_status(model).fused


def hooked(model: PreTrainedModel) -> PreTrainedModel:
    """The head's forward is another one, as with accelerate's hooks."""
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x)
    return model


def test_a_4_bit_head_with_another_forward_falls_back(checkpoint: Checkpoint) -> None:
    batch = tiny_batch(checkpoint.model)
    eager = results(hooked(with_quantized_head(checkpoint.model)), batch)
    model = apply_patch(hooked(with_quantized_head(checkpoint.model)), layers=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = results(model, batch)
        results(model, batch)
    (warning,) = [w for w in caught if FALLBACK in str(w.message)]
    assert "Linear4bit" in str(warning.message)
    status = patch_status(model)
    assert status.fused is False
    assert status.reason in str(warning.message)
    assert "Linear4bit" in str(status)
    assert_no_worse(ours, eager, eager, torch.bfloat16)


def test_a_4_bit_head_that_cannot_be_read_falls_back(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that bitsandbytes has packed for inference."""
    model = with_quantized_head(checkpoint.model)
    expected = results(model, tiny_batch(model))
    monkeypatch.setattr(bitsandbytes, "quantized_weight", lambda *_: None)
    with pytest.warns(UserWarning, match="Linear4bit"):
        ours = results(apply_patch(model, layers=False), tiny_batch(model))
    assert patch_status(model).fused is False
    assert_no_worse(ours, expected, expected, torch.bfloat16)


def test_a_head_that_cannot_be_read_where_fusing_is_demanded_is_an_error(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = apply_patch(hooked(with_quantized_head(checkpoint.model)))
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "0")
    with pytest.raises(RuntimeError, match="Linear4bit"):
        model(**tiny_batch(model))
