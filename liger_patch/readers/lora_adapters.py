"""Read PEFT's wrappers: the model within, adapters of linear layers and of experts, and which are
merged. Imported only where peft is loaded.
"""

from typing import Any, NamedTuple

from peft import PeftMixedModel, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora import layer as lora_layer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

LORA_MODULES = ("peft.tuners.lora.layer", "peft.tuners.lora.bnb")
LORA_FORWARDS = ("Linear.forward", "Linear4bit.forward", "Linear8bitLt.forward")


def base_model(model: nn.Module) -> nn.Module:
    """Return the model that one of PEFT's wrappers holds; any other module as it is."""
    if isinstance(model, PeftMixedModel):  # has no get_base_model
        return model.base_model.model
    return model.get_base_model() if isinstance(model, PeftModel) else model


def merged_adapters(*modules: nn.Module | None) -> tuple[list[str], ...]:
    """Return PEFT's own lists of the adapters that are merged into the weights of these layers. A
    merge writes through ``weight.data``, which nothing else tells.
    """
    layers = [module for module in modules if isinstance(module, BaseTunerLayer)]
    return tuple(layer.merged_adapters for layer in layers if hasattr(layer, "merged_adapters"))


def runs_pefts_forward(module: nn.Module) -> bool:
    """Return True for a linear layer with LoRA adapters that runs PEFT's own forward."""
    forward = type(module).forward
    # functools.wraps copies __module__, but no globals
    own = getattr(forward, "__globals__", {})
    return (
        isinstance(module, LoraLayer)
        and isinstance(getattr(module, "base_layer", None), nn.Module)
        and own.get("__name__") in LORA_MODULES
        and forward.__qualname__ in LORA_FORWARDS
    )


def has_adapters(module: nn.Module) -> bool:
    """Return True for a layer that any of PEFT's tuners has put around one of the model."""
    return isinstance(module, BaseTunerLayer)


def described(layer: nn.Module) -> str:
    """Return the class of such a layer, and its tuner."""
    tuner = type(layer).__module__.removeprefix("peft.tuners.").partition(".")[0]
    return f"{type(layer).__name__} ({tuner})"


def plain_adapter(layer: Any) -> tuple[nn.Linear, nn.Linear, nn.Module, float, float] | str:
    """Return the one active adapter of a layer, if it adds ``scaling * B A dropout(x)`` and nothing
    else; or why it is not so.

    Returns:
        the modules of A, B and dropout, whose weights are (R, H) and (O, R); the scaling; and the
        rate of the dropout now, in [0, 1).
    """
    if layer.disable_adapters:
        return "adapters are disabled"
    if layer.merged_adapters:
        return "adapters are merged"
    held = layer._modules  # looked up here, a child takes a tenth of what its attribute takes
    matrices = held["lora_A"]._modules
    active = layer.active_adapters
    if len(active) != 1 or active[0] not in matrices:
        active = [name for name in active if name in matrices]
        if len(active) != 1:
            return f"{len(active)} active adapters"
    name = active[0]
    if name in layer.lora_variant:
        return type(layer.lora_variant[name]).__name__
    if getattr(layer, "fan_in_fan_out", False):
        return "fan_in_fan_out=True"
    a, b = matrices[name], held["lora_B"]._modules[name]
    dropout = held["lora_dropout"]._modules[name]
    is_linear = type(a) is type(b) is nn.Linear
    if not is_linear or not (a._parameters.get("bias") is b._parameters.get("bias") is None):
        return "lora_bias=True, or matrices of another class"
    rate = 0.0
    if type(dropout) is nn.Dropout:
        rate = dropout.p if dropout.training else 0.0
    elif type(dropout) is not nn.Identity:
        return f"dropout is a {type(dropout).__name__}"
    if rate >= 1.0:
        return "lora_dropout=1"
    scaling = layer.scaling[name]
    if isinstance(scaling, Tensor):  # on a GPU mostly, where reading it at each call would wait
        return "its scaling is a tensor (prepare_model_for_compiled_hotswap)"
    return a, b, dropout, scaling, rate


class ExpertAdapter(NamedTuple):
    """The active adapter of a 3-D weight of E experts.

    Attributes:
        a, b: the modules that hold it; their weights are (E R, in) and (out, R E).
        is_swapped: whether A reads what a weight (E, out, in) gives: PEFT 0.20 and older.
    """

    a: nn.Linear
    b: nn.Linear
    experts: int
    scaling: float
    is_swapped: bool

    def matrices(self) -> tuple[Tensor, Tensor, float]:
        """Return A (E, R, in), B (E, out, R) and the scaling. In B, experts take turns."""
        a, b = self.a.weight, self.b.weight
        a = a.view(self.experts, -1, a.shape[1])
        b = b.view(len(b), -1, self.experts).permute(2, 0, 1)
        if self.is_swapped:
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        return a, b, self.scaling


def wraps_experts(module: nn.Module) -> bool:
    """Return True for PEFT's wrapper of a parameter (``target_parameters``)."""
    return isinstance(module, lora_layer.ParamWrapper)


def expert_adapters(
    wrapper: Any,
) -> tuple[nn.Module, list[nn.Module], dict[str, ExpertAdapter]] | str:
    """Return the experts in nested wrappers, the modules that a call would pass between, and the
    adapter of each parameter by name; or why PEFT's own forward must run.
    """
    modules: list[nn.Module] = []
    found: dict[str, ExpertAdapter] = {}
    layer = wrapper
    while wraps_experts(layer):
        if layer.merged and layer.disable_adapters:
            return "adapters are merged"  # and PEFT unmerges them
        active = [] if layer.merged or layer.disable_adapters else layer.active_adapters
        active = [name for name in active if name in layer.lora_A]
        if len(active) > 1:
            return f"{len(active)} active adapters"
        if active:
            a, b = layer.lora_A[active[0]], layer.lora_B[active[0]]
            if layer.num_experts == 1:
                return "one expert, or a 2-D parameter"
            modules += [a, b]
            is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
            swapped = is_transposed == getattr(layer, "_did_swap_in_out_features", False)
            how = layer.num_experts, layer.scaling[active[0]], swapped
            found[layer.parameter_name] = ExpertAdapter(a, b, *how)
        layer = layer.base_layer
        modules.append(layer)
    return layer, modules, found
