"""Derive the classes of gated feed-forward layers on kernels, each from a layer's own class.

GATES says what the kernel must know of a class. A probe tests it before a layer is replaced:
another version of Transformers may compute something else under the same names. Layers that do more
than ``down(act(gate) * up)``, as with dropout or a scale, run their own code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from liger_patch.kernels.backend import autocast_dtype
from liger_patch.kernels.gated import run_gated
from liger_patch.kernels.gated_mlp import run_gated_mlp
from liger_patch.kernels.lora.projection import without_adapter
from liger_patch.layers.checks import (
    PRODUCT,
    configuration,
    few_numbers,
    has_hooks,
    is_left_to_model,
    names_of,
    needs_own_code,
    packs_saved_tensors,
    probe_of,
    results_match,
)
from liger_patch.layers.long_rows import tokens_of_slice
from liger_patch.layers.lora import lora_feed_forward
from liger_patch.readers.quantized_weights import quantized_weight
from liger_patch.subclass import derived_class, is_transformers, once_for_each_class

PROBED_HIDDEN, PROBED_SIZE = 3, 5  # features and gates of a probe
# by their forwards: an activation whose forward was replaced is not in the table
ACTIVATIONS = {
    type(ACT2FN["silu"]).forward: "silu",
    nn.SiLU.forward: "silu",  # ACT2FN["swish"]
    type(ACT2FN["gelu_pytorch_tanh"]).forward: "gelu_tanh",
    type(ACT2FN["gelu_new"]).forward: "gelu_tanh",
    type(ACT2FN["gelu"]).forward: "gelu",
}


class Gate(NamedTuple):
    """The attributes by which a class computes ``down(act(gate) * up)``."""

    projections: tuple[str, ...]  # of gate and up; one whose product has both as its halves
    activation: str = "act_fn"
    down: str = "down_proj"

    def products(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return gate and up, None for the second half of the first."""
        gate, *up = (getattr(layer, name)(x) for name in self.projections)
        return gate, up[0] if up else None


TWO = "gate_proj", "up_proj"
GATES = {  # by the names in the code of forward
    frozenset(names.split()): gate
    for names, gate in {
        "act_fn down_proj gate_proj up_proj": Gate(TWO),
        "act_fn down_proj dtype float gate_proj to up_proj": Gate(TWO),
        # of Gemma 3n, where its gate is not sparse
        "_gaussian_topk act_fn activation_sparsity down_proj gate_proj up_proj": Gate(TWO),
        "activation_fn down_proj gate_proj up_proj": Gate(TWO, "activation_fn"),
        "activation_fn chunk down_proj gate_up_proj": Gate(("gate_up_proj",), "activation_fn"),
        "activation chunk input_linear output_linear": Gate(
            ("input_linear",), "activation", "output_linear"
        ),
    }.items()
}


def mlp_class(module: Any) -> Any:
    """Return the class that puts a feed-forward layer on a kernel, or None.

    It is None where the layer has another form or parameters of its own, computes something else
    than GATES says, has an activation without a kernel, and where its code is not Transformers'.
    """
    gate = GATES.get(names_of(type(module)))
    if gate is None or not is_transformers(type(module).forward):
        return None
    is_sparse = getattr(module, "activation_sparsity", 0.0) > 0.0
    if is_sparse or any(p is not None for p in module._parameters.values()):
        return None
    activation = ACTIVATIONS.get(getattr(type(getattr(module, gate.activation)), "forward", None))
    if activation is None or not _agree(module, gate, activation):
        return None
    return gated_layer(type(module))


def mlp_configuration(module: Any) -> Hashable:
    """Return what ``mlp_class`` depends on: equal configurations have the same class."""
    gate = GATES.get(names_of(type(module)))
    if gate is None:
        return type(module)
    return configuration(module, without=(*gate.projections, gate.down))


def _agree(module: Any, gate: Gate, activation: str) -> bool:
    """Return whether the layer's own forward computes what its gate says, on a small input."""

    def on_kernel(layer: Any, x: Tensor) -> Tensor:
        return getattr(layer, gate.down)(run_gated(*gate.products(layer, x), activation))

    def results(forward: Callable[..., Tensor]) -> list[Tensor]:
        return [forward(_with_few_features(module, gate), few_numbers(2, PROBED_HIDDEN))]

    return results_match(lambda: results(type(module).forward), lambda: results(on_kernel))


def _with_few_features(module: Any, gate: Gate) -> Any:
    """Return a copy with small projections, without hooks."""
    first = 2 * PROBED_SIZE // len(gate.projections)  # features of each product of the input
    shapes = {name: (first, PROBED_HIDDEN) for name in gate.projections}
    shapes[gate.down] = PROBED_HIDDEN, PROBED_SIZE
    probe = probe_of(module)
    probe.training = False
    children: dict[str, Any] = {n: m if m is None else _bare(m) for n, m in module._modules.items()}
    probe._modules = children
    for number, (name, shape) in enumerate(shapes.items()):
        weight = few_numbers(*shape) + 0.1 * number  # different numbers for gate and up
        children[name] = _Product(weight)
    return probe


class _Product:
    """A linear layer of a probe."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


def _bare(module: nn.Module) -> nn.Module:
    """Return a copy whose call is its class's forward, in evaluation."""
    bare = probe_of(module)
    cls: Any = type(module)
    bare.__class__ = type(cls.__name__, (cls,), {"__call__": cls.forward})
    bare.training = False
    return bare


@once_for_each_class
def gated_layer(original: Any) -> type[nn.Module]:
    """Derive the class of a feed-forward layer on kernels.

    The layer is one function where its projections are plain. Otherwise the activation and its
    product with up are one kernel.
    """
    own = GATES[names_of(original)]
    projections = *own.projections, own.down

    def forward(self, x: Tensor) -> Tensor:
        if is_left_to_model(self, x):
            return original.forward(self, x)
        act = getattr(self, own.activation)
        kind = ACTIVATIONS.get(getattr(type(act), "forward", None))
        if kind is None or needs_own_code(x):
            return original.forward(self, x)
        modules = [getattr(self, name) for name in projections]
        # hooks are asked for before weights are read: under ZeRO-3, reading gathers them
        if not has_hooks(act, *modules):
            y = _as_one_function(x, modules, kind)
            if y is not None:
                return y
        elif has_hooks(act):
            return original.forward(self, x)
        gate, up = own.products(self, x)
        down = modules[-1]
        if needs_own_code(gate, up):
            return original.forward(self, x)
        if up is not None and gate.dtype != up.dtype:  # an adapter of another dtype on one of them
            return down(act(gate) * up)
        return down(run_gated(gate, up, kind))

    return derived_class(original, gated_layer, forward=forward, _liger_patch_layers=("gated",))


def _as_one_function(x: Tensor, modules: Sequence[Any], activation: str) -> Tensor | None:
    """Compute the layer as one function, or return None: if its projections do more than multiply
    by a weight, or if one function would not pay.

    Args:
        modules: the projections, without hooks.
    """
    if len(modules) == 3:
        y = lora_feed_forward(x, *modules, activation=activation)
        if y is not None:
            return y
    dtype = autocast_dtype(x.device.type, x.dtype) or x.dtype
    tokens = tokens_of_slice(x, getattr(modules[-1], "in_features", 0), dtype)
    if tokens is None and not _keeps_tensors():
        return None
    parts = []
    for module in modules:
        weight = _plain_weight(module, dtype)
        if weight is None and tokens is not None:
            weight = _quantized_weight(module, dtype)
        if weight is None:
            return None
        parts.append(without_adapter(weight))
    gate, up, down = parts if len(parts) == 3 else (parts[0], None, parts[1])
    y = run_gated_mlp(x, gate, up, down, dtype, activation, tokens)
    casts_result = getattr(down.weight, "casts_result", False)
    return y.to(torch.promote_types(x.dtype, y.dtype)) if casts_result else y


def _keeps_tensors() -> bool:
    """Return whether autograd keeps the tensors that are saved for the backward pass, so that one
    function for the whole layer pays.

    - Without a backward pass it saves nothing, and under autocast it would cast the weights at each
      call, where autocast caches the weights of modules.
    - Gradient checkpointing drops saved tensors, and computes them again up to the last one. With
      modules the last one is saved before the last product, with one function after it.
    """
    return torch.is_grad_enabled() and not packs_saved_tensors()


def _plain_weight(module: nn.Module, dtype: torch.dtype) -> Tensor | None:
    """Return the weight if a call of the module only multiplies by it, in a dtype; else None."""
    if type(module) is not nn.Linear or (nn.Linear.forward, nn.functional.linear) != PRODUCT:
        return None
    weight = module.weight
    if type(weight) not in (nn.Parameter, Tensor) or module.bias is not None:
        return None
    own_dtype = autocast_dtype(weight.device.type, weight.dtype) or weight.dtype
    return weight if own_dtype == dtype else None


def _quantized_weight(module: nn.Module, dtype: torch.dtype) -> Any:
    """Return the weight of a quantized layer, if its forward multiplies by the dequantized weight
    in a dtype and does nothing else; else None.
    """
    weight = None if getattr(module, "bias", None) is not None else quantized_weight(module, dtype)
    return weight if weight is not None and weight.is_exact and weight.dtype == dtype else None
