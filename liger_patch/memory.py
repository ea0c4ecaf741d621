"""The longest row that a model in memory can train on its GPU, as ``estimate`` computes it."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import nn

from liger_patch.estimate.contenders import EAGER, OURS, Contender
from liger_patch.estimate.estimate import (
    GIB,
    explained,
    longest_rows,
    loops_over_tokens,
    most_positions,
    tokens_in_words,
)
from liger_patch.estimate.model import (
    BITS_4,
    DOUBLE_QUANTIZED,
    MXFP4,
    OPTIMIZERS,
    TrainingStep,
    build,
    model_class_name,
)
from liger_patch.estimate.step import progress
from liger_patch.layers.experts import is_wrapper
from liger_patch.layers.quantized_base import Fp8Linear
from liger_patch.layers.quantized_experts import ExpertWeight4bit, Mxfp4Rows
from liger_patch.patch import flags
from liger_patch.patch.forward import original_class, record_of
from liger_patch.patch.settings import PatchRecord
from liger_patch.readers.quantized_weights import reader_of
from liger_patch.readers.wrapped_model import transformers_model


def longest_row(
    model: nn.Module,
    *,
    batch: int = 1,
    gib: float | None = None,
    reserve_gib: float = 1.0,
    optimizer: str = "adamw",
    autocast: bool = True,
) -> int:
    """Estimate how many tokens each sequence of a batch may have, so that a training step fits.

    The model's config, weights, adapters, checkpointing and options of ``apply_patch``, and whether
    its loss is fused, are read as they are now: patch it, add adapters and enable checkpointing
    first. A step is traced on the
    meta device several times, which takes seconds and no memory of the GPU. So call this before
    training, not within a step. ``patch_status`` repeats the result. One GPU: no sharding is taken
    into account. Rows may end earlier where the model's positions do: ``patch_status`` says where.

    Args:
        model: a Transformers model, or a PEFT wrapper around one, patched or not. All weights
            train, or LoRA adapters of one rank on linear layers and experts, but not on the head.
        batch: sequences of a step.
        gib: GiB of the GPU's memory; None for what this process has and what is free there. Where
            the process holds other models too, give what is left beside them.
        reserve_gib: GiB of these that a step cannot have: gaps between pieces of memory. >= 0.
        optimizer: whose states count: "adamw" (in the dtype of the weights), "adamw-float32",
            "adamw-8bit" or "none".
        autocast: whether products are in 16 bits, as ``Trainer(bf16=True)`` has them.

    Returns:
        Tokens of each sequence, at most 2^24; 0 where not even a short one fits.

    Raises:
        ValueError: an argument is out of range, or the model is not one whose step is estimated.
        TypeError: not a Transformers model.
    """
    target = transformers_model(model)
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise ValueError(f"batch must be a whole number >= 1, got {batch!r}")
    if optimizer not in tuple(OPTIMIZERS):
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    if not isinstance(autocast, bool):
        raise ValueError(f"autocast must be True or False, got {autocast!r}")
    if not _is_number(reserve_gib) or not 0 <= reserve_gib < math.inf:
        raise ValueError(f"reserve_gib must be a finite number >= 0, got {reserve_gib!r}")
    gib = _gib_of(target) if gib is None else gib
    if not _is_number(gib) or not reserve_gib < gib < math.inf:
        raise ValueError(f"gib must be a finite number > reserve_gib={reserve_gib!r}, got {gib!r}")
    record: PatchRecord | None = record_of(target)
    config = copy.deepcopy(target.config)  # what is built writes to it
    own, built = (
        type(target) if record is None else original_class(target),
        model_class_name(config),
    )
    if own.__name__ != built:
        raise ValueError(f"model must be a {built}, got a {own.__name__}")
    step = _step(target, record, batch, optimizer, autocast)
    with explained(config, "can be built from its config"):
        _, sizes = build(config, step)
    trained, parameters = _counts(target)
    if (trained, parameters) != (sizes.trained, sizes.parameters):
        raise ValueError(
            "model must train all weights, or LoRA adapters of one rank on linear layers and "
            f"experts, but not on the head: {sizes.trained:,} trained numbers of "
            f"{sizes.parameters:,}, got {trained:,} of {parameters:,}"
        )
    rows = {}
    with progress(8 if step.checkpointing else 5):  # two short ones, and three of each kind of row
        if not loops_over_tokens(config, step):
            with explained(config, "takes steps of several lengths"):
                reserve = int(reserve_gib * GIB)
                rows = longest_rows(config, step, _contender(record), sizes, reserve, [gib])
    if not rows:
        raise ValueError(
            f"model must make as many tensors at any length, got {built}, which does not: "
            "`python -m liger_patch estimate` estimates one length"
        )
    row = rows[gib]
    if record is not None:
        host = f" and {row.host / GIB:.3g} GiB of the host" if row.host else ""
        fits = f"{batch:,} x {tokens_in_words(row.tokens)} tokens in {gib:.4g} GiB{host}"
        positions = most_positions(config)
        ends = positions is not None and row.tokens > positions
        record.longest_row = (
            f"{fits if row.tokens else f'not even {batch:,} x 1 tokens fit {gib:.4g} GiB'}, "
            f"estimated for {', '.join(step.in_words())}"
            + (f"; the model's positions end at {positions:,}" if ends else "")
        )
    return row.tokens


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _gib_of(model: nn.Module) -> float:
    """Return what this process has of the GPU's memory, and what is free there."""
    devices = {each.device for each in model.parameters()}
    device = next(iter(devices))
    if len(devices) > 1 or device.type != "cuda":
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"gib must be given where a model is not on one CUDA GPU, got one on {names}"
        )
    free, _ = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device)) / GIB


def _step(
    model: Any, record: PatchRecord | None, batch: int, optimizer: str, autocast: bool
) -> TrainingStep:
    """Return the step that a model's weights and options describe, of the usual length."""
    for each in model.modules():
        if reader_of(each) is not None and not (_bits(each) or isinstance(each, Fp8Linear)):
            raise ValueError(
                "model must be one that is not quantized, or by bitsandbytes or quantize_base, got "
                f"a {type(each).__name__} whose weight is a {type(each.weight).__name__}"
            )
    adapters = [each for each in model.modules() if hasattr(each, "lora_A")]
    down = [weight for each in adapters for weight in each.lora_A.parameters()]
    experts = [each for each in model.modules() if isinstance(each, ExpertWeight4bit)]
    of_experts = {id(each) for held in experts for each in held.modules()}
    quantized = [e for e in model.modules() if _bits(e) and id(e) not in of_experts]
    dropouts = [part.p for each in adapters for part in each.modules() if type(part) is nn.Dropout]
    head = model.get_output_embeddings()
    own = {id(weight) for each in adapters for weight in _trained_of(each)}
    packed = {id(each.weight) for each in quantized}
    packed |= {id(each) for held in experts for each in held.parameters()}
    in_fp8 = [each for each in model.modules() if isinstance(each, Fp8Linear)]
    packed |= {id(each.qweight) for each in in_fp8}
    dtypes = {p.dtype for p in model.parameters() if id(p) not in own | packed}
    of_adapters = {weight.dtype for weight in down} or {torch.float32}
    if len(dtypes) > 1 or len(of_adapters) > 1:
        names = ", ".join(sorted(map(str, dtypes | of_adapters)))
        raise ValueError(f"model must have weights of one dtype and adapters of one, got {names}")
    (dtype,), (adapter_dtype,) = dtypes, of_adapters
    products = dtype if dtype.itemsize == 2 else torch.bfloat16
    offload = None if record is None else record.offload
    bound = math.inf if offload is None else offload.bound() / GIB
    return TrainingStep(
        batch=batch,
        dtype=dtype,
        autocast=products if autocast else None,
        lora_rank=next(iter(adapters[0].r.values())) if adapters else None,
        adapter_dtype=adapter_dtype,
        lora_targets=tuple(
            name
            for name, each in model.named_modules()
            if hasattr(each, "lora_A") and each is not head and not is_wrapper(each)
        ),
        lora_parameters=tuple(
            f"{name.split('.base_layer')[0]}.{each.parameter_name}"  # it may be within another
            for name, each in model.named_modules()
            if is_wrapper(each)
        ),
        lora_dropout=max(dropouts, default=0.0),
        bits=max(map(_bits, quantized), default=None),
        double_quant=any(getattr(e.weight, "compress_statistics", False) for e in quantized),
        fp8_base=bool(in_fp8),
        expert_bytes=max(map(_bytes_of_number, experts), default=None),
        checkpointing=any(
            getattr(each, "gradient_checkpointing", False) for each in model.modules()
        ),
        checkpoint_offload=offload is not None,
        host_gib=None if math.isinf(bound) else bound,
        optimizer=optimizer,
        chunk_mib=None if record is None else record.chunk_mib,
        attention=_attention(model),
    )


def _attention(model: Any) -> str:
    """Return the attention to estimate: flash attention keeps what SDPA does."""
    name = model.config._attn_implementation
    if name not in ("sdpa", "eager") and "flash" not in name:
        raise ValueError(f"model must have sdpa, eager or flash attention, got {name!r}")
    return "sdpa" if "flash" in name else name


def _trained_of(layer: Any) -> list[nn.Parameter]:
    return [each for name, each in layer.named_parameters() if not name.startswith("base_layer.")]


def _bits(layer: nn.Module) -> int:
    """Return the bits in which bitsandbytes holds the weight of a layer, 0 for any other layer."""
    names = {each.__name__ for each in type(layer).__mro__}
    return 4 if "Linear4bit" in names else 8 if "Linear8bitLt" in names else 0


def _bytes_of_number(held: ExpertWeight4bit) -> float:
    layer = getattr(held.rows, "layer", None)
    if layer is None:
        return MXFP4
    return DOUBLE_QUANTIZED if layer.weight.compress_statistics else BITS_4


def _counts(model: nn.Module) -> tuple[int, int]:
    """Return how many numbers train, and how many there are: those in 4 bits one by one."""
    packed: dict[int, int] = {}
    for each in model.modules():
        if isinstance(each, Mxfp4Rows):
            packed |= {id(each.packed): 2 * each.packed.numel(), id(each.scales): 0}
        if _bits(each):
            layer: Any = each
            packed[id(layer.weight)] = layer.in_features * layer.out_features
    sizes = [(packed.get(id(p), p.numel()), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)


def _contender(record: PatchRecord | None) -> Contender:
    if record is None:
        return EAGER
    names = record.layers
    layers = OURS.layers if names is True else frozenset() if names is False else names
    is_fused = record.distrusted is None and flags.return_logits() is not True
    return replace(OURS, layers=layers, head=OURS.head if is_fused else EAGER.head)
