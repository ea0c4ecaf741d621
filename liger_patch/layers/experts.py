"""Derive the classes of a mixture's experts on kernels, and of PEFT's wrappers around them.

Transformers gives its classes of experts one form (``use_experts_implementation``): two 3-D weights
and a gate. A probe tests that a layer's own code computes what the kernels do. PEFT's wrappers of
these weights (``target_parameters``) build W + scale B A for all experts at each call; where their
adapters are plain, a call runs the experts with adapters beside the weights instead.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from liger_patch.deferred.engines import in_process_group
from liger_patch.kernels.backend import PLAIN_TENSORS, autocast_dtype
from liger_patch.kernels.chunk_sizes import size_of_experts
from liger_patch.kernels.expert_steps import Activation, ExpertProjection
from liger_patch.kernels.experts import run_experts
from liger_patch.kernels.graphs import is_compiled_here
from liger_patch.layers.checks import (
    configuration,
    few_numbers,
    has_hooks,
    is_left_to_model,
    layers_of,
    needs_own_code,
    probe_of,
    results_match,
)
from liger_patch.layers.long_rows import tokens_of_slice
from liger_patch.layers.mlp import ACTIVATIONS
from liger_patch.subclass import derived_class, is_transformers, once_for_each_class

FIRST, LAST = "gate_up_proj", "down_proj"  # names of the weights; biases have another ending
BIAS = "_bias"
HELD = "in_4_bits"  # the modules that hold the weights of a layer in 4 bits
# what a layer must be: attributes that use_experts_implementation sets, older ones not all
FORM = {"has_gate": True, "has_post_expert_norm": False, "_is_expert_parallel": False}
NEEDED = ("has_bias", "is_transposed")
IMPLEMENTATIONS = None, "eager", "grouped_mm"  # whose results ours are
PROBED_EXPERTS, PROBED_HIDDEN, PROBED_SIZE = 3, 4, 5


def is_wrapper(module: nn.Module) -> bool:
    """Return True for PEFT's wrapper of a parameter (``target_parameters``), of experts or not."""
    if "peft" not in sys.modules:
        return False
    from liger_patch.readers import lora_adapters

    return lora_adapters.wraps_experts(module)


def experts_class(module: Any) -> Any:
    """Return the class that puts experts, or a wrapper around them, on kernels; or None."""
    if is_wrapper(module):
        return expert_wrapper(type(module))
    own = type(module).forward
    how = _activation(module)
    if not is_transformers(own) or how is None or not _is_of_form(module):
        return None
    if not _agree(module, how):
        return None
    return expert_layer(type(module))


def keeps_class(module: Any) -> bool:
    """Return True for experts in 4 bits, and wrappers around them: without the classes that
    ``quantize_experts`` gave them, they would have no weights.
    """
    experts = module.get_base_layer() if is_wrapper(module) else module
    return HELD in experts._modules


def is_served(module: nn.Module) -> bool:
    """Return whether a module is experts that are on kernels, or may be."""
    if is_wrapper(module) or HELD in module._modules:
        return False
    if "experts" in layers_of(module):
        return True
    return type(module).__name__.endswith("Experts") and experts_class(module) is not None


def experts_configuration(module: Any) -> Hashable:
    """Return what ``experts_class`` depends on: equal configurations have the same class."""
    if is_wrapper(module):
        return type(module)
    return configuration(module, without=(FIRST, LAST, FIRST + BIAS, LAST + BIAS, "config"))


@once_for_each_class
def expert_layer(original: Any) -> type[nn.Module]:
    """Derive the class of experts on kernels."""

    def forward(self, hidden_states: Tensor, *routing: Any, **options: Any) -> Tensor:
        y = None if options else result(self, hidden_states, routing, {})
        return original.forward(self, hidden_states, *routing, **options) if y is None else y

    return derived_class(original, expert_layer, forward=forward, _liger_patch_layers=("experts",))


@once_for_each_class
def expert_wrapper(original: Any) -> type[nn.Module]:
    """Derive the class of PEFT's wrapper that runs the experts with adapters beside weights."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        y = None if options else _adapted_result(self, x, args)
        return original.forward(self, x, *args, **options) if y is None else y

    return derived_class(
        original, expert_wrapper, forward=forward, _liger_patch_layers=("experts",)
    )


def _adapted_result(wrapper: nn.Module, x: Tensor, routing: tuple) -> Tensor | None:
    from liger_patch.readers import lora_adapters

    plain = lora_adapters.expert_adapters(wrapper)
    if isinstance(plain, str):
        return None
    experts, between, adapters = plain
    if "experts" not in layers_of(experts) or has_hooks(*between):
        return None
    return result(experts, x, routing, adapters)


def result(layer: Any, x: Tensor, routing: tuple, adapters: dict[str, Any]) -> Tensor | None:
    """Return the experts' result, or None where the layer's own code must run."""
    # in 4 bits, the layer's own code would dequantize all experts for each one
    is_left = HELD not in layer._modules and is_left_to_model(layer, x)
    if is_compiled_here() or is_left or len(routing) != 2 or x.dim() != 2:
        return None
    index, weights = routing
    if index.shape != weights.shape:  # older versions give some layers the weights of all experts
        return None
    how = _activation(layer)
    if how is None or not _is_of_form(layer) or _has_own_way(layer):
        return None
    first, last = (_projection(layer, name, adapters.get(name)) for name in (FIRST, LAST))
    tensors = [each for each in (*first[:4], *last[:4], x, *routing) if isinstance(each, Tensor)]
    if needs_own_code(*tensors) or not all(type(each) in PLAIN_TENSORS for each in tensors):
        return None
    dtype = autocast_dtype(x.device.type, x.dtype)
    dense = [each for each in (first.weight, last.weight) if isinstance(each, Tensor)]
    if dtype is None and any(each.dtype != x.dtype for each in dense):
        return None
    dtype = dtype or x.dtype
    size = size_of_experts(x.shape[1], last.weight.shape[1], index.shape[1])
    tokens = tokens_of_slice(x, size, dtype)
    return run_experts(x, index, weights, first, last, how, dtype, tokens)


def _has_own_way(layer: Any) -> bool:
    """Return whether a call now does more than the class's own code: somebody chose another
    implementation, replaced the gate, or has hooks.
    """
    if _chosen(layer) not in IMPLEMENTATIONS or "_apply_gate" in layer.__dict__:
        return True
    if "_is_expert_parallel" not in layer.__dict__ and in_process_group():
        return True  # an older Transformers, whose experts do not tell
    return has_hooks(*(each for key, each in layer._modules.items() if key != HELD))


def own_implementations(model: nn.Module) -> Counter[str]:
    """Return how many experts run Transformers' own code, by the implementation that was chosen."""
    layers = (m for m in model.modules() if "experts" in layers_of(m) and not is_wrapper(m))
    return Counter(each for each in map(_chosen, layers) if each not in IMPLEMENTATIONS)


def _chosen(layer: Any) -> str | None:
    """Return the implementation that was chosen for a layer. Experts in 4 bits have ours alone,
    also while Transformers chooses another to generate on a GPU: PEFT's forward cannot read them.
    """
    if HELD in layer._modules:
        return None
    return getattr(getattr(layer, "config", None), "_experts_implementation", None)


def _is_of_form(layer: Any) -> bool:
    attributes = layer.__dict__
    return all(name in attributes for name in NEEDED) and all(
        attributes.get(name, value) == value for name, value in FORM.items()
    )


def _projection(layer: Any, name: str, adapter: Any) -> ExpertProjection:
    held = layer._modules.get(HELD)
    if held is None:
        weight = getattr(layer, name)
        weight = weight if layer.is_transposed else weight.transpose(1, 2)
    else:
        weight = held[name]
    bias = getattr(layer, name + BIAS) if layer.has_bias else None
    return ExpertProjection(weight, bias, *(adapter.matrices() if adapter is not None else ()))


def _activation(module: Any) -> Activation | None:
    """Return what the attributes of a layer say that it computes between its products."""
    own = module.__dict__  # where a module has no such attribute, asking it raises an error inside
    limit = own.get("limit", own.get("swiglu_limit"))
    # Transformers 5.0 does not say: there gpt-oss alone has a limit
    is_interleaved = not own.get("is_concatenated", limit is None)
    if limit is not None:
        alpha = own.get("alpha", own.get("swiglu_alpha"))
        shift = 0.0 if alpha is None else 1.0
        return Activation("clamped", alpha or 1.0, limit, shift, is_interleaved)
    act = getattr(module, "act_fn", None)
    name = "silu" if act is silu else ACTIVATIONS.get(getattr(type(act), "forward", None))
    return None if name is None else Activation(name, is_interleaved=is_interleaved)


def _agree(module: Any, how: Activation) -> bool:
    """Return whether the layer's own code computes what the kernels do, on a small input."""

    def results(forward: Any) -> list[Tensor]:
        return [forward(_small(module), *_inputs())]

    def on_kernels(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        first, last = (_projection(layer, name, None) for name in (FIRST, LAST))
        return run_experts(x, index, weights, first, last, how, x.dtype)

    own = inspect.unwrap(type(module).forward)  # not what the configuration's name says
    return results_match(lambda: results(own), lambda: results(on_kernels))


def _small(module: Any) -> Any:
    """Return a copy with few small experts."""
    probe = probe_of(module)
    count, hidden, size = PROBED_EXPERTS, PROBED_HIDDEN, PROBED_SIZE
    probe.num_experts = count
    for name, (source, features) in {FIRST: (hidden, 2 * size), LAST: (size, hidden)}.items():
        shape = (source, features) if module.is_transposed else (features, source)
        # large enough to be clamped
        probe._parameters[name] = nn.Parameter(few_numbers(count, *shape) * 3.0)
        if module.has_bias:
            probe._parameters[name + BIAS] = nn.Parameter(few_numbers(count, features))
    return probe


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return x, experts and weights of a few tokens; one expert has none."""
    index = torch.tensor([[0, 2], [2, 0], [0, 2]])
    return few_numbers(3, PROBED_HIDDEN) * 3.0, index, few_numbers(3, 2).abs()
