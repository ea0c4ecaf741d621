"""One training step of a model as named tensors: eager, patched, or in float64 as the truth."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from exactness import assert_no_worse
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from liger_patch import apply_patch, patch_status, revert_patch

Step = dict[str, Tensor | None]
# of the largest gradient: below it is what is zero but for rounding
ROUNDING = 1e-12  # in float64
ROUNDING_OF_OTHERS = 0.02  # in bfloat16 too

# Transformers 5.0 collects no router logits, or other tensors, for these and fails on their loss.
FAIL_ON_ROUTERS = ("dbrx", "granitemoe", "granitemoeshared", "qwen3_next", "qwen3_omni_moe_thinker")


class Float64(TorchFunctionMode):
    """A float64 model stays in float64 where its code, or Transformers' loss, casts to float32, or
    fills one with a float (``torch.full``) without a dtype.

    So the loss that a model computes within this context is the truth, auxiliary losses included.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.float:
            return args[0] if args[0].dtype == torch.float64 else args[0].double()
        if func is torch.full and any(isinstance(e, float) for e in (*args, *kwargs.values())):
            kwargs.setdefault("dtype", torch.float64)
        # 20 steps are many calls, and most have no dtype; ``view`` gives the same bits another one
        has_dtype = any(each is torch.float32 for each in (*args, *kwargs.values()))
        if has_dtype and func is not Tensor.view:
            args = [torch.float64 if each is torch.float32 else each for each in args]
            kwargs = {n: torch.float64 if v is torch.float32 else v for n, v in kwargs.items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """The backward pass, too, where TRL's kernel and recomputed layers cast to float32."""
    run_backward = torch.autograd._engine_run_backward

    def run_backward_in_float64(*args: Any, **kwargs: Any) -> Any:
        with Float64():
            return run_backward(*args, **kwargs)

    with (
        Float64(),
        mock.patch.object(torch.autograd, "_engine_run_backward", run_backward_in_float64),
    ):
        yield


def widened(model: PreTrainedModel) -> PreTrainedModel:
    """A float64 copy of a model that has not been called yet."""
    return copy.deepcopy(model).double()


@contextlib.contextmanager
def patched(model: PreTrainedModel, **options: Any) -> Iterator[PreTrainedModel]:
    apply_patch(model, **options)
    try:
        yield model
    finally:
        revert_patch(model)


def router_arguments(model: PreTrainedModel) -> dict[str, bool]:
    """What makes a mixture of experts add its auxiliary loss."""
    takes_it = "output_router_logits" in inspect.signature(model.forward).parameters
    if transformers.__version__.startswith("5.0.") and model.config.model_type in FAIL_ON_ROUTERS:
        takes_it = False
    return {"output_router_logits": True} if takes_it else {}


def call(model: PreTrainedModel, batch: dict[str, Any], **arguments: Any) -> Any:
    """The model's outputs. A float64 model computes in float64 throughout."""
    torch.manual_seed(0)
    if model.dtype != torch.float64:
        return model(**batch, **arguments)
    wide = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }
    with Float64():
        return model(**wide, **arguments)


def gradients(model: PreTrainedModel, loss: Tensor) -> Step:
    """{name of each parameter: its gradient}; the model keeps none."""
    model.zero_grad()
    loss.backward()
    results = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return results


class Products(TorchDispatchMode):
    """The number of matrix products, but for those with a dimension of size ``thin``."""

    def __init__(self, thin: int | None = None) -> None:
        super().__init__()
        self.number, self.thin = 0, thin

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [each.shape for each in args if isinstance(each, Tensor)]
        self.number += "mm" in str(func) and not any(self.thin in shape for shape in shapes)
        return func(*args, **(kwargs or {}))


def with_checkpoints(model: Any, reentrant: bool | None) -> Any:
    """The model, with gradient checkpointing of this kind, or without for None."""
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model


def step(
    model: PreTrainedModel, batch: dict[str, Any], *, autocast: bool = False, **arguments: Any
) -> Step:
    """{"loss": ..., name of each parameter: its gradient} of one training step; with ``autocast``,
    its forward pass is under autocast to bf16.
    """
    low = torch.autocast(model.device.type, torch.bfloat16)
    with low if autocast else contextlib.nullcontext():
        loss = call(model, batch, **arguments).loss
    return {"loss": loss.detach(), **gradients(model, loss)}


def tell_apart(truth: Step, *others: Step) -> list[Step]:
    """All of them without the gradients that are zero but for rounding.

    Such are those of a key's bias: it shifts all scores of a softmax alike. They are to be zero but
    for rounding in the others too.
    """
    sizes, largest = _sizes(truth)
    kept = [n for n in truth if n == "loss" or n not in sizes or sizes[n] >= ROUNDING * largest]
    assert len(kept) > len(truth) / 2
    for other in others:
        sizes, largest = _sizes(other)
        for name in sizes.keys() - set(kept):
            assert sizes[name] <= ROUNDING_OF_OTHERS * largest, name
    return [{name: results[name] for name in kept} for results in (truth, *others)]


def _sizes(values: Step) -> tuple[dict[str, float], float]:
    """{name: its largest number}, and that of all gradients."""
    sizes = {n: t.abs().max().item() for n, t in values.items() if t is not None and t.numel()}
    return sizes, max((size for name, size in sizes.items() if name != "loss"), default=0.0)


def joined(truth: Step, *others: Step) -> list[Step]:
    """All of them as one tensor: the loss and every gradient, each over its largest true value.

    In float32 the luck of a few roundings decides the error of a loss, or of a gradient of a few
    numbers (a gate, a norm): the rule for errors wants many numbers to compare.
    """
    results = []
    told_apart = tell_apart(truth, *others)
    for values in told_apart:
        parts = []
        for name, expected in told_apart[0].items():
            value = values[name]
            assert (value is None) == (expected is None), name
            if value is not None and expected is not None and value.numel():
                parts.append((value.double() / (expected.abs().max().item() or 1.0)).flatten())
        results.append({"loss and gradients": torch.cat(parts)})
    return results


def assert_same_step(ours: Step, truth: Step) -> None:
    """Two steps in float64 differ by rounding alone."""
    truth, ours = tell_apart(truth, ours)
    assert_no_worse(ours, truth, truth, torch.float32)


def assert_right(ours: Step, eager: Step, truth: Step, dtype: torch.dtype = torch.float32) -> None:
    """A step is no worse than eager's, all numbers together."""
    truth, eager, ours = joined(truth, eager, ours)
    assert_no_worse(ours, eager, truth, dtype)


def assert_fused(model: Any) -> None:
    status = patch_status(model)
    assert (status.fused, status.reason) == (True, None), str(status)
