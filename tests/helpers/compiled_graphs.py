"""What tests with torch.compile share: marks, and a backend that counts products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

# What torch says of its own tracing; pyproject.toml makes every warning an error.
WARNINGS = [
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor"),
]
MARKS = [pytest.mark.usefixtures("nothing_is_compiled"), *WARNINGS]


class Graphs:
    """A backend that keeps the number of ``linear`` calls in each graph, those within autograd
    functions too, and runs the graphs.
    """

    def __init__(self, backend: str = "eager") -> None:
        self.linears: list[int] = []
        self.run = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.linears.append(
            sum(
                "linear" in str(node.target) and "liger_patch" not in str(node.target)
                for part in graph.modules()
                if isinstance(part, GraphModule)
                for node in part.graph.nodes
                if node.op == "call_function"
            )
        )
        return self.run(graph, inputs)
