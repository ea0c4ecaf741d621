"""Steps of patched models whose head is distributed over ranks, for test_distributed.

Run once for each process of the group, with one argument for each case ("gathered --layers").
Exits with an error unless losses, gradients and logits are those of one process, and no real logits
are computed, gathered or read where none are asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import training_step
import transformers
from attention_models import Calls, seen_masks
from distributed_step import count_logits, device
from engine_models import saved
from engines import mesh_of_all, tensor_parallel, whole
from gloo_group import each_case
from packaging.version import Version
from tiny_models import ROWS, tiny_batch, tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from liger_patch import apply_patch, patch_status
from liger_patch.layers.masked_attention import DeferredMask

LOSS, GRADIENTS = 1e-6, 1e-5  # relative, in float32


def check(arguments: argparse.Namespace, *_: object) -> None:
    # adapters start at random, on shards: those of one process would have other values
    alone = distributed(arguments) if arguments.lora else make(arguments)
    batch = {
        name: value.to(device()) for name, value in tiny_batch(alone, seed=3, length=10).items()
    }
    if arguments.packed:
        del batch["attention_mask"]
        batch["labels"][:, 4] = -100
        places = torch.tensor([[*range(4), *range(6)]], device=device())
        batch["position_ids"] = places.expand_as(batch["labels"])
    expected = step(alone, batch)
    model = distributed(arguments)
    apply_patch(model, layers=arguments.layers)
    context = loss_parallel() if arguments.style == "sharded" else contextlib.nullcontext()
    with context, warnings.catch_warnings():
        warnings.filterwarnings("ignore" if arguments.fallback else "error", "liger_patch")
        unmasked = without_masks(model) if arguments.packed else contextlib.nullcontext()
        with count_logits() as computed, Gathers() as gathers, unmasked:
            results = step(model, batch)
        if arguments.compiled:  # torch.compile leaves a call alone where modes see its operations
            model.compile(backend="aot_eager")
            results = step(model, batch)
        status = patch_status(model)
        if arguments.fallback:
            assert not status.fused
            assert arguments.fallback in (status.reason or ""), status.reason
        else:
            assert status.fused, status.reason
            assert not computed, f"real logits were computed {len(computed)} times"
            largest = batch["labels"].numel() * model.config.hidden_size
            assert gathers.largest <= largest, "logits were gathered"
            if arguments.style == "transformers":
                assert "projections run Transformers' own code" in str(status)
            if has_sharded_head(model, arguments.style):
                with torch.no_grad(), Gathers() as gathers:
                    whole(model(**batch).logits)
                assert gathers.largest > largest, "a gather of logits is not seen"
        for name, value in expected.items():
            value = whole(value)
            off = (whole(results[name]) - value).norm() / value.norm()
            assert off <= (LOSS if name == "loss" else GRADIENTS), f"{name} is off by {off:.3g}"
        if arguments.compiled:
            return
        check_evaluation(model, alone, batch, fused=not arguments.fallback)
        check_loss_of_logits(model, alone, batch)


@contextlib.contextmanager
def without_masks(model: Any) -> Iterator[None]:
    """Attention as on a GPU: all layers get deferred masks, which nobody makes."""
    with pytest.MonkeyPatch.context() as patches, seen_masks(model) as masks:
        calls = Calls(patches, served=True)
        yield
    assert {type(mask) for mask in masks} == {DeferredMask}
    assert (calls.made, len(calls.flash)) == (0, len(masks))


class Gathers(TorchDispatchMode):
    """The elements that a rank gives to the largest gather of a DTensor in this context."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "all_gather" in func.name():
            self.largest = max(self.largest, args[0].numel())
        return func(*args, **kwargs or {})


def make(arguments: argparse.Namespace) -> Any:
    model: Any = tiny_model(ROWS[arguments.model])
    model.config.use_cache = not arguments.packed  # with one, Transformers sees no sequences
    if arguments.tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    if arguments.even:
        model.resize_token_embeddings(model.config.vocab_size // 2 * 2, mean_resizing=False)
    return model.to(device())


def distributed(arguments: argparse.Namespace) -> Any:
    """The model on shards, with adapters on some projections where they are asked for."""
    model = STYLES[arguments.style](make(arguments))
    if arguments.checkpoints:
        model.gradient_checkpointing_enable()
    if not arguments.lora:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    names = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    return get_peft_model(model, LoraConfig(target_modules=names, init_lora_weights=False))


def has_sharded_head(model: Any, style: str) -> bool:
    """Return whether each rank has its own rows; plans of Transformers 5.0 leave the head whole."""
    sharded = isinstance(model.get_output_embeddings().weight, DTensor)
    is_old = Version(transformers.__version__) < Version("5.17")
    assert sharded or (is_old and style == "transformers"), "the head is not sharded"
    return sharded


def step(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss, and all gradients, which are distributed as their parameters are."""
    results = {n: v for n, v in training_step.step(model, batch).items() if v is not None}
    for name, parameter in model.named_parameters():
        assert name not in results or type(results[name]) is type(parameter.data)
    return results


def check_evaluation(model: Any, alone: Any, batch: dict[str, Tensor], *, fused: bool) -> None:
    """Without gradients the loss is fused too, and nan without a label; ``outputs.logits`` are
    computed when read.
    """
    with torch.no_grad(), count_logits() as computed:
        outputs = model(**batch)
        assert len(computed) == 0
        assert patch_status(model).fused is fused
        expected = alone(**batch)
        torch.testing.assert_close(whole(outputs.loss), expected.loss)
        assert outputs.logits.shape == expected.logits.shape
        torch.testing.assert_close(whole(outputs.logits), expected.logits)
        assert len(computed) == fused
        none = batch | {"labels": torch.full_like(batch["labels"], -100)}
        assert whole(model(**none).loss).isnan()


def check_loss_of_logits(model: Any, alone: Any, batch: dict[str, Tensor]) -> None:
    """Logits that are read have their ordinary gradient, of every parameter, once."""
    gradients = []
    for each in (model, alone):
        logits: Any = each(**batch).logits
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        logits.square().mean().backward()
        trained = {name: p for name, p in each.named_parameters() if p.requires_grad}
        gradients.append({name: whole(p.grad) for name, p in trained.items()})
        each.zero_grad()
    ours, expected = gradients
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, msg=lambda m, name=name: f"{name}: {m}")


def parallelized(head: Any, **more: Any) -> Callable[[Any], Any]:
    """PyTorch's ``parallelize_module``: projections and the head on shards."""
    return lambda model: tensor_parallel(model, head, **more).model


def head_alone(model: Any) -> Any:
    return parallelize_module(model, mesh_of_all(), {"lm_head": gathered})


def transformers_plan(model: Any) -> Any:
    """Transformers' own plan, of a checkpoint."""
    folder = saved(model)
    try:
        from transformers.distributed import DistributedConfig

        how: dict[str, Any] = {"distributed_config": DistributedConfig(tp_plan="auto")}
    except TypeError:  # of older versions, which know no plan
        how = {"tp_plan": "auto"}
    loaded = type(model).from_pretrained(folder, **how)
    loaded.train()
    return loaded


gathered = ColwiseParallel(output_layouts=Replicate())
STYLES: dict[str, Callable[[Any], Any]] = {
    "gathered": parallelized(gathered),
    "head_alone": head_alone,
    "sharded": parallelized(ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)),
    "sequence": parallelized(
        ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        **{
            "model.norm": PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(1)
            )
        },
    ),
    "transformers": transformers_plan,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("style", choices=STYLES)
    parser.add_argument("--model", default="llama")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--even", action="store_true", help="shards of one size")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--packed", action="store_true", help="rows of two sequences")
    parser.add_argument("--compiled", action="store_true", help="as a whole")
    parser.add_argument("--fallback", default="")
    each_case(check, parser)
