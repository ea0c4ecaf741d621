"""Hold the experts of a mixture in 4 bits, so that adapters on them train beside a small base.

bitsandbytes quantizes linear layers, and leaves the 3-D weights of experts as they are. Here each
of these weights is one of bitsandbytes' 4-bit layers, whose rows are those of all experts, or is
held in MXFP4. It is dequantized where a product needs it: in both passes, one weight at a time.

Memory in bytes: 0.516 a number (0.5625 without double quantization, 0.53125 in MXFP4), and while a
layer runs 2 a number of one weight of this layer.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from liger_patch.kernels import mxfp4
from liger_patch.layers import experts
from liger_patch.layers.checks import check_device, layers_of
from liger_patch.readers.wrapped_model import transformers_model
from liger_patch.subclass import derived_class, once_for_each_class, original_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MXFP4 = "mxfp4"
QUANT_TYPES = ("nf4", "fp4", MXFP4)
_running = threading.local()  # the dtype in which this thread runs a layer's own code


class ExpertWeight4bit(nn.Module):
    """A weight of experts in 4 bits: a ``DequantizedExperts``.

    Args:
        weight: (E, in, out): quantized on the device, along in.
    """

    def __init__(
        self, weight: Tensor, device: torch.device | str, quant_type: str, *, double_quant: bool
    ) -> None:
        super().__init__()
        self.shape = weight.shape
        rows = weight.detach().transpose(1, 2)
        if quant_type == MXFP4:
            self.rows: Any = Mxfp4Rows(rows, device)
        else:
            self.rows = BitsandbytesRows(rows, device, quant_type, double_quant)

    @property
    def device(self) -> torch.device:
        return next(self.rows.parameters()).device

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (E, in, out), in new memory."""
        count, source, features = self.shape
        return self.rows.dequantized(dtype).view(count, features, source).transpose(1, 2)


class BitsandbytesRows(nn.Module):
    """The rows of all experts' weights (E, out, in) in one of bitsandbytes' layers."""

    def __init__(
        self, weight: Tensor, device: torch.device | str, quant_type: str, double_quant: bool
    ) -> None:
        super().__init__()
        from bitsandbytes.nn.modules import Linear4bit, Params4bit

        rows: Any = weight.reshape(-1, weight.shape[2])
        layer = Linear4bit(rows.shape[1], len(rows), bias=False, device="meta")
        how: Any = {"compress_statistics": double_quant, "quant_type": quant_type}
        layer.weight = Params4bit(rows, requires_grad=False, **how)
        self.layer = layer.to(device)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the rows (E out, in)."""
        from liger_patch.readers import quantized_weights

        # bitsandbytes dequantizes to no other dtypes
        is_made = dtype in (torch.float16, torch.bfloat16, torch.float32)
        weight = quantized_weights.quantized_weight(self.layer, dtype if is_made else torch.float32)
        if weight is None:
            raise RuntimeError("experts in 4 bits cannot be read: they were packed or sharded anew")
        return weight.dequantized().to(dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *how: Any) -> None:
        # bitsandbytes saves scales beside a weight, and leaves loading them to others
        name, device = f"{prefix}layer.weight", self.layer.weight.device
        scales = [each for each in state_dict if each.startswith(f"{name}.")]
        if name in state_dict and scales:
            parts = {each.removeprefix(f"{name}."): state_dict.pop(each) for each in scales}
            made: Any = type(self.layer.weight)
            self.layer.weight = made.from_prequantized(state_dict[name], parts, device=device)
        super()._load_from_state_dict(state_dict, prefix, *how)


class Mxfp4Rows(nn.Module):
    """The rows of all experts' weights (E, out, in) in MXFP4."""

    def __init__(self, weight: Tensor, device: torch.device | str) -> None:
        super().__init__()
        # one expert at a time, in its float32 numbers
        each = [mxfp4.quantized(expert.to(device)) for expert in weight]
        packed, scales = (torch.stack(parts) for parts in zip(*each, strict=True))
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the rows (E, out, in)."""
        return mxfp4.dequantized(self.packed, self.scales, dtype)


def quantize_experts(
    model: PreTrainedModel,
    device: torch.device | str = "cuda",
    *,
    quant_type: str = "nf4",
    double_quant: bool = True,
) -> PreTrainedModel:
    """Hold the experts of a mixture in 4 bits on a device. Returns the model.

    Call it on a model in host memory, after ``get_peft_model`` and before ``model.to(device)``:
    weights go to the device and are quantized there one after another, so the device never holds a
    second one of 16 bits. The experts are on kernels from then on, with ``apply_patch`` or without,
    and ``revert_patch`` leaves them so. They are frozen; adapters on them (PEFT's
    ``target_parameters``) train, save and load as usual, and are not merged.

    Args:
        model: of Transformers, or within PEFT's wrapper.
        device: where weights go and are quantized; "cpu" without a GPU.
        quant_type: "nf4" or "fp4" of bitsandbytes; or "mxfp4", in which gpt-oss is published: its
            weights, loaded with ``Mxfp4Config(dequantize=True)``, keep their values bit by bit.
        double_quant: whether the scales of nf4 and fp4 are quantized too.

    Raises:
        ImportError: nf4 or fp4 without bitsandbytes.
        ValueError: another ``quant_type`` or ``double_quant``, no such device, a model without
            experts that may be on kernels, or in MXFP4 an input size of experts that is no
            multiple of 32.
        TypeError: not a model.
    """
    if quant_type not in QUANT_TYPES:
        raise ValueError(f"quant_type must be one of {QUANT_TYPES}, got {quant_type!r}")
    if not isinstance(double_quant, bool):
        raise ValueError(f"double_quant must be True or False, got {double_quant!r}")
    check_device(device)
    if not isinstance(model, nn.Module):
        transformers_model(model)  # the error says what was expected
    hold_experts(
        model,
        lambda weight: ExpertWeight4bit(weight, device, quant_type, double_quant=double_quant),
    )
    if not _is_adapted(model):
        warnings.warn(
            f"quantize_experts: the experts of {type(model).__name__} take no adapters from now "
            "on. If they shall have some, call get_peft_model or PeftModel.from_pretrained first",
            stacklevel=2,
        )
    return model


def _is_adapted(model: nn.Module) -> bool:
    if "peft" not in sys.modules:
        return False
    from liger_patch.readers.lora_adapters import has_adapters

    return any(map(has_adapters, model.modules()))


def hold_experts(model: nn.Module, held_weight: Callable[[Tensor], nn.Module]) -> None:
    """Let modules hold the weights of all experts: ``DequantizedExperts``, each of which
    ``held_weight`` makes of a weight (E, in, out).
    """
    found = [each for each in model.modules() if experts.is_served(each)]
    if not found:
        raise ValueError(
            f"model is a {type(model).__name__} without experts that can be held in 4 bits: gated "
            "ones of Transformers' form, not quantized before (those of a checkpoint in MXFP4 are "
            "packed, if they were not loaded with Mxfp4Config(dequantize=True))"
        )
    for module in found:
        layer: Any = module
        held = nn.ModuleDict()
        for name in (experts.FIRST, experts.LAST):
            weight = getattr(layer, name)
            held[name] = held_weight(weight if layer.is_transposed else weight.transpose(1, 2))
        for name in held:
            del layer._parameters[name]
        setattr(layer, experts.HELD, held)
        layer.__class__ = quantized_layer(original_class(layer))
    for module in list(model.modules()):
        if experts.is_wrapper(module) and not layers_of(module) and "forward" not in vars(module):
            module.__class__ = experts.expert_wrapper(type(module))


@once_for_each_class
def quantized_layer(original: Any) -> type[nn.Module]:
    """Derive the class of experts in 4 bits. Their weights are there only for the layer's own code:
    elsewhere, whoever reads or changes them would get a copy.
    """

    def forward(self, hidden_states: Tensor, *routing: Any, **options: Any) -> Tensor:
        y = None if options else experts.result(self, hidden_states, routing, {})
        if y is not None:
            return y
        with _own_code(hidden_states.dtype):
            return original.forward(self, hidden_states, *routing, **options)

    def weight_of(name: str) -> property:
        def read(self) -> Tensor:
            dtype = getattr(_running, "dtype", None)
            if dtype is None:
                raise RuntimeError(
                    f"{name} is held in 4 bits by quantize_experts, and cannot be read here. Add "
                    "adapters before that (get_peft_model, PeftModel.from_pretrained), with one "
                    "active at a time. Do not merge them (unmerge_adapter() takes a merge back; "
                    "after merge_and_unload(), load base and adapters again). torch.compile and "
                    "hooks on these experts are not supported"
                )
            weight = getattr(self, experts.HELD)[name].dequantized(dtype)
            return weight if self.is_transposed else weight.transpose(1, 2)

        return property(read)

    return derived_class(
        original,
        quantized_layer,
        forward=forward,
        _liger_patch_layers=("experts",),
        **{name: weight_of(name) for name in (experts.FIRST, experts.LAST)},
    )


@contextmanager
def _own_code(dtype: torch.dtype) -> Iterator[None]:
    _running.dtype = dtype
    try:
        yield
    finally:
        _running.dtype = None
