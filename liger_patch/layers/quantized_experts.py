"""Hold the experts of a mixture in 4 bits, so that adapters on them train beside a small base.

bitsandbytes quantizes linear layers, and leaves the 3-D weights of experts as they are. Here each
of these weights is one of bitsandbytes' 4-bit layers, whose rows are those of all experts, and is
dequantized where a product needs it: in both passes, one weight at a time.

Memory in bytes: 0.516 a number (0.5625 without double quantization), and while a layer runs 2 a
number of one weight of this layer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from liger_patch.kernels.experts import DequantizedExperts
from liger_patch.layers import experts
from liger_patch.subclass import ORIGINAL, derived_class, once_for_each_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_running = threading.local()  # the dtype in which this thread runs a layer's own code


class ExpertWeight4bit(nn.Module):
    """One weight of experts in 4 bits.

    Args:
        weight: (E, in, out) if it is transposed, else (E, out, in): quantized on the device.
    """

    def __init__(
        self, weight: Tensor, device: torch.device | str, quant_type: str, *, is_transposed: bool,
        double_quant: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        from bitsandbytes.nn.modules import Linear4bit, Params4bit

        count, rows, columns = self.stored_shape = weight.shape
        self.is_transposed = is_transposed
        layer = Linear4bit(columns, count * rows, bias=False, device="meta")
        numbers: Any = weight.detach().reshape(count * rows, columns)
        how: Any = {"compress_statistics": double_quant, "quant_type": quant_type}
        layer.weight = Params4bit(numbers, requires_grad=False, **how)
        self.rows_of_experts = layer.to(device)

    def stored(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as the layer's own code has it, dequantized."""
        from liger_patch.readers import quantized_weights

        # bitsandbytes dequantizes to no other dtypes
        is_made = dtype in (torch.float16, torch.bfloat16, torch.float32)
        read = quantized_weights.quantized_weight
        weight = read(self.rows_of_experts, dtype if is_made else torch.float32)
        if weight is None:
            raise RuntimeError("experts in 4 bits cannot be read: they were packed or sharded anew")
        return weight.rows(0, weight.shape[0]).to(dtype).view(self.stored_shape)

    def weight_of_experts(self) -> DequantizedExperts:
        """Return the weight (E, in, out) as the operator takes it."""
        return _Dequantized(self)


class _Dequantized:
    """A ``DequantizedExperts``."""

    def __init__(self, weight: ExpertWeight4bit) -> None:
        self._weight = weight
        count, rows, columns = weight.stored_shape
        sizes = (rows, columns) if weight.is_transposed else (columns, rows)
        self.shape = torch.Size((count, *sizes))
        self.device = weight.rows_of_experts.weight.device

    def to(self, dtype: torch.dtype) -> Tensor:
        stored = self._weight.stored(dtype)
        return stored if self._weight.is_transposed else stored.transpose(1, 2)


def quantize_experts(
    model: PreTrainedModel,
    device: torch.device | str = "cuda",
    *,
    quant_type: str = "nf4",
    double_quant: bool = True,
) -> PreTrainedModel:
    """Hold the experts of a mixture in 4 bits on a device. Returns the model.

    Call it on a model in host memory, behind ``get_peft_model`` and before ``model.to(device)``:
    weights go to the device and are quantized there one after another, so the device never holds a
    second one of 16 bits. The experts are on kernels from then on, with ``apply_patch`` or without,
    and ``revert_patch`` leaves them so. They are frozen; adapters on them (PEFT's
    ``target_parameters``) train, save and load as usual, and are not merged.

    Args:
        model: of Transformers, or within PEFT's wrapper.
        quant_type: "nf4" or "fp4".
        double_quant: whether the scales are quantized too.

    Raises:
        ImportError: without bitsandbytes.
        ValueError: another ``quant_type``, or a model without experts that may be on kernels.
    """
    if quant_type not in ("nf4", "fp4"):
        raise ValueError(f"quant_type must be 'nf4' or 'fp4', got {quant_type!r}")
    found = [each for each in model.modules() if experts.is_served(each)]
    if not found:
        raise ValueError(
            f"model is a {type(model).__name__} without experts that can be held in 4 bits: gated "
            "ones of Transformers' form, not quantized before"
        )
    for module in found:
        layer: Any = module
        held = nn.ModuleDict()
        for name in (experts.FIRST, experts.LAST):
            weight = layer._parameters.pop(name)
            how = {"is_transposed": layer.is_transposed, "double_quant": double_quant}
            held[name] = ExpertWeight4bit(weight, device, quant_type, **how)
        setattr(layer, experts.HELD, held)
        layer.__class__ = quantized_layer(getattr(type(layer), ORIGINAL, type(layer)))
    experts.replace_new_wrappers(model, everywhere=False)
    return model


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
                    f"{name} is held in 4 bits by quantize_experts: adapters come before that "
                    "(get_peft_model, PeftModel.from_pretrained), are active one at a time, and "
                    "are not merged into it"
                )
            return getattr(self, experts.HELD)[name].stored(dtype)

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
