"""Distillation from a teacher of which the likeliest classes are known."""

import torch
from distillation_ways import heads
from slow_cases import each_pair
from three_ways import DTYPES, _check, chunk_mib, logits_in_order
from torch import Tensor
from torch.nn.functional import linear

from liger_patch.kernels.backend import accumulation_dtype
from liger_patch.kernels.linear_distillation import linear_distillation
from liger_patch.kernels.reference import scaled_and_capped

CPU = torch.device("cpu")
K = 7
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 2.5},
    "softcap": {"softcap": 5.0, "temperature": 0.7},
    "logit_scale": {"logit_scale": 0.3},
}


def likeliest(teacher: dict[str, Tensor], count: int = K, temperature: float = 1.0):
    """(N, K) log-probabilities in float32, and their classes."""
    logits = linear(teacher["teacher_hidden"].double(), teacher["teacher_weight"].double())
    values, indices = (logits / temperature).log_softmax(-1).topk(count)
    return {"teacher_log_probs": values.float(), "teacher_indices": indices}


def eager(
    order: int,
    x: dict[str, Tensor],
    top_k: dict[str, Tensor],
    labels: Tensor,
    tail: bool,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    logits, rows, classes = logits_in_order(order, x["student_hidden"], x["student_weight"])
    z = scaled_and_capped(logits.to(accumulation_dtype(logits.dtype)), logit_scale, softcap)
    places = classes.argsort()[top_k["teacher_indices"]][rows]
    s = (z / temperature).log_softmax(-1).gather(1, places)
    t = top_k["teacher_log_probs"].to(s.dtype)[rows]
    if tail:
        s, t = (torch.cat([each, _rest(each)], 1) for each in (s, t))
    losses = (t.exp() * (t - s)).sum(1) * (labels[rows] != -100)
    return losses.sum() / (labels != -100).sum()


def _rest(log_probs: Tensor) -> Tensor:
    return torch.log(-torch.expm1(log_probs.logsumexp(1, keepdim=True)))


@each_pair(tail=[True, False], options=OPTIONS.values(), dtype=DTYPES)
def test_every_option_in_every_dtype(options, tail, dtype, device):
    student, teacher, labels = heads(dtype, device, 7, spread=0.3)
    student["student_hidden"] = student["student_hidden"] / 4
    given = likeliest(teacher, temperature=options.get("temperature", 1.0))
    _check(
        lambda **x: linear_distillation(
            **x, **given, labels=labels, tail=tail, chunk_mib=chunk_mib(3, 131, dtype), **options
        ),
        lambda order, **x: eager(order, x, given, labels, tail, **options),
        lambda **x: eager(0, x, given, labels, tail, **options),
        student,
        None,
    )


def test_all_classes_are_the_whole_divergence():
    student, teacher, labels = heads(torch.float64, CPU)
    whole = linear_distillation(**student, **teacher, labels=labels)
    every = likeliest(teacher, 131)
    for tail in (True, False):
        part = linear_distillation(**student, **every, labels=labels, tail=tail)
        torch.testing.assert_close(part, whole, rtol=1e-6, atol=1e-6)  # of float32 log-probs


def test_classes_of_a_teacher_in_inference_mode(cpu_form):
    student, teacher, labels = heads(torch.float32, cpu_form, 5)
    with torch.inference_mode():
        given = likeliest(teacher)
    x = student["student_hidden"].requires_grad_()
    (gradient,) = torch.autograd.grad(linear_distillation(**student, **given, labels=labels), x)
    given = likeliest(teacher)
    (expected,) = torch.autograd.grad(linear_distillation(**student, **given, labels=labels), x)
    assert torch.equal(gradient, expected)


def test_class_without_probability_is_finite(cpu_form):
    student, teacher, labels = heads(torch.float32, cpu_form, 5)
    given = likeliest(teacher)
    given["teacher_log_probs"][:, 1:] = -torch.inf
    given["teacher_log_probs"][:, 0] = 0.0  # all of it: an empty tail
    student["student_hidden"].requires_grad_()
    loss = linear_distillation(**student, **given, labels=labels)
    (gradient,) = torch.autograd.grad(loss, student["student_hidden"])
    assert loss.isfinite()
    assert gradient.isfinite().all()
    expected = linear_distillation(**student, **given, labels=labels, tail=False)
    torch.testing.assert_close(loss, expected)
