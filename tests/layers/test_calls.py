"""Calls of models with layers on kernels: in 16 bits, checkpointed, of torch.func, and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from slow_cases import slow_but
from tiny_models import ROWS, tiny_batch, tiny_model
from torch import Tensor
from training_step import call, gradients, joined, patched, step, widened, with_checkpoints
from transformers import Gemma3ForCausalLM

from liger_patch import apply_patch, patch_status
from liger_patch.layers import attention, checks, mlp, norm
from liger_patch.layers.replace import count_layers

# what layers on kernels call, with an attention's context for its rotary embedding
OPERATORS: list[tuple[Any, str]] = [
    (norm, "run_rms_norm"),
    (attention, "computed_together"),
    (mlp, "run_gated"),
    (mlp, "run_gated_mlp"),
]


def test_torch_func_takes_the_models_own_way() -> None:
    model = tiny_model().double()
    ids = tiny_batch(model)["input_ids"]
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        outputs = torch.func.functional_call(model, weights, (ids,), {"use_cache": False})
        return outputs.logits.square().mean()

    expected = torch.func.grad(loss)(weights)
    apply_patch(model, layers=True)
    torch.testing.assert_close(torch.func.grad(loss)(weights), expected)


def test_tables_of_angles_that_train_get_their_gradients() -> None:
    """No kernel computes them: MLCD's first angle is a parameter."""
    model = tiny_model().double()
    x = torch.randn(1, 5, model.config.hidden_size, dtype=torch.float64)
    tables = [each.requires_grad_() for each in model.model.rotary_emb(x, torch.arange(5)[None])]

    def gradients_of_tables() -> tuple[Tensor, ...]:
        y, _ = model.model.layers[0].self_attn(x, tuple(tables), None)
        return torch.autograd.grad(y.square().sum(), tables)

    expected = gradients_of_tables()
    apply_patch(model, layers=True)
    torch.testing.assert_close(gradients_of_tables(), expected)


def test_a_second_derivative_is_an_error_that_says_what_to_do() -> None:
    model = apply_patch(tiny_model(), layers=True)
    loss = model(**tiny_batch(model)).loss
    logits = model(input_ids=tiny_batch(model)["input_ids"]).logits
    is_said = pytest.warns(UserWarning, match="was called without labels")
    with is_said, pytest.raises(RuntimeError, match="layers=False"):
        torch.autograd.grad(logits.sum(), list(model.parameters())[1], create_graph=True)
    assert loss.isfinite()


def test_queries_and_keys_see_hooks_and_functions_that_come_later(
    record: Callable[..., list[str]],
) -> None:
    """Hooks of their norms, and another rotary function in the attention's module."""
    from transformers.models.qwen3 import modeling_qwen3

    model = apply_patch(tiny_model("qwen3"), layers=True)
    batch = tiny_batch(model)
    expected = step(model, batch)
    seen = record(modeling_qwen3, "apply_rotary_pos_emb", lambda *_, **__: "rotary")
    hooked: Any = model.model.layers[0].self_attn.k_norm
    hooked.register_forward_hook(lambda *_: seen.append("norm"))
    torch.testing.assert_close(step(model, batch), expected)
    assert seen == ["norm", *["rotary"] * model.config.num_hidden_layers]


@pytest.fixture
def run(record: Callable[..., list[Any]]) -> list[str]:
    """The names of the operators of layers that have run, also those of probes."""
    names: list[str] = []
    for module, name in OPERATORS:
        record(module, name, lambda *_, own=name, **__: names.append(own))
    return names


def test_a_layer_that_is_given_shards_runs_its_own_code(run: list[str]) -> None:
    """A kernel would read memory that a tensor of tensors does not have."""
    from torch.testing._internal.two_tensor import TwoTensor

    model = apply_patch(tiny_model(), layers=True)
    x = torch.randn(2, 9, model.config.hidden_size)
    run.clear()
    with torch.no_grad():
        for layer in (model.model.layers[0].input_layernorm, model.model.layers[0].mlp):
            y = layer(TwoTensor(x, x.clone()))
            plain = type(layer)._liger_patch_original.forward(layer, x)
            torch.testing.assert_close(y.a, plain)
    assert run == []


def test_a_device_without_kernels_runs_the_models_own_layers(
    run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "DEVICES", ("cuda",))
    model = tiny_model()
    batch = tiny_batch(model)
    logits = model(**batch).logits
    apply_patch(model)
    run.clear()
    assert torch.equal(model(**batch).logits, logits)
    step(model, batch)
    assert run == []
    assert "calls on cpu run the model's own layers" in str(patch_status(model))
    apply_patch(model, layers=["rms_norm", "gated"])
    run.clear()
    step(model, batch)
    assert {*run} == {"run_rms_norm", "run_gated_mlp"}
    assert "calls on cpu" not in str(patch_status(model))
    apply_patch(model)
    run.clear()
    step(model, batch)
    assert run == []


@pytest.mark.parametrize(
    "model_type", sorted(ROWS.keys() & {"llama", "gemma3_text", "qwen3_moe", "qwen3_5_text"})
)
def test_steps_of_generation_run_the_models_own_layers(model_type: str, run: list[str]) -> None:
    """Their time is that of launches. The prompt runs on kernels, and so does training."""
    model = apply_patch(tiny_model(model_type).eval())
    prompt = tiny_batch(model)["input_ids"][:1, :4]
    run.clear()
    with torch.no_grad():
        outputs = model(prompt, use_cache=True)
        assert {*run} >= {"run_rms_norm", "computed_together"}
        run.clear()
        model(prompt[:, :1], past_key_values=outputs.past_key_values)
        assert run == []
        with torch.enable_grad():
            model(prompt[:, :1], use_cache=False)
        assert {*run} >= {"run_rms_norm", "computed_together"}


def test_reentrant_checkpoints_run_the_same_norms_again(run: list[str]) -> None:
    """Of a norm behind a transpose, the first dimension behind the batch counts heads."""
    config = tiny_model("gemma3_text").config
    config.num_key_value_heads = 1
    model = with_checkpoints(Gemma3ForCausalLM(config).train(), True)
    batch, norms = tiny_batch(model), count_layers(apply_patch(model))["rms_norm"]
    run.clear()
    loss = call(model, batch).loss
    assert run.count("run_rms_norm") == norms
    loss.backward()
    assert run.count("run_rms_norm") == 2 * norms - 1  # but the last


@pytest.mark.parametrize(
    "model_type", ["llama", "gemma3_text", "qwen3", "olmo2", "phi3", "gemma3n_text", "cohere"]
)
@pytest.mark.parametrize("kind", slow_but(["weights"], ["weights", "autocast"]))
def test_16_bit_weights_and_autocast_are_no_worse(kind: str, model_type: str) -> None:
    """On three batches: the largest error of a tiny model is luck to some degree."""
    model = tiny_model(model_type)
    if kind == "weights":
        model.bfloat16()
    wide = widened(model)
    found: list[list[Tensor]] = [[], [], []]
    for seed in range(3):
        batch = tiny_batch(model, seed=seed)
        steps = [step(wide, batch)]
        for layers in (False, True):
            with patched(model, layers=layers):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
                    outputs = call(model, batch)
                assert outputs.logits.dtype == torch.bfloat16
                steps.append({"loss": outputs.loss.detach(), **gradients(model, outputs.loss)})
        for values, each in zip(found, joined(*steps), strict=True):
            values.extend(each.values())
    truth, eager, ours = ({"loss and gradients": torch.cat(values)} for values in found)
    assert_no_worse(ours, eager, truth, torch.bfloat16)


@pytest.mark.parametrize("model_type", sorted(ROWS.keys() & {"zaya", "dots3_note_text"}))
def test_queries_and_keys_of_two_dtypes_are_rotated_by_the_models_own(model_type: str) -> None:
    """Under autocast, keys that are multiplied by a weight have its dtype."""
    model = tiny_model(model_type)
    batch = tiny_batch(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = call(model, batch).loss
        loss = call(apply_patch(model, layers=["rotary"]), batch).loss
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
