"""The parameters of experts as their products take them, and their gradients as autograd does.

There are eight: weight, bias, A and B of the first product, and those of the second one; each may
be None. A and B are cast at each call, to a rank that the tensor cores multiply, and B is
multiplied by the adapter's scaling: all in one tensor, because gradient checkpointing runs some 40
Python calls for each that is saved for the backward pass.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype
from liger_patch.kernels.expert_steps import Activation, ExpertProjection

LEAST_RANK = 16  # what the tensor cores multiply
FIELDS = 4  # of a projection that are tensors


class Layer(NamedTuple):
    """Experts without their tensors.

    Attributes:
        how: the activation.
        scalings: of the adapters of both products.
        dtype: of the products.
        held: the ``DequantizedExperts`` of each product; None where its weight is a tensor.
    """

    how: Activation
    scalings: tuple[float, float]
    dtype: torch.dtype
    held: Sequence[Any]

    def factor(self, i: int) -> float:
        """Return by what a parameter's gradient is multiplied: that of B by the scaling."""
        return self.scalings[i // FIELDS] if i % FIELDS == 3 else 1.0

    def cast_adapters(self, parameters: Sequence[Any]) -> Tensor | None:
        """Return A and B of both products in one tensor, of padded ranks, and B times its scaling;
        None without adapters.
        """
        shapes = _padded_shapes(parameters)
        if not shapes:
            return None
        sizes = [shape.numel() for shape in shapes.values()]
        like: Tensor = next(parameters[i] for i in shapes)
        adapters = like.new_empty(sum(sizes), dtype=self.dtype)
        if any(shape != parameters[i].shape for i, shape in shapes.items()):
            adapters.zero_()
        for i, each in _adapters(adapters, shapes).items():
            own, factor = parameters[i], self.factor(i)
            if each.shape != own.shape:
                each = each[:, : own.shape[1], : own.shape[2]]
            each.copy_(own) if factor == 1.0 else torch.mul(own, factor, out=each)
        return adapters

    def projections(
        self, parameters: Sequence[Any], adapters: Tensor | None, given: Sequence[Any] | None = None
    ) -> list[ExpertProjection]:
        """Return both projections: weights and biases of ``parameters``, and adapters of the shapes
        of ``given``, by default of ``parameters``.
        """
        shapes = _padded_shapes(parameters if given is None else given)
        parts = {} if adapters is None else _adapters(adapters, shapes)
        found = []
        for i, held in zip((0, FIELDS), self.held, strict=True):
            weight, bias = parameters[i : i + 2]
            weight = held if weight is None else weight
            bias = None if bias is None else bias.to(self.dtype).contiguous()
            found.append(ExpertProjection(weight, bias, parts.get(i + 2), parts.get(i + 3)))
        return found

    def prepared(self, parameters: Sequence[Any]) -> list[ExpertProjection]:
        """Return both projections with dense weights, for all slices of a pass."""
        with torch.no_grad():
            parts = self.projections(parameters, self.cast_adapters(parameters))
            return [part._replace(weight=part.dense(self.dtype)) for part in parts]


def _padded_shapes(given: Sequence[Any]) -> dict[int, torch.Size]:
    """Return the shapes of A and B of padded ranks, by their places among the parameters."""
    found = {}
    for i, each in enumerate(given):
        if each is not None and i % FIELDS > 1:
            shape = each.shape
            axis = i % FIELDS - 1  # of the rank
            padded = max(LEAST_RANK, 1 << (shape[axis] - 1).bit_length())
            found[i] = torch.Size((*shape[:axis], padded, *shape[axis + 1 :]))
    return found


def _adapters(joined: Tensor, shapes: dict[int, torch.Size]) -> dict[int, Tensor]:
    """Return the parts of one tensor that ``cast_adapters`` returns, by their places."""
    parts = joined.split([shape.numel() for shape in shapes.values()])
    return {i: part.view(shape) for (i, shape), part in zip(shapes.items(), parts, strict=True)}


class Given(NamedTuple):
    """What a parameter's gradient must be like; ``takes_turns``: whether experts are the dimension
    of stride 1, as in PEFT's B.
    """

    shape: torch.Size
    dtype: torch.dtype
    takes_turns: bool

    @classmethod
    def like(cls, parameter: Tensor | None) -> "Given | None":
        if parameter is None:
            return None
        turns = parameter.dim() == 3 and parameter.stride(0) == 1 != len(parameter)
        return cls(parameter.shape, parameter.dtype, turns)

    def cut(self, gradient: Tensor) -> Tensor:
        """Return a gradient without what a padded rank added."""
        if gradient.shape == self.shape:
            return gradient
        return gradient[:, : self.shape[1], : self.shape[2]]

    def times(self, gradient: Tensor, factor: float) -> Tensor:
        """Return a gradient times a factor."""
        gradient = self.cut(gradient)
        if self.takes_turns:
            experts, *others = self.shape
            out = gradient.new_empty(*others, experts, dtype=self.dtype).permute(2, 0, 1)
        elif factor == 1.0:
            return gradient.to(self.dtype)
        else:
            out = gradient.new_empty(self.shape, dtype=self.dtype)
        return torch.mul(gradient, factor, out=out)

    def added(self, total: Tensor | None, gradient: Tensor, factor: float) -> Tensor:
        """Add a gradient times a factor to a sum in float32, which is made here if it is None."""
        if total is None:
            return self._replace(dtype=accumulation_dtype(self.dtype)).times(gradient, factor)
        return total.add_(self.cut(gradient), alpha=factor)
