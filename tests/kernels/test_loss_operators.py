"""The losses as operators: what torch.compile, torch.export, make_fx, FakeTensorMode and selective
checkpointing make of them. The truth is the same call outside of a graph.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_graphs import MARKS, Graphs
from exactness import assert_no_worse
from functorch.compile import make_boxed_func
from slow_cases import slow_but
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from liger_patch import cross_entropy, linear_cross_entropy, linear_log_probs

pytestmark = MARKS
Loss = Callable[..., Tensor]
NAMES = ("hidden_states", "weight")


def mean(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options: dict[str, Any] = {"softcap": 30.0, "logit_scale": 0.7, "label_smoothing": 0.1}
    options["class_weight"] = weight[:, 0].detach().abs()
    return 2 * linear_cross_entropy(hidden_states * 1.5, weight, labels, **options)


def each_token(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    losses = linear_cross_entropy(hidden_states, weight, labels, reduction="none")
    return (losses * torch.arange(len(losses))).sum()


def frozen(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    states = hidden_states.tanh()
    losses = linear_cross_entropy(states, weight.detach(), labels, reduction="none", z_loss=0.1)
    return losses.square().sum() + weight.sum()


def with_adapter(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    low_rank = hidden_states[:, :3], weight[:, :3]
    bias = weight.sum(1)
    return linear_cross_entropy(hidden_states, weight, labels, bias=bias, low_rank=low_rank)


def log_probs(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return -linear_log_probs(hidden_states, weight, labels).log_probs.mean()


def statistics(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    outputs = ["entropy", "is_top1", "mean_logits"]
    result = linear_log_probs(hidden_states, weight, labels, outputs=outputs, temperature=2.0)
    assert result.lse is None
    assert result.entropy is not None
    assert result.is_top1 is not None
    assert not result.is_top1.requires_grad
    return result.entropy.sum() - (result.log_probs * result.is_top1).sum()


def ready_made(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(hidden_states @ weight.T, labels, z_loss=1e-2)


LOSSES = (mean, each_token, frozen, with_adapter, log_probs, statistics, ready_made)
MANY = slow_but([mean, statistics, ready_made], LOSSES)


def inputs(
    tokens: int = 37, ignored: float = 0.3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden_states = torch.randn(tokens, 16, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(51, 16, generator=generator, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 51, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = -100
    return hidden_states, weight, labels


def with_gradients(loss: Loss, *given: Tensor) -> dict[str, Tensor | None]:
    value = loss(*given)
    gradients = torch.autograd.grad(value, given[:2])
    return {"loss": value.detach(), **dict(zip(NAMES, gradients, strict=True))}


def assert_same(ours: dict[str, Tensor | None], loss: Loss, *given: Tensor) -> None:
    truth = with_gradients(loss, *given)
    assert_no_worse(ours, truth, truth, torch.float32)


@pytest.mark.parametrize("loss", MANY)
def test_one_graph_serves_any_number_of_supervised_tokens(loss: Loss) -> None:
    graphs = Graphs("aot_eager")
    compiled = torch.compile(loss, backend=graphs, fullgraph=True)
    counts = []
    for ignored in (0.3, 0.9, 0.0, 1.0):
        given = inputs(ignored=ignored)
        assert_same(with_gradients(compiled, *given), loss, *given)
        counts.append(len(graphs.linears))
    assert len(set(counts)) == 1


@pytest.mark.parametrize("loss", MANY)
def test_a_dynamic_graph_serves_any_number_of_tokens(loss: Loss) -> None:
    graphs = Graphs("aot_eager")
    compiled = torch.compile(loss, backend=graphs, fullgraph=True, dynamic=True)
    counts = []
    for tokens in (37, 12, 50):
        given = inputs(tokens)
        assert_same(with_gradients(compiled, *given), loss, *given)
        counts.append(len(graphs.linears))
    assert len(set(counts)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_inductor(loss: Loss) -> None:
    given = inputs()
    assert_same(with_gradients(torch.compile(loss, fullgraph=True), *given), loss, *given)


def test_low_precision_is_no_worse_than_outside_of_a_graph() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        given = inputs(dtype=dtype)
        wide = [each.detach().double().requires_grad_() for each in given[:2]]
        truth = with_gradients(mean, *wide, given[2])
        compiled = torch.compile(mean, backend="aot_eager", fullgraph=True)
        ours, eager = with_gradients(compiled, *given), with_gradients(mean, *given)
        assert_no_worse(ours, eager, truth, dtype)


def test_autocast() -> None:
    given = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        eager = with_gradients(mean, *given)
        ours = with_gradients(torch.compile(mean, backend="aot_eager", fullgraph=True), *given)
    assert_no_worse(ours, eager, eager, torch.float32)


def test_without_gradients_no_gradient_is_computed() -> None:
    hidden_states, weight, labels = inputs()
    with torch.no_grad():
        graph = make_fx(lambda *given: linear_cross_entropy(*given))(hidden_states, weight, labels)
        loss, *gradients = torch.ops.liger_patch.linear_cross_entropy(
            *_arguments_in(graph, hidden_states, weight, labels)
        )
    assert not any(gradient.numel() for gradient in gradients)
    torch.testing.assert_close(loss, linear_cross_entropy(hidden_states, weight, labels).detach())


def _arguments_in(graph: torch.fx.GraphModule, *given: Tensor) -> list[Any]:
    """The arguments of the operator in a graph of these inputs."""
    (node,) = (n for n in graph.graph.nodes if "linear_cross_entropy" in str(n.target))
    places = [n for n in graph.graph.nodes if n.op == "placeholder"]
    return [given[places.index(a)] if isinstance(a, torch.fx.Node) else a for a in node.args]


def test_a_number_of_items_that_changes_is_no_constant() -> None:
    graphs = Graphs()
    compiled = torch.compile(linear_cross_entropy, backend=graphs, fullgraph=True)
    given = inputs()
    for items in range(3, 9):
        ours = compiled(*given, num_items_in_batch=items)
        truth = linear_cross_entropy(*given, num_items_in_batch=items)
        torch.testing.assert_close(ours, truth)
    assert len(graphs.linears) <= 2  # of one number, and of any


def test_a_number_of_items_that_does_not_fit_is_an_error_in_a_graph_too() -> None:
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager")
    with pytest.raises(Exception, match="num_items_in_batch must be a finite number >= 0, got -3"):
        compiled(*inputs(), num_items_in_batch=-3)


def test_a_graph_may_run_backward_twice() -> None:
    given = inputs()
    for loss in (mean, log_probs):
        compiled = torch.compile(loss, backend="eager", fullgraph=True)(*given)
        first = torch.autograd.grad(compiled, given[:2], retain_graph=True)
        second = torch.autograd.grad(compiled, given[:2])
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_second_derivative_is_refused() -> None:
    given = inputs()
    for loss in (mean, log_probs, ready_made):
        compiled = torch.compile(loss, backend="eager", fullgraph=True)(*given)
        with pytest.raises(RuntimeError, match="create_graph=True"):
            torch.autograd.grad(compiled, given[:2], create_graph=True)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_step_is_not_differentiated_again(loss: Loss, name: str) -> None:
    """Its gradients depend on the inputs, also where the forward pass computed them."""
    given = inputs()
    leaf = given[NAMES.index(name)]

    def gradient(*given: Tensor) -> Tensor:
        inner = given[NAMES.index(name)]
        return torch.autograd.grad(loss(*given).square() + inner.square().sum(), inner)[0]

    recorded = make_fx(gradient)(*given)(*given)
    torch.testing.assert_close(recorded, gradient(*given))
    if loss is frozen and name == "weight":  # which is detached from the operator
        return
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(recorded.sum(), leaf)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_recorded_step_compiles_under_no_grad(loss: Loss) -> None:
    given = inputs()
    recorded = make_fx(lambda *given: torch.autograd.grad(loss(*given), given[:2]))(*given)
    with torch.no_grad():
        ours = torch.compile(recorded, backend="aot_eager", fullgraph=True)(*given)
    torch.testing.assert_close(ours, torch.autograd.grad(loss(*given), given[:2]))
    assert not any(gradient.requires_grad for gradient in ours)


@pytest.mark.parametrize("end", ["dropped", "trained", "kept for another backward pass"])
def test_gradients_live_as_long_as_the_graph_of_their_call(end: str) -> None:
    given = inputs()
    graph = make_fx(lambda *given: linear_cross_entropy(*given))(*given)
    arguments = _arguments_in(graph, *given)
    loss, *gradients = torch.ops.liger_patch.linear_cross_entropy(*arguments)
    stored = StorageWeakRef(gradients[1].untyped_storage())
    assert gradients[1].shape == given[1].shape
    del gradients
    if end != "dropped":
        loss.backward(retain_graph=end != "trained")
    del loss
    gc.collect()
    assert stored.expired()


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        return None


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_whose_gradient_nobody_asks_for_adds_none(loss: Loss) -> None:
    given = inputs()
    value = WithoutGradient.apply(torch.compile(loss, backend="eager")(*given))
    (value + given[0].sum()).backward()
    torch.testing.assert_close(given[0].grad, torch.ones_like(given[0]))


@pytest.mark.parametrize("loss", [mean, log_probs, ready_made])
def test_labels_outside_the_vocabulary_are_an_error_of_the_graph(loss: Loss) -> None:
    hidden_states, weight, labels = inputs()
    labels[1] = 99
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="got 99"):
        compiled(hidden_states, weight, labels)


@pytest.mark.parametrize("loss", [mean, log_probs])
def test_shapes_that_do_not_fit_are_an_error_of_tracing(loss: Loss) -> None:
    hidden_states, weight, labels = inputs()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"weight must have shape \(V, 16\)"):
        compiled(hidden_states, weight[:, :3], labels)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("loss", MANY)
def test_make_fx_sees_the_operator(loss: Loss, mode: str) -> None:
    def step(*given: Tensor) -> tuple[Tensor, ...]:
        value = loss(*given)
        return value, *torch.autograd.grad(value, given[:2])

    graph = make_fx(step, tracing_mode=mode)(*inputs())
    other = inputs(ignored=0.8)
    ours = dict(zip(("loss", *NAMES), graph(*other), strict=True))
    ours["loss"] = ours["loss"].detach()
    assert_same(ours, loss, *other)
    assert any("liger_patch" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize("loss", LOSSES)
def test_results_without_values_have_the_shapes_of_those_with(loss: Loss) -> None:
    given = inputs()
    truth = with_gradients(loss, *given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = with_gradients(loss, *(mode.from_tensor(each) for each in given))
    for name, expected in truth.items():
        ours = fake[name]
        assert expected is not None
        assert ours is not None
        assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)


class Model(nn.Module):
    def __init__(self, weight: Tensor, loss: Loss) -> None:
        super().__init__()
        self.weight, self.loss = nn.Parameter(weight.detach().clone()), loss

    def forward(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        return self.loss(hidden_states, self.weight, labels)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("loss", [mean, log_probs, ready_made])
def test_what_is_exported_trains(loss: Loss, strict: bool) -> None:
    hidden_states, weight, labels = inputs()
    tokens = torch.export.Dim("tokens")
    program = torch.export.export(
        Model(weight, loss),
        (hidden_states.detach(), labels),
        dynamic_shapes={"hidden_states": {0: tokens}, "labels": {0: tokens}},
        strict=strict,
    )
    hidden_states, _, labels = inputs(20, ignored=0.5)
    model: Any = program.module()
    value = model(hidden_states.detach(), labels)
    value.backward()
    (trained,) = model.parameters()
    truth = with_gradients(loss, hidden_states, weight, labels)
    truth.pop("hidden_states")
    assert_no_worse({"loss": value.detach(), "weight": trained.grad}, truth, truth, torch.float32)


@pytest.mark.parametrize("loss", [mean, log_probs, ready_made])
def test_selective_checkpointing_keeps_what_the_operator_computed(loss: Loss) -> None:
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


def test_forward_pass_keeps_no_inputs_where_it_has_the_gradients() -> None:
    saved: list[int] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        saved.append(len(output.args[0]) - 1)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    loss = torch.compile(linear_cross_entropy, backend=backend, fullgraph=True)(*inputs())
    loss.backward()
    assert saved[0] == 2, "two gradients, behind the loss"


def test_other_dispatch_modes_see_the_products() -> None:
    given = inputs(ignored=0.0)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(*given).backward()
    assert counter.get_total_flops() == 3 * 2 * 37 * 51 * 16


def test_a_quantized_weight_breaks_the_graph() -> None:
    class Rows:
        """A weight whose rows are dequantized, as a layer holds it."""

        shape, dtype, device = torch.Size([51, 16]), torch.float64, torch.device("cpu")
        row_multiple, requires_grad = 1, False

        def __init__(self, stored: Tensor) -> None:
            self.stored = stored

        def rows(self, start: int, stop: int) -> Tensor:
            return self.stored[start:stop]

        def is_current(self) -> bool:
            return True

    hidden_states, weight, labels = inputs()
    rows: Any = Rows(weight.detach())

    def loss(hidden_states: Tensor) -> Tensor:
        return linear_cross_entropy(hidden_states * 2, rows, labels)

    graphs = Graphs()
    ours = torch.compile(loss, backend=graphs)(hidden_states)
    torch.testing.assert_close(ours, loss(hidden_states), rtol=0, atol=0)
    assert len(graphs.linears) == 1
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(loss, backend=graphs, fullgraph=True)(hidden_states)


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="torch < 2.9")
@pytest.mark.parametrize(
    ("name", "reads_values"),
    [
        ("linear_cross_entropy", True),
        ("linear_cross_entropy_backward", True),
        ("linear_log_probs", True),
        ("linear_log_probs_backward", True),
        ("cross_entropy", True),
        ("cross_entropy_backward", False),
    ],
)
def test_what_reads_values_is_no_part_of_a_cuda_graph(name: str, reads_values: bool) -> None:
    tags = getattr(torch.ops.liger_patch, name).default.tags
    assert (torch.Tag.cudagraph_unsafe in tags) is reads_values
