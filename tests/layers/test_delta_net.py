"""Gated delta nets on kernels: a model's step is eager's, a cache and libraries keep the layer's
own functions, and rows of several sequences are right.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import delta_cases
import pytest
import torch
import transformers
from exactness import assert_no_worse
from packed_samples import Sample, make_samples, positions_only, truth_of
from tiny_models import ROWS, tiny_batch, tiny_model
from torch import Tensor
from training_step import Step, assert_right, patched, step, widened
from transformers import PreTrainedModel

from liger_patch import apply_patch, patch_status
from liger_patch.layers import delta_net, recurrent
from liger_patch.layers.replace import count_layers
from liger_patch.subclass import once_for_each_class

MODELS = sorted(ROWS.keys() & {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"})
NO_CACHE = {"use_cache": False}
pytestmark = pytest.mark.skipif(
    "qwen3_5_text" not in ROWS, reason="Transformers 5.0 has attributes of the layer"
)


@pytest.fixture
def calls(record: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that ran, but for the probes'."""
    monkeypatch.setattr(delta_net, "_agree", lambda functions: True)
    names: list[str] = []
    for name in ("gated_delta_rule", "causal_conv"):
        record(delta_net, f"run_{name}", lambda *_, own=name, **__: names.append(own))
    return names


def layers_of(model: PreTrainedModel) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")]


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_step_is_no_worse_than_eagers(
    model_type: str, checkpoints: bool, calls: list[str]
) -> None:
    model = tiny_model(model_type)
    batch = tiny_batch(model, length=70)
    wide = widened(model)
    truth, eager = step(wide, batch, **NO_CACHE), step(model, batch, **NO_CACHE)
    assert not calls
    if checkpoints:
        model.gradient_checkpointing_enable()
    number = len(layers_of(model))
    with patched(model, layers=["delta_net"]):
        assert count_layers(model)["delta_net"] == number > 0
        assert f"{number} delta_net" in str(patch_status(model))
        ours = step(model, batch, **NO_CACHE)
    assert calls == ["causal_conv", "gated_delta_rule"] * number * (1 + checkpoints)
    assert_right(ours, eager, truth)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_cache_keeps_the_layers_own_functions(model_type: str, calls: list[str]) -> None:
    model = tiny_model(model_type).eval()
    ids = tiny_batch(model)["input_ids"]
    how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **how)
    apply_patch(model, layers=["delta_net"])
    assert torch.equal(model.generate(ids, **how), expected)
    assert not calls
    model(input_ids=ids, **NO_CACHE)
    assert calls


@pytest.mark.parametrize("names", [["seq_idx", "cu_seq_lens_q"], ["seq_idx"]])
def test_sequences_of_a_row_are_those_of_rows_of_their_own(names: list[str]) -> None:
    model = apply_patch(tiny_model("qwen3_5_text").double(), layers=["delta_net"])
    layer = layers_of(model)[0]
    lengths = [70, 1, 3, 30]
    packing = {
        "seq_idx": torch.arange(4).repeat_interleave(torch.tensor(lengths))[None].int(),
        "cu_seq_lens_q": torch.tensor([0, 70, 71, 74, 104], dtype=torch.int32),
    }
    x = torch.randn(1, sum(lengths), layer.hidden_size, dtype=torch.float64)
    packed = layer(x, **{name: packing[name] for name in names})
    torch.testing.assert_close(packed, torch.cat([layer(p) for p in x.split(lengths, 1)], 1))


@pytest.mark.parametrize("ids", [torch.zeros(1, 8).short(), torch.zeros(1, 9).int()], ids=str)
def test_sequences_that_do_not_fit_the_row_are_an_error(ids: Tensor) -> None:
    model = apply_patch(tiny_model("qwen3_5_text"), layers=["delta_net"])
    layer = layers_of(model)[0]
    with pytest.raises(ValueError, match=r"seq_idx must be int32 or int64 \(1, 8\), got torch.int"):
        layer(torch.randn(1, 8, layer.hidden_size), seq_idx=ids)


def test_a_state_is_left_to_transformers(calls: list[str]) -> None:
    modeling = transformers.models.qwen3_next.modeling_qwen3_next
    own = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
    ours = delta_net._rule_or_own(own)
    q, k, v, g, beta = delta_cases.inputs(5, heads=4, groups=1).values()
    o, state = ours(q, k, v, g=g, beta=beta, output_final_state=True)
    expected, final = own(q, k, v, g=g, beta=beta, output_final_state=True)
    assert torch.equal(o, expected)
    assert torch.equal(state, final)
    ours(q, k, v, g=g, beta=beta, initial_state=final)
    assert not calls
    found = ours(2 * q, k, v, g=g, beta=beta)[0]  # q is not normalized
    torch.testing.assert_close(found, 2 * expected)
    assert calls


@pytest.fixture
def library_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls of a rule that Transformers found in flash-linear-attention."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    own, called = inspect.unwrap(modeling.torch_chunk_gated_delta_rule), []

    @functools.wraps(own)
    def implementation(*args: Any, **options: Any) -> Any:
        called.append(1)
        return own(*args, **options)

    implementation.__module__ = "fla.ops"
    library = types.SimpleNamespace(chunk_gated_delta_rule=implementation)
    monkeypatch.setitem(sys.modules, "library", library)
    decorate = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "library")
    monkeypatch.setattr(modeling, own.__name__, decorate(own))
    # its classes of other tests took this function for one that came after the patch
    fresh = once_for_each_class(inspect.unwrap(recurrent.recurrent_on_kernels))
    monkeypatch.setattr(recurrent, "recurrent_on_kernels", fresh)
    return called


@pytest.mark.parametrize(
    ("hopper", "triton", "fla", "replaced"),
    [
        (True, "3.6.0", {}, True),
        (True, "3.6.0", {"TRITON_ABOVE_3_7_1": False}, True),
        (True, "3.3.1", {}, False),
        (True, "3.8.0", {"TRITON_ABOVE_3_7_1": True}, False),
        (False, "3.6.0", {}, False),
    ],
)
def test_functions_of_libraries_stay_where_they_can_train(
    hopper: bool,
    triton: str,
    fla: dict[str, bool],
    replaced: bool,
    library_calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Hopper GPUs with Triton 3.4 to 3.7.0, flash-linear-attention's gradients are wrong."""
    monkeypatch.setitem(sys.modules, "fla.utils", types.SimpleNamespace(**fla))
    monkeypatch.setattr("triton.__version__", triton)
    monkeypatch.setattr(delta_net, "is_hopper", lambda device: hopper)
    model = tiny_model("qwen3_5_text")
    number, batch = len(layers_of(model)), tiny_batch(model, length=70)
    wide = widened(model)
    truth, eager = step(wide, batch, **NO_CACHE), step(model, batch, **NO_CACHE)
    with patched(model, layers=True):
        assert count_layers(model)["delta_net"] == (number if replaced else 0)
        is_said = f"{number} delta_net on fla's kernels" in str(patch_status(model))
        assert is_said is not replaced
    library_calls.clear()
    says = pytest.raises(ValueError, match="has no delta_net layer")
    with nullcontext() if replaced else says:
        apply_patch(model, layers=["delta_net"])
    ours = step(model, batch, **NO_CACHE)
    assert len(library_calls) == (0 if replaced else number)
    assert_right(ours, eager, truth)
    model(input_ids=batch["input_ids"], use_cache=True)
    assert library_calls


def test_a_function_that_was_replaced_before_the_patch_is_probed() -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    own = modeling.torch_chunk_gated_delta_rule

    @functools.wraps(own)
    def twice(*arguments: Any, **options: Any) -> Any:
        result, state = own(*arguments, **options)
        return 2 * result, state

    assert delta_net._agree({delta_net.RULE: own})
    assert not delta_net._agree({delta_net.RULE: twice})


def test_convolutions_of_libraries_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_net, "is_hopper", lambda device: True)
    monkeypatch.setattr("triton.__version__", "3.6.0")

    def implementation(*arguments: Any) -> None: ...

    for module, replaced in (("causal_conv1d.interface", False), ("fla.ops", True)):
        monkeypatch.setattr(implementation, "__module__", module)
        assert delta_net._is_replaced(implementation) == replaced


def test_a_function_that_is_replaced_after_the_patch_runs(
    record: Callable[..., list[Any]], calls: list[str]
) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    model = apply_patch(tiny_model("qwen3_5_text"), layers=["delta_net"])
    called = record(modeling, "torch_chunk_gated_delta_rule")
    model(**tiny_batch(model), **NO_CACHE)
    assert set(calls) == {"causal_conv"}
    assert called


@pytest.mark.slow
@pytest.mark.parametrize("has_adapters", [False, True], ids=["all weights", "lora"])
def test_200_steps_of_packed_rows_have_the_losses_of_their_sequences(
    has_adapters: bool, calls: list[str]
) -> None:
    """A larger learning rate lets eager's own roundings grow in each step."""
    model: Any = tiny_model("qwen3_5_text")
    model.config.use_cache = False
    if has_adapters:
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
    ours = apply_patch(copy.deepcopy(model))
    truth, eager = (losses(each, truth_of) for each in (widened(model), copy.deepcopy(model)))
    assert not calls
    found = losses(ours, lambda model, samples: step(model, positions_only(samples)))
    assert calls == ["causal_conv", "gated_delta_rule"] * len(layers_of(ours)) * 200
    assert truth[-1] < truth[0] - 0.1
    assert_no_worse({"": found}, {"": eager}, {"": truth}, torch.float32, eps=4)


def losses(model: Any, take_step: Callable[[Any, list[Sample]], Step]) -> Tensor:
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer, found = torch.optim.AdamW(trained, lr=1e-4), []
    for i in range(200):
        step = take_step(model, make_samples(9, 4, 13, seed=i % 4))
        for name, parameter in model.named_parameters():
            parameter.grad = step[name]
        optimizer.step()
        found.append(step["loss"])
    return torch.stack(found).double()
