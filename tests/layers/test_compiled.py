"""Layers on kernels under torch.compile: the same graphs, the operators in them, and the models'
own results.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_graphs import MARKS, Graphs
from functorch.compile import make_boxed_func
from slow_cases import slow_but
from tiny_models import tiny_batch, tiny_model
from torch._dynamo.backends.common import aot_autograd
from training_step import assert_right, step, widened
from transformers import PreTrainedModel

from liger_patch import apply_patch

pytestmark = MARKS


def make_model(model_type: str = "llama", *, layers: int | None = None) -> PreTrainedModel:
    model: Any = tiny_model(model_type)
    if layers is not None:  # each takes seconds
        del model.model.layers[layers:]
    return model


@pytest.mark.parametrize(
    "model_type", slow_but(["llama"], ["llama", "gemma2", "qwen3", "gemma3n_text", "phi3"])
)
def test_the_backbone_compiles_into_the_same_graphs(model_type: str) -> None:
    model = make_model(model_type, layers=1 if model_type in ("llama", "gemma2") else None).double()
    ids = tiny_batch(model)["input_ids"]

    def backbone(ids: torch.Tensor) -> torch.Tensor:
        return model.model(input_ids=ids, use_cache=False).last_hidden_state

    parameters = [p for p in model.model.parameters() if p.requires_grad]
    linears = []
    for layers in (False, True):
        apply_patch(model, layers=layers)
        eager = backbone(ids)
        truth = torch.autograd.grad(eager.sum(), parameters)
        torch._dynamo.reset()
        graphs = Graphs("aot_eager")
        compiled = torch.compile(backbone, backend=graphs)(ids)
        linears.append(graphs.linears)
        torch.testing.assert_close(compiled, eager)
        torch.testing.assert_close(torch.autograd.grad(compiled.sum(), parameters), truth)
    assert linears[0] == linears[1]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_compiled_with_dynamic_numbers(model_type: str) -> None:
    """With ``dynamic=True`` the epsilons of norms are symbols too."""
    model = make_model(model_type, layers=1)
    batch = tiny_batch(model)
    truth, eager = step(widened(model), batch), step(model, batch)
    apply_patch(model, layers=True)
    model.model.forward = torch.compile(model.model.forward, backend="aot_eager", dynamic=True)
    ours = step(model, batch)
    assert_right(ours, eager, truth)


def test_what_is_compiled_calls_the_operators() -> None:
    model = apply_patch(make_model(layers=1), layers=True)
    called: list[set[str]] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        called.append({str(each) for node in nodes for each in (node.target, *node.args)})
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    model.model.forward = torch.compile(model.model.forward, backend=backend)
    hidden = model.model(tiny_batch(model)["input_ids"], use_cache=False).last_hidden_state
    hidden.sum().backward()
    forward = ["rms_norm_forward", "rotate", "gated_forward"]
    backward = ["rms_norm_backward", "gated_backward_"]
    for name in forward + backward:  # torch 2.6 breaks Transformers' own code into several graphs
        assert any(f"liger_patch.{name}.default" in graph for graph in called), name
