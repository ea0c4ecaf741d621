"""The divergence of two heads and its gradients, held to the rule of ``exactness``."""

from itertools import product

import pytest
import torch
from distillation_ways import DIVERGENCES, OPTIONS, check_distillation, heads, near_heads
from exactness import assert_no_worse, assert_same_bits
from slow_cases import each_pair, slow_but
from three_ways import DTYPES, LOW_DTYPES, chunk_mib, results_and_gradients
from torch import Tensor
from torch.nn.functional import kl_div, linear, log_softmax
from trainers import LargestTensor

from liger_patch.kernels import reference
from liger_patch.kernels.head import divergences
from liger_patch.kernels.linear_distillation import linear_distillation

CPU = torch.device("cpu")


@each_pair(options=OPTIONS.values(), divergence=DIVERGENCES.values(), dtype=DTYPES)
def test_every_divergence_and_option_in_every_dtype(divergence, options, dtype, device):
    student, teacher, labels = heads(dtype, device, bias=True)
    budget = chunk_mib(5, 131, dtype)
    check_distillation(student, teacher, labels, chunk_mib=budget, **divergence, **options)


@pytest.mark.parametrize("vocab_size", [1, 2, 4099])
def test_any_number_of_blocks(vocab_size, cpu_form):
    student, teacher, _ = heads(torch.float32, cpu_form, 3, vocab_size)
    for how in DIVERGENCES.values():
        check_distillation(student, teacher, None, **how)


ALL = [*product(DIVERGENCES, LOW_DTYPES)]
FEW = [*zip(DIVERGENCES, LOW_DTYPES * 2, strict=True)]
every_divergence = pytest.mark.parametrize(
    ("name", "dtype"), slow_but(ALL, ALL, interpreted=FEW), ids=str
)


@every_divergence
def test_student_that_is_nearly_its_teacher(name, dtype, device):
    student, teacher, labels = near_heads(dtype, device)
    ours = check_distillation(student, teacher, labels, **DIVERGENCES[name])
    if name != "tvd":
        assert 1e-5 < ours["loss"].item() < 1e-3


@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
def test_float32_of_near_heads_keeps_four_digits(divergence, cpu_form):
    """Eager's difference of large numbers keeps three at most."""
    student, teacher, labels = near_heads(torch.float32, cpu_form)
    ours = linear_distillation(**student, **teacher, labels=labels, **divergence).double()
    exact = {name: value.double() for name, value in (student | teacher).items()}
    logits = linear(exact["student_hidden"], exact["student_weight"])
    of_teacher = linear(exact["teacher_hidden"], exact["teacher_weight"])
    truth = reference.distillation(logits, of_teacher, labels, **divergence)
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=0)


@every_divergence
def test_peaked_teacher(name, dtype, device):
    student, teacher, labels = heads(dtype, device, spread=8.0)
    check_distillation(student, teacher, labels, **DIVERGENCES[name])


@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
def test_no_divergence_of_equal_heads(divergence, cpu_form):
    student, _, labels = heads(torch.float32, cpu_form, 5)
    teacher = {name.replace("student", "teacher"): value for name, value in student.items()}
    result = results_and_gradients(
        lambda **x: linear_distillation(**x, **teacher, labels=labels, **divergence), student
    )
    assert not any(value is None or value.any() for value in result.values())


@pytest.mark.parametrize(
    "how",
    [
        {"reduction": "sum"},
        {"token_weight": torch.arange(12.0)},
        {"token_weight": torch.arange(12.0), "reduction": "sum", "ce_weight": 0.3},
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7), "token_weight": torch.arange(12.0)},
        {"ignore_index": 0},
    ],
    ids=str,
)
def test_every_reduction(how):
    for dtype in (torch.float32, torch.float64):
        student, teacher, labels = heads(dtype, CPU)
        labels = labels.masked_fill(labels == -100, how.get("ignore_index", -100))
        check_distillation(student, teacher, labels, **how)


@pytest.mark.parametrize("teacher_vocab", [100, 160])
@pytest.mark.parametrize("dtype", [torch.bfloat16, DTYPES[-1]], ids=str)
def test_vocabularies_of_different_size_have_their_first_classes_in_common(
    teacher_vocab, dtype, cpu_form
):
    sizes = {"teacher_vocab": teacher_vocab, "bias": True}
    student, teacher, labels = heads(dtype, cpu_form, 7, **sizes)
    labels = labels.clamp(max=99)
    budget = chunk_mib(5, 131, dtype)
    how = {"ce_weight": 0.5, "chunk_mib": budget}
    ours = check_distillation(student, teacher, labels, **how)
    assert not ours["student_weight"][100:].any() or teacher_vocab > 131


def test_no_tokens_give_zero_without_labels():
    student, teacher, _ = heads(torch.float32, CPU, 0)
    loss = linear_distillation(**student, **teacher)
    assert (loss.item(), loss.dtype) == (0.0, torch.float32)


def test_without_labels_every_token_counts():
    student, teacher, labels = heads(torch.float64, CPU)
    every = linear_distillation(**student, **teacher)
    assert every != linear_distillation(**student, **teacher, labels=labels)
    assert every == linear_distillation(**student, **teacher, labels=labels.clamp(min=0))
    assert every == linear_distillation(**student, **teacher, ignore_index=0)


def test_logits_of_minus_infinity_in_both_have_no_part(cpu_form):
    """As models mask the padding of a vocabulary."""
    student, teacher, labels = heads(torch.float32, cpu_form, 5, bias=True)
    labels = labels.clamp(max=99)
    for bias in (student["bias"], teacher["teacher_bias"]):
        bias[100:] = -torch.inf
    fewer = [
        {n: v[:100] if n.endswith(("weight", "bias")) else v for n, v in head.items()}
        for head in (student, teacher)
    ]
    for how in DIVERGENCES.values():
        ours = linear_distillation(**student, **teacher, labels=labels, **how)
        expected = linear_distillation(**fewer[0], **fewer[1], labels=labels, **how)
        torch.testing.assert_close(ours, expected)


@each_pair(
    trains=[True, False], name=["plain", "temperature", "softcap"], divergence=DIVERGENCES.values()
)
def test_entropies_of_the_student(divergence, name, trains, device):
    student, teacher, labels = heads(torch.float32, device, 9, bias=True)
    student["student_hidden"].requires_grad_(trains)
    ours = torch.full((9,), torch.nan, device=device)
    how = {**divergence, **OPTIONS[name], "chunk_mib": chunk_mib(5, 131, torch.float32)}
    linear_distillation(**student, **teacher, labels=labels, **how, entropy_out=ours)
    cap, temperature = OPTIONS[name].get("softcap"), OPTIONS[name].get("temperature", 1.0)

    def entropies(dtype: torch.dtype) -> Tensor:
        z = linear(*(each.detach().to(dtype) for each in student.values()))
        z = z if cap is None else cap * torch.tanh(z / cap)
        s = (z / temperature).log_softmax(-1)
        return -(s.exp() * s).sum(-1).masked_fill(labels == -100, 0)

    eager, truth = ({"entropies": entropies(d)} for d in (torch.float32, torch.float64))
    assert_no_worse({"entropies": ours}, eager, truth, torch.float32, eps=4)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # NumPy's, in the interpreter
@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
@pytest.mark.parametrize("of", ["student_hidden", "teacher_hidden"])
def test_nan_reaches_the_loss(divergence, of, cpu_form):
    student, teacher, _ = heads(torch.float32, cpu_form, 5)
    (student if of in student else teacher)[of][1, 1] = torch.nan
    assert linear_distillation(**student, **teacher, **divergence).isnan()


def test_teacher_has_no_gradient_and_none_is_computed_without_one_wanted():
    student, teacher, labels = heads(torch.float32, CPU)
    for value in teacher.values():
        value.requires_grad_()
    assert not linear_distillation(**student, **teacher, labels=labels).requires_grad
    student["student_hidden"].requires_grad_()
    linear_distillation(**student, **teacher, labels=labels).backward()
    assert all(value.grad is None for value in teacher.values())
    with torch.no_grad():
        assert not linear_distillation(**student, **teacher, labels=labels).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_that_of_linear(dtype):
    student, teacher, labels = heads(torch.float32, CPU, bias=True)
    student["student_weight"] = student["student_weight"].to(torch.bfloat16)
    ours = check_distillation(student, teacher, labels, autocast=dtype)
    assert all(ours[name].dtype == value.dtype for name, value in student.items())


@pytest.mark.parametrize("teacher_dtype", [torch.bfloat16, torch.float64], ids=str)
def test_teacher_of_another_dtype(teacher_dtype):
    student, teacher, labels = heads(torch.float32, CPU)
    teacher = {name: value.to(teacher_dtype) for name, value in teacher.items()}
    check_distillation(student, teacher, labels)


def test_adapters_on_both_heads_are_added_to_their_logits():
    student, teacher, labels = heads(torch.float64, CPU)
    pairs = [(torch.randn(12, 3).double(), torch.randn(131, 3).double()) for _ in range(2)]
    ours = linear_distillation(
        **student, **teacher, labels=labels, low_rank=pairs[0], teacher_low_rank=pairs[1]
    )
    logits = linear(student["student_hidden"], student["student_weight"]) + linear(*pairs[0])
    others = linear(teacher["teacher_hidden"], teacher["teacher_weight"]) + linear(*pairs[1])
    torch.testing.assert_close(ours, reference.distillation(logits, others, labels))


def test_rows_are_taken_a_few_at_a_time(monkeypatch, record):
    monkeypatch.setattr("liger_patch.kernels.head.row_sums.SCRATCH_BYTES", 12 * 131 * 4 * 5)
    student, teacher, labels = heads(torch.float32, CPU, 17)
    blocks = record(divergences, "_block", lambda x, *_: len(x))
    check_distillation(student, teacher, labels)
    assert max(blocks) == 5


def test_no_tensor_is_as_large_as_the_logits():
    student, teacher, _ = heads(torch.float32, CPU, 200, hidden_size=8)
    leaves = {name: value.requires_grad_() for name, value in student.items()}
    budget = chunk_mib(50, 131, torch.float32)
    with LargestTensor() as largest:
        linear_distillation(**leaves, **teacher, chunk_mib=budget).backward()
    assert 50 * 131 <= largest.elements < 200 * 131 // 2


@pytest.mark.gpu
@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
def test_real_shape(divergence):
    student, teacher, labels = heads(
        torch.bfloat16, torch.device("cuda"), 1000, 128256, hidden_size=2048
    )
    how = {"chunk_mib": 100, "ce_weight": 0.1, **divergence}
    first, again = (check_distillation(student, teacher, labels, **how) for _ in range(2))
    assert_same_bits(first, again)


def test_reference_is_torch_kl_div():
    student, teacher, _ = heads(torch.float64, CPU)
    z = linear(student["student_hidden"], student["student_weight"])
    t = linear(teacher["teacher_hidden"], teacher["teacher_weight"])
    s, t = log_softmax(z, -1), log_softmax(t, -1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return kl_div(b, a, reduction="batchmean", log_target=True)

    m = (0.3 * t.exp() + 0.7 * s.exp()).log()
    expected = {
        "forward_kl": kl(t, s),
        "reverse_kl": kl(s, t),
        "jsd": 0.3 * kl(t, m) + 0.7 * kl(s, m),
        "jsd_0": kl(t, s),
        "jsd_1": kl(s, t),
        "tvd": (s.exp() - t.exp()).abs().sum(-1).mean() / 2,
    }
    assert expected.keys() == DIVERGENCES.keys()
    for name, how in DIVERGENCES.items():
        torch.testing.assert_close(reference.distillation(z, t, **how), expected[name])
