"""Derive the classes of PEFT's linear layers whose LoRA adapter runs within the base's product.

Adapters can be switched, merged and disabled between calls. So each call decides: a layer with one
plain adapter runs on kernels, any other layer runs PEFT's own forward. A decision holds for as long
as the layer's ``_stamp`` stays equal. The projections of an attention, or of a layer of linear
attention, that read the same input are computed together, when the first of them is called.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_patch.kernels.backend import PLAIN_TENSORS, autocast_dtype
from liger_patch.kernels.gated_mlp import run_gated_mlp
from liger_patch.kernels.graphs import is_compiled_here
from liger_patch.kernels.lora.linears import run_lora_linears
from liger_patch.kernels.lora.projection import LoraProjection
from liger_patch.layers.checks import (
    LAYER_NAMES,
    PRODUCT,
    has_hooks,
    is_left_to_model,
    layers_of,
    needs_own_code,
)
from liger_patch.layers.long_rows import source_of, tokens_of_slice
from liger_patch.readers.quantized_weights import reader_of
from liger_patch.subclass import derived_class, once_for_each_class

# projections of an attention or a recurrent layer that read the same input, by their names
SIBLINGS = {
    *("q_proj", "k_proj", "v_proj", "g_proj"),
    *("a_proj", "b_proj", "g_a_proj"),  # OLMo Hybrid, Kimi Linear
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),  # Qwen 3.5
    *("in_proj_qkvz", "in_proj_ba"),  # Qwen3-Next
}
AUTOCAST_ADVICE = "Train under autocast, as with TrainingArguments(bf16=True)"
_running = threading.local()  # the Siblings of the layer that this thread runs


class Dtypes(NamedTuple):
    """The dtypes of one call of a layer."""

    x: torch.dtype
    product: torch.dtype
    casts: bool  # whether autocast casts operands of another dtype


_dtypes = functools.cache(Dtypes)  # equal ones are one object, which `is` compares


class OfDtypes(str):
    """The reason why a layer is not plain, if other dtypes would mend it; ``advice`` says which."""

    advice: str

    def __new__(cls, reason: str, advice: str) -> OfDtypes:
        self = super().__new__(cls, reason)
        self.advice = advice
        return self


class Plain(NamedTuple):
    """A projection as an operator takes it, and the dtype that PEFT's own forward returns."""

    projection: LoraProjection
    dtype: torch.dtype


# of each layer's last call: its dtypes, or why PEFT's own forward ran, whatever the adapter is; its
# stamp; and of a plain one the quantized weight, scaling, dropout, dtype of the result
_last_call: WeakKeyDictionary[nn.Module, tuple[Dtypes | str, tuple | None, Any]]
_last_call = WeakKeyDictionary()


def is_lora_linear(module: nn.Module) -> bool:
    """Return True for a linear layer with LoRA adapters that runs PEFT's forward, or that of this
    package.
    """
    if "peft" not in sys.modules:
        return False
    from liger_patch.readers import lora_adapters

    return is_on_kernels(module) or lora_adapters.runs_pefts_forward(module)


def lora_class(module: nn.Module) -> Any:
    """Return the class of such a layer on kernels; None where its own has another forward now."""
    from liger_patch.readers import lora_adapters

    return lora_linear(type(module)) if lora_adapters.runs_pefts_forward(module) else None


@once_for_each_class
def lora_linear(original: Any) -> type[nn.Module]:
    """Derive a LoRA linear layer that is one function where its adapter is plain."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (args or kwargs or torch.compiler.is_dynamo_compiling()):
            siblings = getattr(_running, "siblings", None)
            result = None if siblings is None else siblings.result(self, x)
            if result is not None:
                return result
            if not is_left_to_model(self, x):
                results = _results(x, (self,))
                if results is not None:
                    return results[0]
        return original.forward(self, x, *args, **kwargs)

    return derived_class(original, lora_linear, forward=forward, _liger_patch_layers=("lora",))


def is_on_kernels(*modules: object) -> bool:
    """Return True for layers of classes that ``lora_linear`` derived."""
    return all(["lora" in getattr(type(module), LAYER_NAMES, ()) for module in modules])


def not_plain(model: nn.Module) -> Counter[str]:
    """Return each reason why layers with adapters run PEFT's own forward now, and how many do.

    The answer is for the dtypes of each layer's last call. A layer that was not called yet counts
    as if called under autocast. Plain LoRA layers that are not on kernels are not counted: either
    ``apply_patch`` was told to leave them, or the next call puts them on kernels.
    """
    if "peft" not in sys.modules:
        return Counter()
    from liger_patch.readers import lora_adapters

    reasons: Counter[str] = Counter()
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()  # part of the loss
    layers: list[Any] = [each for each in model.modules() if each is not head]
    for layer in layers:
        if is_on_kernels(layer):
            last = _last_call.get(layer, (None,))[0]
            adapter = lora_adapters.plain_adapter(layer)
            plain = last if isinstance(last, str) else _plain(layer, adapter, last)
            reasons.update([plain] if isinstance(plain, str) else ())
        elif "forward" in vars(layer) and lora_adapters.has_adapters(layer):
            reasons["its forward was replaced"] += 1
        elif lora_adapters.wraps_experts(layer) and layers_of(layer):
            plain = lora_adapters.expert_adapters(layer)
            reasons.update([plain] if isinstance(plain, str) else ())
        elif lora_adapters.has_adapters(layer) and not is_lora_linear(layer):
            reasons[lora_adapters.described(layer)] += 1
    return reasons


def forget_calls(model: nn.Module) -> None:
    """Forget the last calls of a model's layers."""
    for layer in model.modules():
        _last_call.pop(layer, None)


def lora_feed_forward(
    x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, activation: str
) -> Tensor | None:
    """Compute a feed-forward layer of x (..., H) as one function; None unless its projections are
    plain LoRA layers on kernels. None for ``torch.compile`` too. Hooks on them would not run.
    """
    if is_compiled_here():
        return None
    if not is_on_kernels(gate, up, down):
        return None
    dtypes = _dtypes_of(x)
    gates = _plain_of((gate, up), dtypes)
    if gates is None or isinstance(dtypes, str):
        return None
    (gate_part, up_part), (gate_dtype, up_dtype) = gates
    if gate_dtype != up_dtype:
        return None
    downs = _plain_of((down,), _dtypes(gate_dtype, dtypes.product, dtypes.casts))
    if downs is None:
        return None
    (down_part,), (dtype,) = downs
    parts = gate_part, up_part, down_part
    tokens = tokens_of_slice(x, gate_part.weight.shape[0], dtypes.product)
    return run_gated_mlp(x, *parts, dtypes.product, activation, tokens).to(dtype)


class Siblings:
    """Projections of a layer that read the same input, computed at the call of the first."""

    def __init__(self, members: list[nn.Module]) -> None:
        self._members = members
        self._x: Tensor | None = None
        self._version: int | None = None
        self._results: dict[nn.Module, Tensor] = {}

    def __enter__(self) -> None:
        self._before = getattr(_running, "siblings", None)
        _running.siblings = self

    def __exit__(self, *_: object) -> None:
        _running.siblings = self._before

    def result(self, member: nn.Module, x: Tensor) -> Tensor | None:
        """Return the member's result for x; None where it must compute its own."""
        version = None if x.is_inference() else x._version
        if x is self._x and version == self._version:
            return self._results.pop(member, None)
        if self._x is not None or member not in self._members:
            return None
        self._x, self._version = x, version
        results = _results(x, self._members)
        if results is None:
            return None
        self._results = dict(zip(self._members, results, strict=True))
        return self._results.pop(member)


def computed_together(layer: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which a layer's projections of one input are computed together."""
    members: list[Any] = []
    held: Any = layer._modules.items()
    for name, each in held:
        # as is_on_kernels does, at each call of each layer
        if name in SIBLINGS and "lora" in getattr(type(each), LAYER_NAMES, ()):
            members.append(each)
            if each.in_features != members[0].in_features:
                return nullcontext()
    # layers that share keys and values call one of their projections only
    if len(members) < 2 or getattr(layer, "is_kv_shared_layer", False):
        return nullcontext()
    return Siblings(members)


def _dtypes_of(x: Tensor) -> Dtypes | str:
    """Return the dtypes of a call on x, or why PEFT's own forward runs, whatever the adapter is."""
    if torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return "a dispatch mode or torch.jit.trace records the call"
    if needs_own_code(x):
        return "torch.func or a tensor subclass"
    dtype = x.dtype
    autocast = autocast_dtype(x.device.type, dtype)
    return _dtypes(dtype, autocast or dtype, autocast is not None)


def _plain_of(
    layers: Sequence[Any], dtypes: Dtypes | str
) -> tuple[list[LoraProjection], list[torch.dtype]] | None:
    """Return the projections of layers for a call with these dtypes, and the dtypes that PEFT's own
    forward returns; None if that must run for one of them.
    """
    projections, result_dtypes = [], []
    for layer in layers:
        stamp, tensors = _stamp(layer)
        last = _last_call.get(layer)
        if stamp is not None and last and last[0] is dtypes and last[1] == stamp:
            quantized, scaling, rate, dtype = last[2]
            weight, bias, a, b = tensors
            weight = weight if quantized is None else quantized.read_again()
            projections.append(LoraProjection(weight, bias, a, b, scaling, rate))
            result_dtypes.append(dtype)
            continue
        last, plain = (dtypes, None, None), None
        if not isinstance(dtypes, str):
            from liger_patch.readers import lora_adapters

            plain = _plain(layer, lora_adapters.plain_adapter(layer), dtypes)
        if isinstance(plain, Plain):
            projections.append(plain.projection)
            result_dtypes.append(plain.dtype)
            weight, *_, scaling, rate = plain.projection
            if stamp is not None:  # without tensors, which the model may drop
                kept: Any = None if isinstance(weight, Tensor) else weight
                kept = kept and kept.read_again(numbers=False)
                last = dtypes, stamp, (kept, scaling, rate, plain.dtype)
        _last_call[layer] = last
    return (projections, result_dtypes) if len(projections) == len(layers) else None


def _stamp(layer: Any) -> tuple[tuple | None, tuple]:
    """Return what the answer of ``_plain`` depends on, beside the dtypes of the call; and weight,
    bias, A and B. Read from dictionaries: nn.Module looks attributes up in Python.

    No stamp where each call asks anew: for hooks, tensors that are no parameters (FSDP's), a base
    in 8 bits or whose reader has none, and several adapters.
    """
    own, held, no_stamp = layer.__dict__, layer._modules, (None, ())
    try:
        name, base = own["_active_adapter"], held["base_layer"]
        (name,) = (name,) if isinstance(name, str) else name
        a, b = held["lora_A"]._modules[name], held["lora_B"]._modules[name]
        dropout, scaling = held["lora_dropout"]._modules[name], own["scaling"][name]
        # hooks before weights: under ZeRO-3, reading gathers them
        if isinstance(scaling, Tensor) or has_hooks(base, a, b, dropout):
            return no_stamp
        weight, bias = base._parameters.get("weight"), base._parameters["bias"]
        of_a, of_b = a._parameters["weight"], b._parameters["weight"]
        has_no_bias = a._parameters["bias"] is b._parameters["bias"] is None
        switches = (
            own["_disable_adapters"],
            bool(own["merged_adapters"]),
            name in own["lora_variant"],
        )
    except (KeyError, ValueError):
        return no_stamp
    is_plain = type(base) is nn.Linear and type(weight) in PLAIN_TENSORS
    reader = None if is_plain else reader_of(base)
    if reader is None and type(base) is nn.Linear and weight is not None:  # not FSDP's
        of_base: Any = nn.Linear.forward, nn.functional.linear, type(weight), weight.dtype
    else:
        stamp_of = getattr(reader, "stamp", None)
        of_base = stamp_of and stamp_of(base)
        if of_base is None:
            return no_stamp
    stamp = (
        *(name, scaling, own.get("fan_in_fan_out"), *switches, *of_base),
        *(type(bias), getattr(bias, "dtype", None), type(base), type(a), type(b), type(dropout)),
        *(type(of_a), of_a.dtype, type(of_b), of_b.dtype, vars(dropout).get("p"), dropout.training),
        has_no_bias,
    )
    return stamp, (weight, bias, of_a, of_b)


def _results(x: Tensor, layers: Sequence[Any]) -> list[Tensor] | None:
    """Return what layers give for x (..., H), each in the dtype that PEFT would return; None if
    PEFT's own forward must run for one of them.
    """
    dtypes = _dtypes_of(x)
    plain = _plain_of(layers, dtypes)
    if plain is None or isinstance(dtypes, str):
        return None
    projections, result_dtypes = plain
    ys = run_lora_linears(x, projections, dtypes.product, source_of(x))
    return [y.to(dtype) for y, dtype in zip(ys, result_dtypes, strict=True)]


def _own_dtypes(base: Any) -> Dtypes:
    """Return the dtypes of a layer that was not called yet, as if autocast had the dtype of its
    products.
    """
    dtype = getattr(getattr(base, "weight", None), "dtype", None)
    if dtype is None or not dtype.is_floating_point or dtype.itemsize == 1:
        dtype = getattr(base, "compute_dtype", None) or torch.bfloat16
    return Dtypes(dtype, dtype, casts=True)


def _plain(layer: Any, adapter: tuple | str, dtypes: Dtypes | None) -> Plain | str:
    """Return the layer's projection for a call with these dtypes, or why the layer is not plain.

    Args:
        adapter: what ``lora_adapters.plain_adapter`` returned for the layer.
    """
    if isinstance(adapter, str):
        return adapter
    base: Any = layer._modules["base_layer"]
    a, b, dropout, scaling, rate = adapter
    # asked before weights are read: under ZeRO-3, reading gathers them
    if has_hooks(base, a, b, dropout):
        if "quantization_scheme" in vars(base):
            return "compressed-tensors, without CompressedTensorsConfig(dequantize=True)"
        return "hooks within the layer"
    x_dtype, dtype, casts = dtypes or _own_dtypes(base)
    result_dtype = dtype
    weight: Any = None
    reader = reader_of(base)
    if reader is None:
        if type(base) is not nn.Linear:
            return f"the base is a {type(base).__name__}"
        if (nn.Linear.forward, nn.functional.linear) != PRODUCT:
            return "another function than torch's linear"
    else:
        weight = reader.read(base, dtype)
        if isinstance(weight, str):
            return weight
        if weight.dtype != dtype:
            advice = f"Set bnb_4bit_compute_dtype={dtype}" if casts else AUTOCAST_ADVICE
            reason = f"the base computes in {weight.dtype}, other products in {dtype}"
            return OfDtypes(reason, advice)
        if weight.casts_result:
            result_dtype = torch.promote_types(x_dtype, dtype)
    try:  # not by attribute: nn.Module looks these up in Python
        weight = base._parameters["weight"] if weight is None else weight
        bias = base._parameters["bias"]
        matrices = a._parameters["weight"], b._parameters["weight"]
    except KeyError:  # FSDP's are attributes
        weight = base.weight if weight is None else weight
        bias, matrices = base.bias, (a.weight, b.weight)
    tensors: Any = weight, bias, *matrices
    for each in tensors:
        if type(each) in PLAIN_TENSORS:
            if each.dtype != dtype and not (casts and each.is_floating_point()):
                return OfDtypes("weights of several dtypes outside autocast", AUTOCAST_ADVICE)
        elif isinstance(each, Tensor):  # else no bias, or a quantized weight
            return "weights of a tensor subclass"
    return Plain(LoraProjection(weight, bias, *matrices, scaling, rate), result_dtype)
