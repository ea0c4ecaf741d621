"""LoRA layers that run PEFT's own forward: those that are not plain, and those that are traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from compiled_graphs import Graphs
from exactness import assert_no_worse
from lora_models import (
    ALL,
    MARKS,
    ROWS,
    Calls,
    adapted,
    assert_same,
    batch_of,
    copies,
    lora_layers,
    peft,
    replaced,
    training_step,
)
from peft.utils import hotswap
from slow_cases import slow_but
from tiny_models import tiny_model
from torch import Tensor, nn
from training_step import call, joined

from liger_patch import apply_patch, patch_status, revert_patch
from liger_patch.layers.lora import not_plain
from liger_patch.layers.replace import count_layers

pytestmark = MARKS


class Case(NamedTuple):
    """What hangs on a model, and why which projections of the first layer are not plain."""

    hang: Callable[[Any], object]
    reason: str
    projections: tuple[str, ...] = ALL
    options: dict[str, Any] = {}  # noqa: RUF012
    layers: int = 1


def of(name: str, change: Callable[[Any], object]) -> Callable[[Any], object]:
    """Of the first layer's projection of that name."""

    def hang(model: Any) -> None:
        layers = lora_layers(model).items()
        change(
            next(
                layer
                for path, layer in layers
                if path.endswith(f"0.self_attn.{name}") or path.endswith(f"0.mlp.{name}")
            )
        )

    return hang


def nothing(model: Any) -> None:
    pass


def several(model: Any) -> None:
    torch.manual_seed(2)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model.add_adapter("second", config)
    model.base_model.set_adapter(["default", "second"])


def doubles(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, args, output: 2 * output)


def parametrized(layer: Any) -> None:
    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    nn.utils.parametrize.register_parametrization(layer.lora_A["default"], "weight", Half())


def of_another_class(layer: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    layer.base_layer.__class__ = Doubled


NOT_PLAIN = {  # by why not
    "several active adapters": Case(several, "2 active", ("q_proj", "up_proj"), layers=2),
    "no active adapter": Case(lambda m: m.base_model.set_adapter([]), "0 active", layers=2),
    "DoRA": Case(nothing, "DoraLinearVariant", options={"use_dora": True}, layers=2),
    "bias of B": Case(nothing, "lora_bias=True", options={"lora_bias": True}, layers=2),
    "merged": Case(lambda m: m.merge_adapter(), "adapters are merged", layers=2),
    "disabled": Case(
        lambda m: m.base_model.disable_adapter_layers(), "adapters are disabled", layers=2
    ),
    "hook of A": Case(of("v_proj", lambda m: doubles(m.lora_A["default"])), "hooks", ("v_proj",)),
    "hook of B": Case(of("up_proj", lambda m: doubles(m.lora_B["default"])), "hooks", ("up_proj",)),
    "hook of a base": Case(of("o_proj", lambda m: doubles(m.base_layer)), "hooks", ("o_proj",)),
    "forward of a base": Case(
        of("down_proj", lambda m: replaced(m.base_layer)), "hooks", ("down_proj",)
    ),
    "parametrization of A": Case(of("q_proj", parametrized), "another class", ("q_proj",)),
    "class of a base": Case(of("q_proj", of_another_class), "the base is a Doubled", ("q_proj",)),
    "scaling for hotswaps": Case(
        hotswap.prepare_model_for_compiled_hotswap, "its scaling is a tensor", layers=2
    ),
}


NO_ADAPTER = ("no active adapter", "merged", "disabled")  # takes part, and has a gradient


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")  # of a base without one
@pytest.mark.parametrize("when", slow_but(["after"], ["before", "after"]))
@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_runs_as_peft_has_it(name: str, when: str, calls: Calls) -> None:
    """And the other projections on kernels."""
    case = NOT_PLAIN[name]
    eager = adapted(base=tiny_model(ROWS["llama"]).double(), **case.options)
    batch = batch_of(eager)
    if when == "before":
        case.hang(eager)
        if name in ("class of a base", "parametrization of A", "forward of a base"):
            # local classes, and a bound method that a copy would share
            torch.manual_seed(0)
            model = adapted(base=tiny_model(ROWS["llama"]).double(), **case.options)
            case.hang(model)
            apply_patch(model)
        else:
            model = apply_patch(copy.deepcopy(eager))
    else:
        model = apply_patch(copy.deepcopy(eager))
        training_step(model, batch)
        for each in (eager, model):
            case.hang(each)
    if name in NO_ADAPTER:
        truth, ours = ({"loss": call(each, batch).loss.detach()} for each in (eager, model))
    else:
        truth, ours = training_step(eager, batch), training_step(model, batch)
    calls.clear()
    with torch.no_grad():
        model(**batch)
    ran, by_peft = calls.taken(model)
    assert_no_worse(ours, truth, truth, torch.float32)
    assert sorted(by_peft) == sorted(case.projections * case.layers)
    on_kernels = {each for group in ran for each in group}
    assert on_kernels == set(ALL) - set(case.projections if case.layers == 2 else ())
    ((reason, count),) = not_plain(model).items()
    assert case.reason in reason
    assert count == len(case.projections) * case.layers
    assert f"{count} in PEFT's own forward: {reason}" in str(patch_status(model))


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "gate_proj", "down_proj", "o_proj"])
@pytest.mark.parametrize("how", slow_but(["hook"], ["hook", "pre-hook", "forward"]))
def test_what_hangs_on_a_projection_itself_runs(projection: str, how: str) -> None:
    change: Callable[[Any], object] = {
        "hook": doubles,
        "pre-hook": lambda m: m.register_forward_pre_hook(lambda _, args: (2 * args[0],)),
        "forward": replaced,
    }[how]
    for when in ("before", "after"):
        eager, model, batch = copies()
        if when == "before":
            revert_patch(model)
        of(projection, change)(eager)
        of(projection, change)(model)
        assert_same(apply_patch(model) if when == "before" else model, eager, batch)


def test_full_backward_hooks_of_a_projection_see_its_gradients() -> None:
    eager, model, batch = copies()
    seen: list[list[Tensor]] = []
    for each in (eager, model):
        each.enable_input_require_grads()
        found: list[Tensor] = []
        for name in ("k_proj", "up_proj"):
            of(
                name,
                lambda m, found=found: m.register_full_backward_hook(
                    lambda _, dx, dy, found=found: found.extend([*dx, *dy])
                ),
            )(each)
        training_step(each, batch)
        seen.append(found)
    truth, ours = ({str(i): each for i, each in enumerate(found)} for found in seen)
    assert len(truth) == 4
    assert_no_worse(ours, truth, truth, torch.float32)


OTHERS: dict[str, tuple[Callable[[], Any], int]] = {
    "IA3": (
        lambda: peft.IA3Config(
            task_type="CAUSAL_LM",
            target_modules=["k_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        ),
        0,
    ),
    "VeRA": (
        lambda: peft.VeraConfig(
            task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_weights=False
        ),
        0,
    ),
    "LoHa": (
        lambda: peft.LoHaConfig(
            task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_weights=False
        ),
        0,
    ),
    "saved modules": (
        lambda: peft.LoraConfig(
            task_type="CAUSAL_LM",
            target_modules=["q_proj"],
            init_lora_weights=False,
            modules_to_save=["lm_head", "up_proj"],
        ),
        2,
    ),
    "head": (
        lambda: peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"], init_lora_weights=False
        ),
        2,
    ),
    "embedding": (
        lambda: peft.LoraConfig(
            task_type="CAUSAL_LM",
            target_modules=["q_proj", "embed_tokens"],
            init_lora_weights=False,
        ),
        2,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_tuners_and_modules(name: str) -> None:
    """Are left alone, the head's adapter to the head."""
    config, counted = OTHERS[name]
    torch.manual_seed(1)
    eager = peft.get_peft_model(tiny_model(ROWS["llama"]).double(), config())
    model, batch = apply_patch(copy.deepcopy(eager)), batch_of(eager)
    assert count_layers(model)["lora"] == counted
    results = []
    for each in (eager, model):
        loss = call(each.train(), batch).loss
        loss.backward()
        grads = {n: p.grad for n, p in each.named_parameters() if p.requires_grad}
        results.append({"loss": loss.detach(), **grads})
    truth, ours = results
    assert any(value is not None and value.any() for name, value in truth.items() if name != "loss")
    assert_no_worse(ours, truth, truth, torch.float32)
    assert patch_status(model).fused


def test_weights_that_are_stored_transposed_run_as_peft_has_them(calls: Calls) -> None:
    """fan_in_fan_out of a linear layer: PEFT warns and corrects it, but by hand it stays."""
    eager, model, batch = copies()
    for each in (eager, model):
        for layer in lora_layers(each).values():
            layer.fan_in_fan_out = True
    assert_same(model, eager, batch)
    assert not_plain(model) == {"fan_in_fan_out=True": 14}


class PackedLinear(nn.Module):
    """A quantized layer of another library: it has no ``weight``, and no ``bias``."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = layer.weight.detach().abs().max() / 127
        self.register_buffer("qweight", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.qweight * self.scale)


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
def test_bases_without_a_weight() -> None:
    base = tiny_model(ROWS["llama"])
    for name, layer in list(base.named_modules()):
        if isinstance(layer, nn.Linear):
            base.set_submodule(name, PackedLinear(layer))
    config = peft.LoraConfig(target_modules=[*ALL, "lm_head"], init_lora_weights=False)
    config._register_custom_module({PackedLinear: peft.tuners.lora.Linear})
    torch.manual_seed(1)
    eager: Any = peft.get_peft_model(base, config).double()
    model, batch = apply_patch(copy.deepcopy(eager)), batch_of(eager)
    assert not_plain(model) == {"the base is a PackedLinear": 14}
    assert_same(model, eager, batch)
    assert not_plain(model) == {"the base is a PackedLinear": 14}


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.slow
def test_a_compiled_model_runs_peft_s_own_layers() -> None:
    eager = adapted()
    model, batch = apply_patch(copy.deepcopy(eager)), batch_of(eager)
    wide = copy.deepcopy(eager).double()
    graphs = Graphs("aot_eager")
    loss = torch.compile(model, backend=graphs)(**batch).loss
    loss.backward()
    # of two layers, all seven products of bases and those of their adapters, in one graph
    assert max(graphs.linears) == sum(graphs.linears) == 2 * 7 * 3
    ours = {n: p.grad for n, p in model.named_parameters() if "lora_" in n}
    truth, plain, ours = joined(
        training_step(wide, batch), training_step(eager, batch), {"loss": loss.detach(), **ours}
    )
    assert_no_worse(ours, plain, truth, torch.float32)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
@pytest.mark.usefixtures("nothing_is_compiled")
def test_a_compiled_model_with_checkpoints_breaks_few_graphs() -> None:
    """Those of an unpatched model, and at the call, the head and the loss. Dynamo counts a break
    again in each function around it, of PEFT and of Transformers.
    """
    breaks, graphs = [], []
    for patch in (False, True):
        model, counters = adapted(), torch._dynamo.utils.counters
        del model.base_model.model.model.layers[1:]  # each takes the compiler seconds
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if patch:
            apply_patch(model)
        torch._dynamo.reset()
        counters.clear()
        found = Graphs()
        compiled = torch.compile(model.train(), backend=found)
        compiled(**batch_of(model), use_cache=False).loss.backward()
        breaks.append(counters["graph_break"].total())
        graphs.append(found.linears)
    assert patch_status(model).fused
    assert breaks[1] <= breaks[0] + 6
    assert len(graphs[1]) <= len(graphs[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("nothing_is_compiled")
def test_a_compiled_feed_forward_layer_is_one_graph(calls: Calls) -> None:
    _, model, _ = copies()
    layer = next(m for n, m in model.named_modules() if n.endswith("0.mlp"))
    x = torch.randn(2, 3, 32).double()
    expected = layer(x)
    calls.clear()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    groups, _ = calls.taken(model)
    assert groups == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["mlp", "self_attn.o_proj"])
def test_torch_jit_trace_records_peft_s_own_code(name: str, calls: Calls) -> None:
    _, model, _ = copies()
    layer = next(m for n, m in model.named_modules() if n.endswith(f"0.{name}"))
    x = torch.randn(2, 3, 32).double()
    calls.clear()
    example = torch.randn(2, 3, 32).double()
    traced: Any = torch.jit.trace(nn.Sequential(layer), example, check_trace=False)
    groups, _ = calls.taken(model)
    assert groups == []
    torch.testing.assert_close(traced(x), layer(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_transforms_of_functions_run_peft_s_own_code(transform: str) -> None:
    eager, model, _ = copies()
    x = torch.randn(2, 3, 32).double()
    results = []
    for each in (eager, model):
        layer = next(m for n, m in each.named_modules() if n.endswith("0.self_attn.q_proj"))
        with torch.no_grad():
            if transform == "vmap":
                results.append(torch.func.vmap(layer)(x))
            else:
                results.append(torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1])
    assert torch.equal(*results)
