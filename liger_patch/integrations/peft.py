"""PEFT: the Transformers model inside a PEFT wrapper. Imported only where peft is loaded."""

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


def base_model(model: nn.Module) -> nn.Module:
    """Return the model that a ``PeftModel`` wraps; any other module as it is."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def merged_adapters(*modules: nn.Module | None) -> tuple[list[str], ...]:
    """Return PEFT's own lists of the adapters that are merged into the weights of these layers. A
    merge writes through ``weight.data``, which nothing else tells.
    """
    layers = [module for module in modules if isinstance(module, BaseTunerLayer)]
    return tuple(layer.merged_adapters for layer in layers if hasattr(layer, "merged_adapters"))
