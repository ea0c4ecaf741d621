"""Random shapes, dtypes, options, patterns of labels and budgets against float64.

Without float32: where a gradient is one number, which of two float32 results is nearer the truth is
luck. The 16-bit dtypes run the same float32 code, and float64 shows every error of the formula.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_forms import INTERPRETED
from three_ways import check_linear, check_logits, chunk_mib, filled

NARROW = [torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
repeatable = settings(derandomize=True, deadline=None, database=None)


@st.composite
def problems(draw, most_tokens, most_hidden, most_vocab, dtypes):
    """Inputs by name, and the other arguments of ``check_linear``."""
    tokens = draw(st.integers(0, most_tokens))
    hidden_size = draw(st.integers(1, most_hidden))
    vocab_size = draw(st.integers(2, most_vocab))
    dtype = draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    spread = draw(st.sampled_from([0.1, 1.0, 10.0]))
    inputs = {
        "hidden_states": torch.randn(tokens, hidden_size, generator=generator) * spread,
        "weight": torch.randn(vocab_size, hidden_size, generator=generator),
    }
    if draw(st.booleans()):
        inputs["bias"] = torch.randn(vocab_size, generator=generator)
    ignore_index = draw(st.sampled_from([-100, -1, 0, vocab_size - 1]))
    pattern = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    labels = torch.randint(vocab_size, (tokens,), generator=generator)
    labels[torch.tensor(pattern, dtype=torch.bool)] = ignore_index
    reduction = draw(st.sampled_from(["none", "mean", "sum"]))
    options = {
        "softcap": draw(st.sampled_from([None, 3.0, 30.0])),
        "logit_scale": draw(st.sampled_from([1.0, 0.1, -2.0])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "z_loss": draw(st.sampled_from([0.0, 1e-4, 0.1])),
        "class_weight": draw(st.sampled_from([None, True])),
        "token_weight": draw(st.sampled_from([None, True])),
    }
    if reduction == "mean":
        options["num_items_in_batch"] = draw(st.sampled_from([None, 1, 9, True]))
    upstream = torch.randn(tokens if reduction == "none" else (), generator=generator)
    return {name: value.to(dtype) for name, value in inputs.items()}, {
        "labels": labels,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "upstream": draw(st.sampled_from([None, upstream])),
        **filled(options, tokens, vocab_size, CPU),
    }


def run(problem, rows, frozen):
    inputs, arguments = problem
    dtype, vocab_size = inputs["weight"].dtype, len(inputs["weight"])
    check_linear(
        inputs,
        frozen=[name for name in inputs if name in frozen],
        chunk_mib=chunk_mib(rows, vocab_size, dtype),
        **arguments,
    )
    logits = torch.nn.functional.linear(*inputs.values())
    check_logits(logits, **arguments)


ROWS = st.sampled_from([5, 10, 20])
FROZEN = st.sets(st.sampled_from(["hidden_states", "weight", "bias"]))


@pytest.mark.skipif(INTERPRETED, reason="with TRITON_INTERPRET=1 the CPU runs Triton's interpreter")
@settings(repeatable, max_examples=250)
@given(problem=problems(20, 40, 300, [*NARROW, torch.float64]), rows=ROWS, frozen=FROZEN)
def test_any_problem_in_pytorch_form(problem, rows, frozen):
    run(problem, rows, frozen)


@pytest.mark.interpreter
@settings(repeatable, max_examples=25)
@given(problem=problems(6, 10, 80, NARROW), rows=ROWS, frozen=FROZEN)
def test_any_problem_in_triton_form(problem, rows, frozen):
    run(problem, rows, frozen)
