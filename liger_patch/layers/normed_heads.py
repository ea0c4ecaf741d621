"""Leave the norms of an attention's queries and keys to the kernel that rotates them.

While such an attention runs, its ``q_norm`` and ``k_norm`` return an ``UncomputedNorm`` each, and
its rotary embedding computes both with ``normed_rotary``. Its own code runs: whatever else it does
with an uncomputed norm computes the norm first, and goes on with it.
"""

from __future__ import annotations

import dis
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from liger_patch.kernels.backend import serves_triton
from liger_patch.kernels.graphs import in_tracing_mode, is_compiled_here
from liger_patch.kernels.normed_rotary import normed_rotary
from liger_patch.kernels.rms_norm import NormInputs, rms_norm
from liger_patch.layers.checks import has_hooks, layers_of

NAMES = ("q_norm", "k_norm")  # of an attention's norms
JUMPS = {*dis.hasjrel, *dis.hasjabs}
_running = threading.local()  # the norms of the attention that this thread runs


class UncomputedNorm:
    """The norm of x (B, T, num_heads, D), or of x whose tokens and heads have changed places."""

    def __init__(self, inputs: NormInputs) -> None:
        self._inputs = inputs
        self._has_gradient = torch.is_grad_enabled()
        self._result: Tensor | None = None

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Exchange two dimensions: of the input, where they are no features and nothing is
        computed yet.
        """
        x = self._inputs.x
        last = x.dim() - 1
        if self._result is not None or last in (dim0 % x.dim(), dim1 % x.dim()):
            return self.computed().transpose(dim0, dim1)
        return UncomputedNorm(self._inputs._replace(x=x.transpose(dim0, dim1)))

    def computed(self) -> Tensor:
        """Return the norm, with the gradient mode of the call that this stands for."""
        if self._result is None:
            x, weight, eps, offset, dtype = self._inputs
            with torch.set_grad_enabled(self._has_gradient):
                self._result = rms_norm(x, weight, eps, offset=offset, dtype=dtype)
        return self._result

    def uncomputed(self) -> NormInputs | None:
        """Return what the norm is computed of; None where it is computed already, and where the
        gradient mode is another one now.
        """
        is_left = self._result is None and self._has_gradient == torch.is_grad_enabled()
        return self._inputs if is_left else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.computed(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        values: Any = tree_map(computed, (args, kwargs or {}))
        return function(*values[0], **values[1])


def _operator(name: str) -> Any:
    def apply(self: UncomputedNorm, *args: Any) -> Any:
        return getattr(self.computed(), name)(*(computed(each) for each in args))

    return apply


_COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
for _name in set(dir(Tensor)) - set(dir(UncomputedNorm)) | _COMPARISONS:
    # Python looks operators up in the class
    if _name.startswith("__") and callable(getattr(Tensor, _name)):
        setattr(UncomputedNorm, _name, _operator(_name))


def computed(value: Any) -> Any:
    """Return the value of an uncomputed norm, and all else as it is."""
    return value.computed() if type(value) is UncomputedNorm else value


def rotates_its_norms(forward: Callable[..., Any], rotations: Collection[str]) -> bool:
    """Return whether the code of an attention's forward norms queries and keys, and then rotates
    them in every call.

    If it did not always rotate them (EXAONE 4 does so in some layers only), or had a norm after the
    rotation (T5Gemma 2), a cache or an attention function would be given uncomputed norms. Those of
    other libraries take tensors only.
    """
    code = list(dis.get_instructions(forward))
    norms = [each.offset for each in code if each.argval in NAMES]
    places = [each.offset for each in code if each.argval in rotations]
    if not norms or not places:
        return False
    jumps = [(each.offset, each.argval) for each in code if each.opcode in JUMPS]
    is_skipped = any(start < place < end for start, end in jumps for place in places)
    return max(norms) < min(places) and not is_skipped


@contextmanager
def norms_left_to_rotation(attention: nn.Module) -> Iterator[None]:
    """Within this context, the attention's norms of queries and keys return ``UncomputedNorm``."""
    before = getattr(_running, "norms", ())
    _running.norms = _norms(attention)
    try:
        yield
    finally:
        _running.norms = before


def _norms(attention: nn.Module) -> tuple[nn.Module, ...]:
    """Return the norms of queries and keys, if both run on kernels without hooks; none within a
    trace.

    Modes that count operations do not change the answer: checkpointing may compute a layer within
    such a mode and again without it, and both must save the same tensors.
    """
    if in_tracing_mode() or torch._C._is_tracing():
        return ()
    norms: list[Any] = [getattr(attention, name, None) for name in NAMES]
    for each in norms:
        if "rms_norm" not in layers_of(each) or has_hooks(each):
            return ()
    return tuple(norms)


def is_left_to_rotation(norm: nn.Module, x: Tensor, weight: Tensor | None) -> bool:
    """Return whether the call of a norm returns an ``UncomputedNorm``."""
    if x.dim() != 4 or is_compiled_here():
        return False
    return any(each is norm for each in getattr(_running, "norms", ())) and serves_triton(x, weight)


def rotated_norms(q: Any, k: Any, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return queries and keys, normed and rotated. None unless both are uncomputed norms with equal
    dtypes and options.
    """
    if not type(q) is type(k) is UncomputedNorm:
        return None
    of_q, of_k = q.uncomputed(), k.uncomputed()
    if of_q is None or of_k is None or _form(of_q) != _form(of_k):
        return None
    x, weight, eps, offset, dtype = of_q
    weights = weight, of_k.weight
    return normed_rotary(x, of_k.x, *weights, cos, sin, eps, offset=offset, norm_dtype=dtype)


def _form(norm: NormInputs) -> tuple[Any, ...]:
    x, weight, *how = norm
    return x.dtype, None if weight is None else weight.dtype, *how
