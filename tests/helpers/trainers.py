"""What tests of trainers share: options, and the size of the largest tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_patch.deferred.tensor import DeferredLogits

QUIET: dict[str, Any] = {  # on the CPU, with a log of each step, and no other output
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "dataloader_pin_memory": False,
}


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DeferredLogits):
                self.elements = max(self.elements, leaf.numel())
        return result
