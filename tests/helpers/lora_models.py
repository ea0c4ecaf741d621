"""Tiny models with LoRA adapters, alone and beside their patched copies, and which of their
projections run on kernels.

Where PEFT is not installed, importing this skips the test file that imports it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from tiny_models import ROWS, Batch, tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import Step, assert_fused, assert_right, assert_same_step, step

from liger_patch import apply_patch
from liger_patch.layers import experts
from liger_patch.layers.checks import layers_of
from liger_patch.layers.lora import not_plain

peft = pytest.importorskip("peft", reason="peft is not installed")

QKV, OUT = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = (*QKV, *OUT, *MLP)
QWEN, BOTH = "qwen3_moe", ("gate_up_proj", "down_proj")  # a mixture, and the weights of its experts
# dtype of the model, whether PEFT makes its adapters float32, whether autocast to bf16 is on
WAYS = {
    "float32": (torch.float32, True, False),
    "bfloat16": (torch.bfloat16, False, False),
    "autocast": (torch.bfloat16, True, True),
    "autocast of bfloat16 adapters": (torch.bfloat16, False, True),
    "autocast of float32": (torch.float32, True, True),
    "float32 adapters without autocast": (torch.bfloat16, True, False),
}
Groups = list[tuple[str, ...]]
LAYER: Groups = [QKV, OUT, MLP]  # what a layer of all adapters runs
MARKS = [
    pytest.mark.filterwarnings(
        # models made here are not on disk, where PEFT looks for their configuration
        "ignore:Could not find a config file in:UserWarning",
        "ignore:Model (has|with) .tie_word_embeddings:UserWarning",
        "ignore:Unsupported layer type:UserWarning",  # PEFT 0.18, of experts
    )
]


def adapted(
    model_type: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    wide_adapters: bool = True,
    base: nn.Module | None = None,
    **options: Any,
) -> Any:
    """A PEFT model whose adapters have an effect."""
    model = tiny_model(ROWS[model_type], dtype=dtype) if base is None else base
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": list(ALL), "init_lora_weights": False, **options}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=wide_adapters)


def experts_of(model: nn.Module) -> dict[str, Any]:
    """The experts on kernels, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if "experts" in layers_of(module) and not experts.is_wrapper(module)
    }


def with_adapters(base: Any, parameters: Collection[str] = BOTH, **options: Any) -> Any:
    """A PEFT model of adapters on all experts, each of which has other numbers."""
    names = experts_of(apply_patch(copy.deepcopy(base)))
    targets = [f"{name}.{each}" for name in names for each in parameters]
    options = {"target_modules": None, "target_parameters": targets, **options}
    return adapted(base=base, **options)


def training_step(model: Any, batch: Any, *, autocast: bool = False) -> Step:
    """The loss, and the gradients of the adapters by name."""
    found = step(model.train(), batch, autocast=autocast)
    return {n: value for n, value in found.items() if n == "loss" or "lora_" in n}


def batch_of(model: Any) -> Batch:
    return tiny_batch(model.get_base_model())


def beside(eager: Any) -> tuple[Any, Any, Batch]:
    """Return the model, a patched copy, and a batch."""
    return eager, apply_patch(copy.deepcopy(eager)), batch_of(eager)


def copies(**options: Any) -> tuple[Any, Any, Batch]:
    """Return two models in float64, the second of them patched, and a batch."""
    return beside(adapted(base=tiny_model(ROWS["llama"]).double(), **options))


def pair(kind: str = QWEN, **options: Any) -> tuple[Any, Any, Batch]:
    """The same of a mixture with adapters on its experts."""
    return beside(with_adapters(tiny_model(ROWS[kind]).double(), **options))


def assert_same(ours: Any, eager: Any, batch: Batch) -> None:
    """Models in float64 take the same training step."""
    assert_same_step(training_step(ours, batch), training_step(eager, batch))


def replaced(module: Any) -> None:
    """Hang a forward on a module that doubles what its own returns."""
    forward = module.forward
    module.forward = lambda *args, **options: 2 * forward(*args, **options)


def unmerged(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def first(model: nn.Module, name: str) -> Any:
    """The first decoder layer's module of that name."""
    named = model.named_modules()
    return next(m for n, m in named if ".layers.0." in n and n.endswith(f".{name}"))


def lora_layers(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}


class Calls:
    """What ran: on kernels, the projections of each call; by PEFT, each layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from peft.tuners.lora import LoraLayer

        from liger_patch.layers import lora

        self._on_kernels: list[Sequence[Tensor]] = []
        self._by_peft: list[Any] = []
        run_linears, run_mlp = lora.run_lora_linears, lora.run_gated_mlp
        check = LoraLayer._check_forward_args

        def linears(x: Tensor, projections: Any, *how: Any) -> Any:
            self._on_kernels.append([each.a for each in projections])
            return run_linears(x, projections, *how)

        def mlp(x: Tensor, gate: Any, up: Any, down: Any, *how: Any) -> Any:
            self._on_kernels.append([each.a for each in (gate, up, down)])
            return run_mlp(x, gate, up, down, *how)

        def checked(layer: Any, *arguments: Any, **how: Any) -> Any:
            self._by_peft.append(layer)  # PEFT's own forward begins with this call
            return check(layer, *arguments, **how)

        monkeypatch.setattr(lora, "run_lora_linears", linears)
        monkeypatch.setattr(lora, "run_gated_mlp", mlp)
        monkeypatch.setattr(LoraLayer, "_check_forward_args", checked)

    def taken(self, model: nn.Module) -> tuple[Groups, list[str]]:
        """Return the projections of each call of an operator, and those of PEFT's own forwards,
        since the last time or ``clear``.
        """
        names, layers = {}, {}
        for name, layer in lora_layers(model).items():
            layers[layer] = short = name.rpartition(".")[2]
            names |= {id(each.weight): short for each in getattr(layer, "lora_A", {}).values()}
        groups = [tuple(names[id(a)] for a in call) for call in self._on_kernels]
        by_peft = [layers[layer] for layer in self._by_peft]
        self.clear()
        return groups, by_peft

    def of_step(self, model: nn.Module, batch: Any) -> tuple[Groups, list[str]]:
        """Return those of a training step."""
        self.clear()
        training_step(model, batch)
        return self.taken(model)

    def clear(self) -> None:
        self._on_kernels.clear()
        self._by_peft.clear()


def check_precision(
    eager: Any,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    in_float64: Callable[[Any], Any] = lambda model: copy.deepcopy(model).double(),
) -> None:
    """A step of LoRA on kernels is no worse than PEFT's.

    Args:
        way: of WAYS, in whose dtypes the model is.
        in_float64: returns the same model; of a quantized one with the weights written out.
    """
    dtype, _, autocast = WAYS[way]
    (eager, model, batch), calls = beside(eager), Calls(monkeypatch)
    theirs = training_step(eager, batch, autocast=autocast)
    calls.clear()
    ours = training_step(model, batch, autocast=autocast)
    groups, by_peft = calls.taken(model)
    if way == "float32 adapters without autocast":  # PEFT casts x for each
        assert (groups, len(by_peft)) == ([], 14)
    else:
        assert (groups, by_peft) == (LAYER * 2, [])
        assert not_plain(model) == {}
    assert_fused(model)
    assert ours["loss"].dtype == theirs["loss"].dtype
    truth = training_step(in_float64(eager), batch)
    assert_right(ours, theirs, truth, torch.bfloat16 if autocast else dtype)
