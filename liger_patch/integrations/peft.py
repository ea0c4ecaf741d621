"""PEFT: the Transformers model inside a PEFT wrapper. Imported only where peft is loaded."""

from peft import PeftModel
from torch import nn


def base_model(model: nn.Module) -> nn.Module:
    """The model that a ``PeftModel`` wraps; any other module as it is."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
