"""The benchmark of layer kernels, but for its times: what it counts, checks, times and says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slow_cases import slow_but
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next import modeling_qwen3_next

from benchmarks import batches_of_calls, layer_cases, layer_kernels
from benchmarks.batches_of_calls import (
    BATCH_BYTES,
    FEWEST_CALLS,
    MOST_CALLS,
    MOST_QUEUEING_MS,
    Inputs,
    Slots,
    calls_of,
    copies,
    gradients_of,
    results_of,
)
from benchmarks.batches_of_calls import _of_a_call as of_a_call
from benchmarks.layer_cases import CASES, Case, Gate, Norm, Rotation
from benchmarks.layer_kernels import contenders, run_case
from benchmarks.measure import Failure, Measurement
from benchmarks.names import COPY

CACHE = 60 * 10**6  # bytes of L2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DIRECTIONS = ("forward", "backward")


def tiny(case: Case) -> Case:
    if isinstance(case, Norm):
        return replace(case, rows=6, hidden_size=24)
    if isinstance(case, Gate):
        return replace(case, tokens=5, size=24)
    turned = None if case.turned is None else 8
    return replace(case, batch=2, heads=3, key_heads=2, tokens=5, size=16, turned=turned)


TINY = [tiny(case) for case in CASES]
ids = [case.name for case in CASES]
OF_EACH_KIND = list({type(case): case for case in TINY}.values())
GATE = next(case for case in TINY if isinstance(case, Gate))


def raising(*_) -> Tensor:
    raise ValueError("the tensor is too long\nand a second line")


def size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", slow_but(OF_EACH_KIND, TINY), ids=ids)
def test_every_case_is_compared_with_eager_and_measured(
    case: Case, device: str, monkeypatch: pytest.MonkeyPatch
):
    # whatever else this machine does at the moment
    monkeypatch.setattr(batches_of_calls, "MOST_QUEUEING_MS", math.inf)
    functions = contenders(case)
    if device == "cpu":
        functions.pop("Liger-Kernel", None)
    rows = run_case(case, functions, rounds=1, device=device)
    assert [(row["direction"], row["contender"]) for row in rows] == [
        (direction, name) for direction in DIRECTIONS for name in (COPY, *functions)
    ]
    for row in rows:
        assert min(row["ms"], row["host_ms"], row["tb_per_s"], row["share"]) > 0
        required = case.forward_bytes() if row["direction"] == "forward" else case.backward_bytes()
        assert row["bytes"] == required
        assert row["tb_per_s"] == pytest.approx(required / row["ms"] * 1000 / 10**12)
        if row["contender"] == COPY:
            assert row["share"] == 1
        else:
            assert 0 < max(row["errors"]) < 0.01
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize("case", TINY, ids=ids)
def test_bytes_are_those_of_the_tensors_that_each_direction_needs(case: Case):
    """Forward: arguments, results and what is saved beside them; backward: what is saved, the
    upstream gradients and the gradients.
    """
    inputs = case.inputs("cpu").trainable()
    results = results_of(case.ours, inputs)
    node: Any = results[0].grad_fn
    assert all(result.grad_fn is node for result in results)
    saved = {tensor.data_ptr(): tensor for tensor in node.saved_tensors}
    arguments = [*inputs.leaves, *inputs.constants]
    needed = {each.data_ptr(): each for each in (*arguments, *results)} | saved
    assert size(*needed.values()) == case.forward_bytes()
    gradients = gradients_of(results, inputs)
    assert size(*saved.values(), *inputs.upstream, *gradients) == case.backward_bytes()


def test_cases_have_names_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_batch_moves_many_times_what_the_cache_holds(case: Case):
    for required in (case.forward_bytes(), case.backward_bytes()):
        assert calls_of(case.forward_bytes()) * required > 10 * CACHE


def test_a_batch_has_neither_few_calls_nor_thousands():
    assert calls_of(BATCH_BYTES // 8) == 8
    assert calls_of(BATCH_BYTES) == FEWEST_CALLS
    assert calls_of(8) == MOST_CALLS


@pytest.mark.parametrize("case", TINY, ids=ids)
def test_eager_is_what_transformers_computes(case: Case):
    inputs = case.inputs("cpu")
    if isinstance(case, Norm):
        module = (Gemma2RMSNorm if case.offset else LlamaRMSNorm)(case.hidden_size, eps=1e-6)
        module.weight.data = inputs.leaves[1]
        theirs = (module(inputs.leaves[0]),)
    elif isinstance(case, Gate):
        act_fn = ACT2FN["silu" if case.activation == "silu" else "gelu_pytorch_tanh"]
        gate, up = inputs.leaves
        theirs = (act_fn(gate) * up,)
    else:
        (q, k), (cos, sin), _ = inputs
        theirs = modeling_qwen3_next.apply_rotary_pos_emb(q, k, cos, sin)
    for own, their in zip(results_of(case.eager, inputs), theirs, strict=True):
        assert torch.equal(own, their)


def test_queries_and_keys_have_tokens_in_front_of_heads_in_memory():
    case = next(case for case in TINY if isinstance(case, Rotation))
    for each in (*case.inputs("cpu").leaves, *case.inputs("cpu").upstream):
        assert not each.is_contiguous()
        assert each.transpose(1, 2).is_contiguous()


def test_slots_are_equal_and_share_no_memory():
    case = next(case for case in TINY if isinstance(case, Rotation))
    inputs = case.inputs("cpu")
    slots = Slots(inputs, 3)
    tensors = [[each for group in slot for each in group] for slot in slots.inputs]
    for slot in tensors:
        for own, original in zip(slot, [each for group in inputs for each in group], strict=True):
            assert torch.equal(own, original)
            assert own.stride() == original.stride()
    flat = sorted((t.data_ptr(), size(t)) for slot in tensors for t in slot)
    assert all(a + length <= b for (a, length), (b, _) in pairwise(flat))
    assert all(leaf.is_leaf and leaf.requires_grad for s in slots.inputs for leaf in s.leaves)


def test_what_a_call_overwrites_is_restored_without_autograd_seeing_it():
    x, dy = torch.randn(2, 4, 3)
    slots = Slots(Inputs((x,), (), (dy,)), 2)
    results = results_of(lambda x: x.exp() * x, slots.inputs[0])
    (expected,) = gradients_of(results, slots.inputs[0])
    for slot in slots.inputs:
        for tensor in (*slot.leaves, *slot.upstream):
            tensor.data.zero_()
    slots.restore()
    for slot in slots.inputs:
        assert torch.equal(slot.leaves[0], x)
        assert torch.equal(slot.upstream[0], dy)
    assert torch.equal(gradients_of(results, slots.inputs[0])[0], expected)


class InPlace(torch.autograd.Function):
    """Gradients in the places of the arguments, as Liger-Kernel's gates have them."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return GATE.eager(gate, up)

    @staticmethod
    def backward(ctx, dy: Tensor):
        gate, up = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            gradients = torch.autograd.grad(GATE.eager(gate, up), (gate, up), dy)
        for place, gradient in zip(ctx.saved_tensors, gradients, strict=True):
            place.data.copy_(gradient)
        dy.data.zero_()
        return tuple(place.data for place in ctx.saved_tensors)


def test_a_contender_that_overwrites_its_arguments_spoils_no_other():
    functions = {"eager": GATE.eager, "in place": InPlace.apply, "liger_patch": GATE.ours}
    rows = run_case(GATE, functions, rounds=1, device="cpu")
    assert all(max(row["errors"]) < 0.01 for row in rows if row["contender"] != COPY)
    assert all(row["ms"] > 0 for row in rows)


def test_contenders_that_are_wrong_or_fail_are_reported_and_not_timed():
    def wrong(gate: Tensor, up: Tensor) -> Tensor:
        return 1.1 * GATE.eager(gate, up)

    def wrong_gradient(gate: Tensor, up: Tensor) -> Tensor:
        return GATE.eager(gate, up) + (up - up.detach())

    functions = {
        "eager": GATE.eager,
        "wrong": wrong,
        "wrong gradient": wrong_gradient,
        "wrong shape": lambda gate, up: GATE.eager(gate, up)[None],
        "raises": raising,
        "liger_patch": GATE.ours,
    }
    rows = run_case(GATE, functions, rounds=1, device="cpu")
    for direction in DIRECTIONS:
        of = {row["contender"]: row for row in rows if row["direction"] == direction}
        assert list(of) == [COPY, *functions]
        assert [name for name, row in of.items() if "ms" in row] == [COPY, "eager", "liger_patch"]
        assert of["wrong"]["wrong"] is of["wrong gradient"]["wrong"] is True
        assert of["wrong"]["errors"][0] == pytest.approx(0.1, rel=0.1)
        assert (max(of["wrong gradient"]["errors"]) < 0.01) is (direction == "forward")
        assert of["wrong shape"]["failure"].startswith("does not run: RuntimeError: the shape is")
        assert of["raises"]["failure"] == "does not run: ValueError: the tensor is too long"


def test_a_case_without_room_for_its_inputs_is_reported():
    huge = replace(GATE, tokens=2**56)
    rows = run_case(huge, contenders(huge), rounds=1, device="cpu")
    assert [(row["direction"], row["contender"]) for row in rows] == [(d, COPY) for d in DIRECTIONS]
    assert all(row["failure"].startswith("does not run: RuntimeError") for row in rows)


# by the signatures of liger_kernel.transformers.functional, 0.8.5
def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    assert (casting_mode, in_place) == (("gemma", False) if offset else ("llama", True))
    return Norm("", X[..., 0].numel(), len(W), offset).eager(X, W)


def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    return Rotation("", 1, 1, 1, 1, 1).eager(q, k, cos, sin)


LIGER = SimpleNamespace(
    liger_rms_norm=liger_rms_norm,
    liger_rope=liger_rope,
    liger_swiglu=lambda a, b: Gate("", 1, 1, "silu").eager(a, b),
    liger_geglu=lambda a, b: Gate("", 1, 1, "gelu_tanh").eager(a, b),
)


@pytest.mark.parametrize("case", TINY, ids=ids)
def test_liger_kernel_takes_part_where_it_is_installed(case: Case, monkeypatch: pytest.MonkeyPatch):
    installed = "Liger-Kernel" in contenders(case)
    assert installed is (find_spec("liger_kernel") is not None)
    monkeypatch.setattr(layer_kernels, "find_spec", lambda name: name == "liger_kernel")
    monkeypatch.setattr(layer_cases, "_liger", lambda: LIGER)
    assert list(contenders(case)) == ["eager", "Liger-Kernel", "liger_patch"]
    inputs = case.inputs("cpu")
    theirs = results_of(contenders(case)["Liger-Kernel"], inputs)
    for own, their in zip(results_of(case.eager, inputs), theirs, strict=True):
        assert torch.equal(own, their)


def test_a_copy_moves_as_many_bytes_as_are_asked_for():
    copied = copies(96, 3, "cpu")()
    assert isinstance(copied, list)
    assert [size(each) for each in copied] == [48, 48, 48]


def test_times_are_of_a_call_and_the_host_must_be_ahead():
    batch = Measurement(8.0, 4.0, 12.0, peak_mib=1.0, host_ms=MOST_QUEUEING_MS)
    assert of_a_call(batch, 4, waits=True) == replace(
        batch, ms=2.0, ms_low=1.0, ms_high=3.0, host_ms=MOST_QUEUEING_MS / 4
    )
    late = replace(batch, host_ms=MOST_QUEUEING_MS + 1)
    assert of_a_call(late, 4, waits=True) == Failure("not timed: it takes 16 ms to queue 4 calls")
    assert isinstance(of_a_call(late, 4, waits=False), Measurement)
    assert of_a_call(Failure("out of memory"), 4, waits=True) == Failure("out of memory")
