"""The losses as operators: what torch.compile and selective checkpointing make of them. The truth
is the same call outside of a graph.
"""

import functools
import itertools
from typing import Any

import pytest
import torch
from compiled_graphs import MARKS, Graphs
from exactness import assert_no_worse
from functorch.compile import make_boxed_func
from loss_calls import LOSSES, MANY, assert_same, inputs, mean, ready_made, with_gradients
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from liger_patch import linear_cross_entropy

pytestmark = MARKS


@pytest.mark.parametrize(
    ("dynamic", "tokens", "ignored"),
    [(None, (37,), (0.3, 0.9, 0.0, 1.0)), (True, (37, 12, 50), (0.3,))],
    ids=["any number of supervised tokens", "any number of tokens"],
)
@pytest.mark.parametrize("loss", MANY)
def test_one_graph_serves_every_call(loss, dynamic, tokens, ignored):
    graphs = Graphs("aot_eager")
    compiled = torch.compile(loss, backend=graphs, fullgraph=True, dynamic=dynamic)
    counts = []
    for sizes in itertools.product(tokens, ignored):
        given = inputs(*sizes)
        assert_same(with_gradients(compiled, *given), loss, *given)
        counts.append(len(graphs.linears))
    assert len(set(counts)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_inductor(loss):
    given = inputs()
    assert_same(with_gradients(torch.compile(loss, fullgraph=True), *given), loss, *given)


def test_low_precision_is_no_worse_than_outside_of_a_graph():
    for dtype in (torch.bfloat16, torch.float16):
        given = inputs(dtype=dtype)
        wide = [each.detach().double().requires_grad_() for each in given[:2]]
        truth = with_gradients(mean, *wide, given[2])
        compiled = torch.compile(mean, backend="aot_eager", fullgraph=True)
        ours, eager = with_gradients(compiled, *given), with_gradients(mean, *given)
        assert_no_worse(ours, eager, truth, dtype)


def test_autocast():
    given = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        eager = with_gradients(mean, *given)
        ours = with_gradients(torch.compile(mean, backend="aot_eager", fullgraph=True), *given)
    assert_no_worse(ours, eager, eager, torch.float32)


def test_a_number_of_items_that_changes_is_no_constant():
    graphs = Graphs()
    compiled = torch.compile(linear_cross_entropy, backend=graphs, fullgraph=True)
    given = inputs()
    for items in range(3, 9):
        ours = compiled(*given, num_items_in_batch=items)
        truth = linear_cross_entropy(*given, num_items_in_batch=items)
        torch.testing.assert_close(ours, truth)
    assert len(graphs.linears) <= 2  # of one number, and of any


def test_a_number_of_items_that_does_not_fit_is_an_error_in_a_graph_too():
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager")
    with pytest.raises(Exception, match="num_items_in_batch must be a finite number >= 0, got -3"):
        compiled(*inputs(), num_items_in_batch=-3)


def test_a_graph_may_run_backward_twice():
    given = inputs()
    compiled = torch.compile(mean, backend="eager", fullgraph=True)(*given)
    first = torch.autograd.grad(compiled, given[:2], retain_graph=True)
    second = torch.autograd.grad(compiled, given[:2])
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_second_derivative_is_refused():
    given = inputs()
    for loss in (mean, ready_made):
        compiled = torch.compile(loss, backend="eager", fullgraph=True)(*given)
        with pytest.raises(RuntimeError, match="create_graph=True"):
            torch.autograd.grad(compiled, given[:2], create_graph=True)


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        return None


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_whose_gradient_nobody_asks_for_adds_none(loss):
    given = inputs()
    value = WithoutGradient.apply(torch.compile(loss, backend="eager")(*given))
    (value + given[0].sum()).backward()
    torch.testing.assert_close(given[0].grad, torch.ones_like(given[0]))


@pytest.mark.parametrize("loss", [mean, ready_made])
def test_labels_outside_the_vocabulary_are_an_error_of_the_graph(loss):
    *given, labels = inputs()
    labels[1] = 99
    with pytest.raises(ValueError, match="got 99"):
        torch.compile(loss, backend="aot_eager", fullgraph=True)(*given, labels)


def test_shapes_that_do_not_fit_are_an_error_of_tracing():
    hidden_states, weight, labels = inputs()
    compiled = torch.compile(mean, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"weight must have shape \(V, 16\)"):
        compiled(hidden_states, weight[:, :3], labels)


@pytest.mark.parametrize("loss", [mean, ready_made])
def test_selective_checkpointing_keeps_what_the_operator_computed(loss):
    seen: list[str] = []

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_ours = "liger_patch" in str(operator)
        if is_ours and not context.is_recompute:
            seen.append(str(operator))
        return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def checkpointed(*given: Tensor) -> Any:
        return checkpoint.checkpoint(loss, *given, use_reentrant=False, context_fn=contexts)

    given = inputs()
    assert_same(with_gradients(checkpointed, *given), loss, *given)
    assert len(seen) == 1


def test_forward_pass_keeps_no_inputs_where_it_has_the_gradients():
    saved: list[int] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        saved.append(len(output.args[0]) - 1)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    loss = torch.compile(linear_cross_entropy, backend=backend, fullgraph=True)(*inputs())
    loss.backward()
    assert saved[0] == 2, "two gradients, behind the loss"


def test_other_dispatch_modes_see_the_products():
    given = inputs(ignored=0.0)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(*given).backward()
    assert counter.get_total_flops() == 3 * 2 * 37 * 51 * 16


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="torch < 2.9")
@pytest.mark.parametrize(
    ("name", "reads_values"),
    [
        ("linear_cross_entropy", True),
        ("linear_cross_entropy_backward", True),
        ("cross_entropy", True),
        ("cross_entropy_backward", False),
    ],
)
def test_what_reads_values_is_no_part_of_a_cuda_graph(name, reads_values):
    tags = getattr(torch.ops.liger_patch, name).default.tags
    assert (torch.Tag.cudagraph_unsafe in tags) is reads_values


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("frozen", [True, False])
def test_upstream_gradients_of_ignored_tokens_do_not_count(frozen, compiled):
    def losses(*given: Tensor) -> Tensor:
        return linear_cross_entropy(*given, reduction="none")

    hidden_states, weight, labels = inputs(dtype=torch.float32)
    leaves = [hidden_states] if frozen else [hidden_states, weight]
    weight.requires_grad_(not frozen)
    function = torch.compile(losses, backend="aot_eager", fullgraph=True) if compiled else losses
    upstream = torch.where(labels == -100, float("nan"), 1.0)
    found = torch.autograd.grad(function(hidden_states, weight, labels), leaves, upstream)
    assert all(gradient.isfinite().all() for gradient in found)
