"""bitsandbytes' layers: a reader of ``quantized_weights``.

V: rows of the weight, H: its columns. 4-bit numbers (nf4, fp4) lie two to a byte, row after row;
each block of ``blocksize`` of them, which may begin within a row, has a scale, and with double
quantization each block of 256 scales is itself 8-bit numbers with a scale. 8-bit numbers have a
scale per row. Source: bitsandbytes 0.50, ``nn/modules.py`` and ``autograd/_functions.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes import functional
from bitsandbytes.functional import QuantState
from bitsandbytes.nn.modules import Int8Params, Linear4bit, Linear8bitLt, Params4bit
from torch import Tensor, nn

from liger_patch.kernels.backend import serves_triton_device
from liger_patch.kernels.graphs import is_traced
from liger_patch.readers.quantized_weights import LayerWeight

PACKED = "bitsandbytes packed the base for inference on a CPU: its gradients are wrong from then on"


class _Weight4bit(LayerWeight):
    """Where Triton runs, one kernel dequantizes nf4 and its scales, with bitsandbytes' numbers: its
    own operations, one after another, keep the host busy for longer than the GPU. Elsewhere they
    dequantize it as a vector, because bitsandbytes 0.50's AVX-512 kernel takes the scales of other
    blocks for a matrix whose H is a multiple of 16 but not of the blocksize.
    """

    def __init__(
        self,
        stored: Any,
        packed: Tensor,  # ceil(V * H / 2) uint8
        state: Any,  # QuantState, whose fields are typed as optional
        dtype: torch.dtype,
    ) -> None:
        # its tensors, not the state, which bitsandbytes moves and packs in place
        self._packed, self._absmax, self._code = packed, state.absmax, state.code
        self._blocksize, self._quant_type = state.blocksize, state.quant_type
        self._nested: tuple[Tensor, Tensor, Tensor, int] | None = None
        if state.nested:
            nested = state.state2
            self._nested = nested.code, nested.absmax, state.offset, nested.blocksize
        self._stored = stored
        super().__init__(packed.device, state.shape, dtype)
        is_served = self._quant_type == "nf4" and serves_triton_device(packed)
        self._fits_kernel = is_served and self._has_kernels_floats()

    def dequantized(self) -> Tensor:
        size = self.shape.numel()
        if self._fits_kernel and not is_traced():
            from liger_patch.kernels.triton import nf4

            stored = self._packed, self._code, self._absmax, self._nested, self._blocksize
            return nf4.dequantized(*stored, size, self.dtype).view(self.shape)
        scales = self._absmax
        if self._nested is not None:
            code, absmax, offset, blocksize = self._nested
            scales = functional.dequantize_blockwise(
                scales, absmax=absmax, code=code, blocksize=blocksize
            ).add_(offset)
        packed = self._packed.view(-1)
        state = QuantState(
            absmax=scales,
            shape=torch.Size([2 * len(packed)]),
            code=self._code,
            blocksize=self._blocksize,
            quant_type=self._quant_type,
            dtype=self.dtype,
        )
        return functional.dequantize_4bit(packed, state).view(-1)[:size].view(self.shape)

    def read_again(self, *, numbers: bool = True) -> _Weight4bit:
        """Return the weight as it is now, of a layer whose ``stamp`` has not changed. Without
        ``numbers``, return what to call this on later: it holds no memory that the model may free.
        """
        again: Any = object.__new__(_Weight4bit)
        vars(again).update(vars(self), _packed=_packed(self._stored) if numbers else None)
        return again

    def _has_kernels_floats(self) -> bool:
        """Return whether the scales are as the Triton kernel reads them: what bitsandbytes made."""
        floats = (self._absmax,) if self._nested is None else self._nested[:3]
        if self._nested is not None and self._absmax.dtype != torch.uint8:
            return False
        for each in (self._code, *floats):
            is_float = type(each) is Tensor and each.dtype == torch.float32
            if not (is_float and each.device == self.device and each.is_contiguous()):
                return False
        return True


class _Weight8bit(LayerWeight):
    """Dequantized as in the layer's own backward.

    Its forward on a GPU, and in eval mode on a CPU, rounds the activations to 8 bits too (but for
    the columns that exceed ``threshold``): a product with these rows is more exact than that.
    """

    is_exact = False

    def __init__(self, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        super().__init__(numbers.device, numbers.shape, dtype)
        self._numbers = numbers  # (V, H) int8
        self._scales = scales  # (V,) float32: the value of 127

    def dequantized(self) -> Tensor:
        return self._numbers.to(self.dtype).mul_(self._scales[:, None] * (1.0 / 127.0))


def serves(layer: type, weight: type) -> bool:
    """Return whether layers of a class are bitsandbytes' linear layers."""
    return issubclass(layer, (Linear4bit, Linear8bitLt))


def _state(module: Linear4bit) -> Any:
    # FSDP loses the parameter's class and state: the layer keeps the state for that
    return getattr(module.weight, "quant_state", None) or module.quant_state


def _has_packed(state: Any) -> bool:
    # in its dictionary: a state computes what it lacks
    return state is not None and vars(state).get("packing_format_for_cpu", False)


def read(module: nn.Module, dtype: torch.dtype) -> LayerWeight | str:
    """Return the weight of a linear layer whose input comes in ``dtype``, or why there is none: a
    subclass with a ``forward`` of its own, a weight that is not quantized yet, is on the meta
    device or apart from its scales, and a 4-bit one that bitsandbytes has packed for inference on a
    CPU, which it does in a call in eval mode, and does not unpack for training.
    """
    weight, forward = None, type(module).forward
    if forward is Linear4bit.forward and isinstance(module, Linear4bit):
        if _has_packed(_state(module)):
            return PACKED
        weight = _weight_4bit(module, dtype)
    elif forward is Linear8bitLt.forward and isinstance(module, Linear8bitLt):
        weight = _weight_8bit(module, dtype)
    return weight or f"the base is a {type(module).__name__}"


def _packed(weight: Tensor) -> Tensor:
    """Return the numbers of a 4-bit parameter, two in a byte."""
    # a plain tensor: bitsandbytes' own slows each look at its attributes
    with torch._C.DisableTorchFunctionSubclass():
        packed = weight.detach()
    if packed.dtype != torch.uint8 or not packed.is_contiguous():
        packed = packed.reshape(-1).view(torch.uint8)
    return packed


def stamp(module: Any) -> tuple | None:
    """Return the stamp of a layer in 4 bits; None for others, and where FSDP holds the weight."""
    weight = module._parameters.get("weight")
    state = vars(weight).get("quant_state") if type(weight) is Params4bit else None
    if state is None or not isinstance(module, Linear4bit):
        return None
    of_state = vars(state)
    absmax = of_state.get("absmax")  # another one where bitsandbytes has moved the weight
    how = of_state.get("packing_format_for_cpu"), module.compute_dtype, module.compute_type_is_set
    return None if absmax is None else (type(module).forward, id(weight), id(absmax), *how)


def _weight_4bit(module: Linear4bit, dtype: torch.dtype) -> LayerWeight | None:
    weight = module.weight
    state = _state(module)
    if type(weight) not in (Params4bit, nn.Parameter) or state is None:
        return None
    packed, absmax, blocksize = _packed(weight), state.absmax, state.blocksize
    if packed.is_meta or absmax.device != packed.device:
        return None
    height, width = module.out_features, module.in_features
    if state.shape != (height, width):
        return None
    size = height * width
    # not so for a shard of FSDP, or where bitsandbytes rounded down to a whole quant_storage
    if packed.numel() != -(-size // 2) or absmax.shape != (-(-size // blocksize),):
        return None
    # Linear4bit.forward's own dtype, which its first input may set
    if module.compute_type_is_set or dtype not in (torch.float32, torch.bfloat16):
        dtype = module.compute_dtype or dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    return _Weight4bit(weight, packed, state, dtype)


def _weight_8bit(module: Linear8bitLt, dtype: torch.dtype) -> LayerWeight | None:
    weight = module.weight
    if type(weight) is not Int8Params or weight.is_meta or module.state.has_fp16_weights:
        return None
    # the first forward takes them from the parameter to the state
    holder = module.state if weight.CB is None else weight
    numbers, scales = holder.CB, holder.SCB
    if numbers is None or scales is None or numbers.dtype != torch.int8:
        return None
    if not numbers.device == scales.device == weight.device:
        return None
    if numbers.shape != (module.out_features, module.in_features):
        return None
    return _Weight8bit(numbers.detach(), scales.detach(), dtype)
