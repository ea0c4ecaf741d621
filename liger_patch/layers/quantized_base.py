"""Hold the frozen linear layers of a model in FP8 (e4m3), with one float32 scale a row.

Each of them stays the same module, of a class whose own forward multiplies by the FP8 weight. LoRA
layers on kernels read that weight: the formulas are in ``kernels/fp8``. Numbers and scales are kept
as integers of the same bits, which no cast of a model changes.

Memory in bytes: 1 a number, and 4 a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from liger_patch.kernels import fp8
from liger_patch.kernels.backend import (
    PLAIN_TENSORS,
    autocast_dtype,
    check_backward,
    rows_of,
    without_autocast,
)
from liger_patch.kernels.fp8 import Fp8Weight
from liger_patch.kernels.graphs import runs_eagerly
from liger_patch.kernels.lora.products import products, through_base
from liger_patch.kernels.lora.projection import LoraProjection
from liger_patch.layers.checks import check_device
from liger_patch.readers.wrapped_model import transformers_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FP8 = "fp8"
QUANT_TYPES = (FP8,)
ROUTERS = {"gate", "router"}  # names of what chooses experts: small, and sensitive
ADVICE = "Load the model in 16 bits for that"  # layers=False does not undo quantize_base
READ = ("x_proj", "dt_proj", "out_proj")  # of Mamba's mixers, whose code reads these weights


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        ctx.weight, ctx.dtype, ctx.bias_dtype = weight, x.dtype, getattr(bias, "dtype", None)
        part = LoraProjection(weight, bias, None, None, 1.0)
        with without_autocast(x.device.type):
            (y,) = products(rows_of(x).to(weight.dtype), (part,), (None,), x.shape[:-1])
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        check_backward("Fp8Linear", dy, advice=ADVICE)
        wants_x, _, wants_bias = ctx.needs_input_grad
        rows, dx, dbias = rows_of(dy), None, None
        with without_autocast(dy.device.type):
            if wants_x:
                part = LoraProjection(ctx.weight, None, None, None, 1.0)
                dx = through_base(rows, part).to(ctx.dtype).view(*dy.shape[:-1], -1)
            if wants_bias:
                dbias = rows.sum(0, dtype=ctx.bias_dtype)
        return dx, None, dbias


class _Held(Tensor):
    """The weight of an ``Fp8Linear`` as PEFT and models read it: shape, device, and the dtype that
    it had. It has no numbers: operations are errors.
    """

    @staticmethod
    def __new__(cls, numbers: Tensor, dtype: torch.dtype) -> _Held:
        make: Any = Tensor._make_wrapper_subclass
        return make(cls, numbers.shape, dtype=dtype, device=numbers.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(
            "weight is held in FP8 by quantize_base, and cannot be read: adapters cannot be merged "
            "into it or start from it (DoRA, PiSSA), nor can a model be held whose own code reads "
            f"it. {ADVICE}"
        )

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"weight of shape {tuple(self.shape)}, {self.dtype}, held in FP8"


class Fp8Linear(nn.Linear):
    """A linear layer whose weight is held in FP8: ``numbers`` (O, H) are their bytes, ``scales``
    (O,) the bits of float32.
    """

    numbers: Tensor  # not "qweight": PEFT would return that as the weight
    scales: Tensor
    held_dtype: torch.dtype  # of the weight before: models cast their activations to it

    def held(self, dtype: torch.dtype) -> Fp8Weight:
        """Return the weight for products in a dtype."""
        return Fp8Weight(self.numbers, self.scales, dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.held_dtype = fn(torch.empty(0, dtype=self.held_dtype)).dtype  # of a cast model
        return super()._apply(fn, recurse)

    @runs_eagerly
    def forward(self, x: Tensor) -> Tensor:
        dtype = autocast_dtype(x.device.type, x.dtype) or x.dtype
        product: Any = _Fp8Linear.apply(x, self.held(dtype), self.bias)
        return product

    @property
    def weight(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return what others may know of the weight."""
        return _Held(self.numbers, self.held_dtype)


def quantize_base(
    model: PreTrainedModel, quant_type: str = FP8, *, device: torch.device | str | None = None
) -> PreTrainedModel:
    """Hold the frozen linear layers of a model in FP8. Returns the model.

    Held are the linear layers of its decoder, and all with adapters. Not held are the head, routers
    of experts, Mamba's x_proj, dt_proj and out_proj, layers with a size that is no multiple of 16,
    and layers that train while others are frozen. Call it before or after ``get_peft_model``, with
    ``apply_patch`` or without; ``revert_patch`` leaves them so. Adapters train, save and load as
    usual, and cannot be merged.

    On GPUs that multiply FP8 (from compute capability 8.9 on), products in bf16 run in FP8:
    activations and upstream gradients are rounded too, a row at a time, and sums are in float32.
    Elsewhere, products read the dequantized weight.

    Args:
        model: of Transformers, or within PEFT's wrapper.
        quant_type: "fp8": e4m3, one float32 scale a row.
        device: where weights go and are quantized, one after another; None leaves them where they
            are. With "cuda" the GPU never holds a second weight of 16 bits of a model that is in
            host memory; ``model.to(device)`` then moves what is left.

    Raises:
        ValueError: another ``quant_type``, no such device, or a model without such layers.
        TypeError: not a Transformers model.
    """
    if quant_type not in QUANT_TYPES:
        raise ValueError(f"quant_type must be one of {QUANT_TYPES}, got {quant_type!r}")
    check_device(device)
    found = list(_linears(model))
    if not found:
        raise ValueError(
            "model must have linear layers that can be held in FP8 (of torch's own class, frozen, "
            f"in its decoder, sizes that are multiples of {fp8.MULTIPLE}) and are not yet, got a "
            f"{type(transformers_model(model)).__name__} without"
        )
    for layer in found:
        _hold(layer, device)
    return model


def _linears(model: nn.Module) -> Iterator[nn.Linear]:
    """Yield the layers that can be held in FP8."""
    base: Any = transformers_model(model)
    head, decoder = base.get_output_embeddings(), base.get_decoder()
    of_head = set() if head is None else set(head.modules())
    of_decoder = set((decoder or base).modules())
    trains_all = all(each.requires_grad for each in model.parameters())  # not yet frozen
    for path, module in model.named_modules():
        *parents, name = path.removesuffix(".base_layer").split(".")
        is_adapted = path.endswith(".base_layer")
        if type(module) is not nn.Linear or "forward" in vars(module):
            continue
        if module in of_head or not ROUTERS.isdisjoint((*parents, name)):
            continue
        if name in READ and hasattr(model.get_submodule(".".join(parents)), "ssm_state_size"):
            continue
        if not (is_adapted or module in of_decoder) or any(p.startswith("lora_") for p in parents):
            continue
        weight = module.weight
        is_held = type(weight) in PLAIN_TENSORS and weight.is_floating_point()
        is_held = is_held and (trains_all or not weight.requires_grad)
        if is_held and not any(size % fp8.MULTIPLE for size in weight.shape):
            yield module


def _hold(layer: Any, device: torch.device | str | None) -> None:
    weight = layer._parameters.pop("weight").detach()
    numbers, scales = fp8.quantized((weight if device is None else weight.to(device),))
    layer.held_dtype = weight.dtype
    layer.numbers = nn.Parameter(numbers.view(torch.uint8), requires_grad=False)
    layer.register_buffer("scales", scales.view(-1).view(torch.int32))
    if layer.bias is not None:
        layer.bias.data = layer.bias.data.to(numbers.device)
    layer.__class__ = Fp8Linear


def serves(layer: type, weight: type) -> bool:
    """Return True for layers that hold their weight in FP8: this module is a reader of
    ``quantized_weights``.
    """
    return issubclass(layer, Fp8Linear)


def read(layer: Any, dtype: torch.dtype) -> Fp8Weight:
    """Return the weight for products in a dtype."""
    return layer.held(dtype)


def stamp(layer: nn.Module) -> tuple[int, int]:
    """Return what tells whether the layer holds other tensors."""
    return id(layer._parameters.get("numbers")), id(layer._buffers["scales"])
