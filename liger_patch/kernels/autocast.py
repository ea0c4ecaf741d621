"""Autocast, also for devices that have none."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast computes products in now, None where it is off."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Within this context, products keep the dtype of their factors."""
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)
