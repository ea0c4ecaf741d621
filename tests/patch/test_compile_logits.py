"""torch.compile around a patched model's call: logits that are read within the graph, or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiled_graphs import MARKS, Graphs
from compiled_models import GRAPH, assert_same_step, batch_of, make_model
from slow_cases import slow_but
from tiny_models import Batch
from torch import Tensor, nn

from liger_patch import patch_status, revert_patch

pytestmark = MARKS


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(**batch).logits.float()
    labels = batch["labels"][:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels)


def flattened_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(**batch).logits.type(torch.float32)
    labels = batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(end_dim=-2), labels)


def loss_and_values(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(**batch)
    return outputs.loss + outputs.logits.logsumexp(-1).mean()


def written_logits(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(**batch)
    copy, part = outputs.logits * 1.0, outputs.logits[:, :2]
    part.mul_(2.0)
    return outputs.loss + outputs.logits.square().mean() + copy.mean()


def sizes_alone(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(**batch)
    logits = outputs.logits
    return outputs.loss * logits.shape[-1] * logits.dim() / logits.element_size()


def values_behind_a_break(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(**batch)
    torch._dynamo.graph_break()
    return outputs.loss + outputs.logits.logsumexp(-1).mean()


@GRAPH
@pytest.mark.parametrize(
    ("of_user", "products", "fullgraph"),
    slow_but(
        [(own_loss, 0, True), (flattened_loss, 0, True)],
        [
            (own_loss, 0, True),
            (flattened_loss, 0, True),
            (loss_and_values, 1, True),
            (written_logits, 2, True),
            (sizes_alone, 0, True),
            (values_behind_a_break, 1, False),
        ],
    ),
)
@pytest.mark.parametrize("model_type", slow_but(["cohere"], ["cohere", "gemma2"]))
def test_logits_within_a_graph_are_those_of_eager(
    model_type: str, of_user: Callable[..., Tensor], products: int, fullgraph: bool
) -> None:
    """Nobody reads them: no product; somebody reads them: the values of an uncompiled call."""
    model, uncompiled = make_model(model_type), make_model(model_type)
    batch, graphs = batch_of(model), Graphs()
    compiled = torch.compile(of_user, backend=graphs, fullgraph=fullgraph)
    results = []
    for each, call in ((model, compiled), (uncompiled, of_user)):
        loss = call(each, batch)
        loss.backward()
        gradients = {name: p.grad for name, p in each.named_parameters()}
        results.append({"loss": loss.detach(), **gradients})
    assert_same_step(*results)
    layers = sum(type(module) is nn.Linear for module in model.modules())
    assert sum(graphs.linears) == layers - 1 + products
    assert patch_status(model).fused


def after_a_write(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Views and copies of logits that were taken before the logits were written to, and used
    behind that.
    """
    index = torch.tensor([1, 0])
    takes: list[Callable[[Tensor], Tensor]] = [
        lambda logits: logits[:, :-1],
        lambda logits: logits[:, index],
        lambda logits: logits[:, :-1].contiguous(),
        lambda logits: logits[:, :-1].flatten(0, 1),
        lambda logits: logits.view(-1, logits.shape[-1]),
        lambda logits: (logits * 0.5).detach(),
    ]
    results = []
    for take in takes:
        logits = model(**batch).logits
        taken = take(logits)
        logits.mul_(2.0)
        results.append(taken * 0.5)
    return results


@GRAPH
@pytest.mark.slow
def test_views_and_copies_in_a_graph_are_those_of_eager() -> None:
    model, uncompiled = make_model(), make_model()
    batch = batch_of(model)
    with torch.no_grad():
        found = torch.compile(after_a_write, backend="aot_eager", fullgraph=True)(model, batch)
        expected = after_a_write(uncompiled, batch)
        eager = after_a_write(revert_patch(uncompiled), batch)
    for each, ours, truth in zip(found, expected, eager, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(each, truth, rtol=1e-4, atol=1e-5)


@GRAPH
@pytest.mark.slow
def test_the_layout_in_a_graph_is_that_of_eager() -> None:
    model = make_model()
    batch = batch_of(model)

    def layouts() -> tuple:
        logits = model(**batch).logits
        parts = logits, logits[:, :-1], logits[:, :-1] * 2.0, logits[:, :-1].flatten(0, 1)
        return tuple((each.stride(), each.stride(-2), each.is_contiguous()) for each in parts)

    found = torch.compile(layouts, backend="aot_eager", fullgraph=True)()
    revert_patch(model)
    assert found == layouts()


@GRAPH
@pytest.mark.slow
def test_what_dynamo_does_not_ask_for_is_nan() -> None:
    model, batch = make_model(), batch_of(make_model())

    def loss() -> Tensor:
        logits = model(**batch).logits
        criterion = nn.CrossEntropyLoss()
        return criterion(logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1))

    assert torch.compile(loss, backend="eager", fullgraph=True)().isnan()
