"""A distillation loss three ways on the same values, as ``three_ways`` has one of a single head.

N: tokens, H: hidden size of the student, the teacher's is larger; V: vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from three_ways import Results, _check, _orders, labels_in_order, linear_inputs
from torch import Tensor
from torch.nn.functional import linear

from liger_patch.kernels import reference
from liger_patch.kernels.backend import accumulation_dtype
from liger_patch.kernels.linear_distillation import linear_distillation

TEACHER_HIDDEN = 56
DIVERGENCES: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "reverse_kl": {"divergence": "reverse_kl"},
    "jsd": {"divergence": "jsd", "beta": 0.3},
    "jsd_0": {"divergence": "jsd", "beta": 0},
    "jsd_1": {"divergence": "jsd", "beta": 1.0},
    "tvd": {"divergence": "tvd"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 2.5, "ce_weight": 0.4},
    "cold": {"temperature": 0.5},
    "softcap": {"softcap": 5.0, "teacher_softcap": 8.0, "ce_weight": 0.4},
    "logit_scale": {"logit_scale": 0.3, "teacher_logit_scale": 0.5, "temperature": 0.7},
}


def heads(
    dtype: torch.dtype,
    device: torch.device,
    tokens: int = 12,
    vocab_size: int = 131,
    *,
    teacher_vocab: int | None = None,
    spread: float = 1.0,
    hidden_size: int = 40,
    **how: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Inputs of the student and of the teacher by name, and labels (N,), some ignored.

    ``spread``: of the teacher's logits.
    """
    inputs, labels = linear_inputs(dtype, device, tokens, hidden_size, vocab_size, **how)
    sizes = tokens, TEACHER_HIDDEN, teacher_vocab or vocab_size
    others, _ = linear_inputs(torch.float32, device, *sizes, bias="bias" in inputs)
    others["hidden_states"] = others["hidden_states"] * spread
    teacher = {f"teacher_{_short(name)}": value.to(dtype) for name, value in others.items()}
    student = {
        name if name == "bias" else f"student_{_short(name)}": v for name, v in inputs.items()
    }
    return student, teacher, labels


def near_heads(
    dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """A student that is nearly its teacher."""
    student, _, labels = heads(dtype, device, 24)
    student["student_hidden"] = student["student_hidden"] / 4  # no token is certain
    hidden_states = student["student_hidden"].double()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(hidden_states.shape, generator=generator, dtype=torch.float64)
    near = (hidden_states + 1.5e-2 * noise.to(device)).to(dtype)
    return student, {"teacher_hidden": near, "teacher_weight": student["student_weight"]}, labels


def _short(name: str) -> str:
    return "hidden" if name == "hidden_states" else name


def check_distillation(
    student: Mapping[str, Tensor],
    teacher: Mapping[str, Tensor],
    labels: Tensor | None,
    *,
    upstream: Tensor | None = None,
    frozen: tuple[str, ...] = (),
    chunk_mib: float | None = None,
    operator: Callable[..., Tensor] = linear_distillation,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> Results:
    """Hold ``linear_distillation`` to the rule; its loss and gradients are returned."""

    def ours(**x: Tensor) -> Tensor:
        return operator(**x, **teacher, labels=labels, chunk_mib=chunk_mib, **options)

    def eager(order: int, **x: Tensor) -> Tensor:
        return _eager(order, x, teacher, labels, options)

    def truth(**x: Tensor) -> Tensor:
        exact = {name: value.double() for name, value in teacher.items()}
        return _eager(0, x, exact, labels, options)

    return _check(ours, eager, truth, student, upstream, frozen, autocast=autocast)


def _eager(
    order: int,
    student: Mapping[str, Tensor],
    teacher: Mapping[str, Tensor],
    labels: Tensor | None,
    options: Mapping[str, Any],
) -> Tensor:
    """Whole logits, upcast to float32, in an order of rows, columns and common classes."""
    common = min(len(student["student_weight"]), len(teacher["teacher_weight"]))
    classes, rows = _orders(
        order, student["student_weight"].new_empty(common, len(student["student_hidden"]))
    )

    def logits(prefix: str, head: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        x, weight = head[f"{prefix}_hidden"][rows], head[f"{prefix}_weight"][:common][classes]
        columns = _orders(order, x)[1]
        bias = None if bias is None else bias[:common][classes]
        of_head = linear(x[:, columns], weight[:, columns], bias)
        return of_head.to(accumulation_dtype(of_head.dtype))

    of_student = logits("student", student, student.get("bias"))
    of_teacher = logits("teacher", teacher, teacher.get("teacher_bias"))
    options = dict(options)
    if options.get("token_weight") is not None:
        options["token_weight"] = options["token_weight"][rows]
    if labels is not None:
        labels = labels_in_order(labels, classes, options.pop("ignore_index", -100))[rows]
    return reference.distillation(of_student, of_teacher, labels, **options)
