"""Measure the LoRA training steps of one contender, in the process that ``lora_step.py`` starts.

The process of Unsloth imports it in front of this module, because it patches Transformers.
"""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from liger_patch import apply_patch, quantize_base, quantize_experts

from .measure import MIB, Failure, Measurement, attempt, measure, release_memory
from .models import Model, quantise
from .names import FP8, LOWER_BOUND, OFFLOADED, OURS
from .training_step import first_step, run_step, step_bound

LORA = {
    "r": 16,
    "lora_alpha": 16,
    "bias": "none",
    "target_modules": [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")],
}
EXPERTS = {  # of a mixture: attention's layers, and PEFT's wrappers of the experts' weights
    "target_modules": [f"{name}_proj" for name in ("q", "k", "v", "o")],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
LINEAR = [f"in_proj_{name}" for name in ("qkv", "z", "b", "a")] + ["out_proj"]  # Qwen 3.5's
SPREAD = 0.02  # standard deviation of random weights, as models are initialized
ADAPTED = 0.01  # standard deviation of lora_B: with zeros, lora_A has no gradient


@dataclass(frozen=True)
class Setting:
    """How a model is trained; ``quantized``: in 4 bits (nf4), ``dropout``: in the adapters,
    ``rank``: of the adapters, 0 for training every weight, ``experts``: of a mixture, whose experts
    have adapters too, ``held``: the format of its experts in 4 bits, made at random, ``linear``:
    with adapters on linear attention too.
    """

    name: str
    quantized: bool = False
    checkpointing: bool = False
    dropout: float = 0.0
    rank: int = 16
    experts: bool = False
    held: str = ""
    linear: bool = False

    def lora(self) -> dict[str, Any]:
        """Return the options of the adapters."""
        options: dict[str, Any] = LORA | (EXPERTS if self.experts else {})
        targets = options["target_modules"] + (LINEAR if self.linear else [])
        return options | {"target_modules": targets, "r": self.rank, "lora_dropout": self.dropout}


@dataclass(frozen=True)
class Request:
    """What one process measures.

    Attributes:
        contender: a name of CONTENDERS.
        model: name of the model in the report.
        folder: of its config, weights and tokenizer.
        sequences, length: shape of a batch.
        settings: measured in this order.
        rounds: timed steps of each.
        attention: that of all contenders but Unsloth.
        host_gib: of host memory for our offloaded checkpoints; None for what is available.
    """

    contender: str
    model: str
    folder: str
    sequences: int
    length: int
    settings: tuple[Setting, ...]
    rounds: int
    device: str = "cuda"
    attention: str = "sdpa"
    host_gib: float | None = None


def main(request: Path, results: Path) -> None:
    """Measure what a file asks for."""
    fields = json.loads(request.read_text(encoding="utf-8"))
    settings = tuple(Setting(**each) for each in fields.pop("settings"))
    write(rows(Request(**fields, settings=settings)), results)


def write(rows: Iterable[dict], results: Path) -> None:
    """Append one line of JSON to ``results`` for each row, as soon as it is measured, and print it:
    so nothing is lost when a time limit ends this process or all.
    """
    for row in rows:
        line = json.dumps(row)
        with results.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        print(line, flush=True)


def rows(request: Request) -> Iterator[dict]:
    """Yield a row a setting; behind eager's, one of the lower bound."""
    for setting in request.settings:
        name = {"model": f"{request.model}, {setting.name}"}
        found = attempt(partial(_measured, request, setting))
        release_memory()
        if isinstance(found, Failure):
            found = {request.contender: asdict(found)}
        yield from ({**name, "contender": contender, **row} for contender, row in found.items())


def _measured(request: Request, setting: Setting) -> dict[str, dict]:
    try:
        return _steps(request, setting)
    except Exception:
        traceback.print_exc()  # the row has the first line only
        raise


def _steps(request: Request, setting: Setting) -> dict[str, dict]:
    config = AutoConfig.from_pretrained(request.folder)
    batch = Model(request.model, config, request.sequences, request.length).batch(request.device)
    model = CONTENDERS[request.contender](request, setting)
    if setting.rank:
        fill_adapters(model)
    adapters = [p for p in model.parameters() if p.requires_grad]
    row: dict = {
        "attention": model.config._attn_implementation,
        "adapters": str(adapters[0].dtype).removeprefix("torch."),
        "trained": sum(p.numel() for p in adapters),
        "weights_mib": _allocated_mib(torch.cuda.memory_allocated),
    }
    loss = partial(autocast_loss, model)
    start = time.perf_counter()
    row |= first_step(loss, model, batch)
    row["first_step_s"] = time.perf_counter() - start
    step = partial(run_step, loss, model, batch)
    (measured,) = measure({"": step}, rounds=request.rounds, device=request.device).values()
    row |= asdict(measured)
    row["peak_mib"] = _allocated_mib(torch.cuda.max_memory_allocated)
    found = {request.contender: row}
    if request.contender == "eager" and "ms" in row and not (setting.quantized or setting.experts):
        found[LOWER_BOUND] = asdict(attempt(partial(_bound, request, step, model, batch)))
    return found


def _bound(
    request: Request, step: Callable[[], None], model: Any, batch: Mapping[str, Tensor]
) -> Measurement | Failure:
    bound = step_bound(step, model, batch)
    (measured,) = measure({"": bound}, rounds=request.rounds, device=request.device).values()
    return measured


def autocast_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    with torch.autocast(batch["labels"].device.type, torch.bfloat16):
        return model(**batch, use_cache=False).loss


@torch.no_grad()
def fill_adapters(model: torch.nn.Module) -> None:
    """Give the adapters the same random values in every contender."""
    generator = torch.Generator().manual_seed(0)
    adapters = sorted((name, p) for name, p in model.named_parameters() if p.requires_grad)
    for name, p in adapters:
        scale = 1 / math.sqrt(p.shape[1]) if "lora_A" in name else ADAPTED
        p.copy_(scale * torch.randn(p.shape, generator=generator))


def _allocated_mib(count: Callable[[], int]) -> float:
    return count() / MIB if torch.cuda.is_available() else 0.0


def _eager(request: Request, setting: Setting) -> Any:
    """Return PEFT's model: a frozen base in bf16 or 4 bits, adapters in float32.

    ``prepare_model_for_kbit_training`` would also make float32 copies of norms and head.
    """
    if setting.held:
        config = AutoConfig.from_pretrained(request.folder, attn_implementation=request.attention)
        model = held_model(config, setting.lora(), setting.held, request.device)
        return _in_training(model, setting)
    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,  # as Unsloth does
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        request.folder,
        dtype=torch.bfloat16,
        attn_implementation=request.attention,
        device_map={"": request.device},
        quantization_config=in_4_bits if setting.quantized else None,
    )
    if setting.rank:
        model = get_peft_model(model, LoraConfig(**setting.lora(), task_type="CAUSAL_LM"))
    return _in_training(model, setting)


def _in_training(model: Any, setting: Setting) -> Any:
    if setting.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _liger(request: Request, setting: Setting) -> Any:
    model = _eager(request, setting)
    liger = import_module("liger_kernel.transformers.monkey_patch")
    inner = model.get_base_model() if setting.rank else model
    liger._apply_liger_kernel_to_instance(inner)  # as Trainer does
    return model


def _unsloth(request: Request, setting: Setting) -> Any:
    fast = import_module("unsloth").FastLanguageModel
    checkpointing = "unsloth" if setting.checkpointing else False
    model, _ = fast.from_pretrained(
        request.folder,
        max_seq_length=request.length,
        dtype=torch.bfloat16,
        load_in_4bit=setting.quantized,
        use_gradient_checkpointing=checkpointing,
    )
    return fast.get_peft_model(
        model,
        **setting.lora(),
        max_seq_length=request.length,
        use_gradient_checkpointing=checkpointing,
    ).train()


def _ours(request: Request, setting: Setting) -> Any:
    model = _eager(request, setting)
    apply_patch(model)
    return model


def _ours_offloaded(request: Request, setting: Setting) -> Any:
    model = _eager(request, setting)
    apply_patch(model, checkpoint_offload=request.host_gib or True)
    return model


def _ours_fp8(request: Request, setting: Setting) -> Any:
    model = _eager(replace(request, device="cpu"), setting)
    quantize_base(model, "fp8", device=request.device).to(request.device)
    apply_patch(model)
    return model


CONTENDERS: dict[str, Callable[[Request, Setting], Any]] = {
    "eager": _eager,
    "Liger-Kernel": _liger,
    "Unsloth": _unsloth,
    OURS: _ours,
    FP8: _ours_fp8,
    OFFLOADED: _ours_offloaded,
}


def is_measured(contender: str, setting: Setting) -> bool:
    """Return whether a contender differs from the others for a setting."""
    if setting.held:  # bitsandbytes leaves experts as they are
        return contender == OURS
    if contender == "Unsloth" and not setting.rank:
        return False  # it does not train all weights in 16 bits
    if contender == "Liger-Kernel" and setting.rank and setting.experts:
        return False  # it does not train adapters of experts
    if contender == FP8:
        return bool(setting.rank) and not (setting.quantized or setting.experts)
    return contender != OFFLOADED or setting.checkpointing


def held_model(config: Any, lora: dict[str, Any], quant_type: str, device: str) -> Any:
    """Return PEFT's model of random weights: experts in MXFP4, or in nf4 as linear layers are then;
    adapters in float32. It is made layer by layer: in 16 bits, a model of 30B would fit neither the
    GPU nor, in the time of a run, a disk.
    """
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for module in model.modules():
        if not _has_experts(module):
            _fill(module, device, generator)
    if quant_type == "nf4":
        quantise(model)
    for name, module in list(model.named_modules()):
        if any(each.is_meta for each in module._buffers.values() if each is not None):
            model.set_submodule(name, type(module)(config=model.config).to(device))
    model = get_peft_model(model, LoraConfig(**lora, task_type="CAUSAL_LM"))
    for layer in model.get_base_model().get_decoder().layers:
        for module in layer.modules():
            _fill(module, device, generator)
        quantize_experts(layer, device, quant_type=quant_type)
    return model


def _has_experts(module: nn.Module) -> bool:
    return any(each.dim() == 3 for each in module._parameters.values() if each is not None)


def _fill(module: nn.Module, device: str, generator: torch.Generator) -> None:
    """Give a module's own parameters of the meta device random values; norms get ones."""
    for name, parameter in module._parameters.items():
        if parameter is None or not parameter.is_meta:
            continue
        value: Tensor = torch.empty_like(parameter, device=device)
        if value.dim() > 1:
            value.normal_(0.0, SPREAD, generator=generator)
        else:
            value.fill_(0.0 if "bias" in name or "sinks" in name else 1.0)
        module._parameters[name] = nn.Parameter(value, parameter.requires_grad)
