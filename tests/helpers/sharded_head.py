"""The operators on a head whose vocabulary is distributed over ranks, for test_vocab_shard.

Run once for each process of the group. Exits with an error unless losses, log-probabilities and all
gradients obey the rule of ``three_ways`` and every rank has the same bits.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gloo_group import join, leave, record_collectives
from kernel_forms import INTERPRETED, speed_up_interpreter
from log_probs_ways import FIELDS, check_log_probs
from three_ways import DTYPES, LOW_DTYPES, OPTIONS, check_linear, chunk_mib, filled, linear_inputs
from torch import Tensor
from torch import distributed as dist

from liger_patch.kernels.head.inputs import MIB, VocabShard
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.linear_log_probs import linear_log_probs

device = torch.device("cpu")


def main(file: str, device_type: str, *checks: str) -> None:
    global device
    device = torch.device(device_type, 0) if device_type == "cuda" else device
    speed_up_interpreter()
    join(file, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))  # gloo: one GPU serves all
    for name in checks:
        print(f"check {name}", flush=True)
        globals()[f"check_{name}"]()
    leave()


class _Whole(torch.autograd.Function):
    """A tensor whose gradient is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        total = grad_output.clone()
        dist.all_reduce(total)
        return total


def on_kernels() -> bool:
    return device.type == "cuda" or INTERPRETED


def bounds(vocab_size: int) -> tuple[int, int]:
    """The classes of this rank, as PyTorch's DTensor distributes them."""
    size = -(-vocab_size // dist.get_world_size())
    start = min(dist.get_rank() * size, vocab_size)
    return start, min(start + size, vocab_size)


def sharded(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator of whole inputs, on this rank's rows of them."""

    def call(
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        bias: Tensor | None = None,
        low_rank: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> Any:
        start, stop = bounds(len(weight))

        def own(tensor: Tensor) -> Tensor:
            return _Whole.apply(tensor)[start:stop]  # pyright: ignore[reportOptionalSubscript]

        result = operator(
            hidden_states,
            own(weight),
            labels,
            bias=None if bias is None else own(bias),
            low_rank=None if low_rank is None else (low_rank[0], own(low_rank[1])),
            vocab_shard=VocabShard(None, len(weight)),
            **options,
        )
        for value in result if isinstance(result, tuple) else (result,):
            if value is not None:
                assert_same_bits(value)
        return result

    return call


def assert_same_bits(value: Tensor) -> None:
    value = value.detach().contiguous()
    others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(others, value)
    for other in others:
        torch.testing.assert_close(other, value, rtol=0, atol=0, equal_nan=True)


loss, log_probs = sharded(linear_cross_entropy), sharded(linear_log_probs)


def hold(inputs: dict[str, Tensor], labels: Tensor, **how: Any) -> None:
    gradients = check_linear(inputs, labels, operator=loss, **how)
    for name in ("hidden_states", "low_rank"):
        gradient = gradients.get(name)
        if gradient is not None:
            assert_same_bits(gradient)


def check_losses() -> None:
    """Every option, with a bias and an adapter, in several chunks: in every dtype on kernels, in
    float64 and another with PyTorch's operations.
    """
    tokens = 12 if device.type == "cuda" else 8  # eager sums the bias of 8 too exactly there
    for i, dtype in enumerate(DTYPES):
        rank = 0 if dtype.itemsize == 2 else 3
        shape = (dtype, device, tokens)
        inputs, labels = linear_inputs(*shape, bias=dtype != torch.float16, rank=rank)
        is_all = on_kernels() or dtype == torch.float64
        in_turn = slice(None) if is_all else slice(i, None, len(LOW_DTYPES))
        for options in [*OPTIONS.values()][in_turn]:
            few_rows = chunk_mib(3, 66, dtype)
            hold(inputs, labels, chunk_mib=few_rows, **filled(options, len(labels), 131, device))


def check_reductions() -> None:
    for dtype in (torch.float16, torch.float32):
        inputs, labels = linear_inputs(dtype, device, bias=True)
        some = torch.randn(len(labels), generator=torch.Generator().manual_seed(0)).to(device)
        for frozen in ((), ("hidden_states",), ("weight", "bias")):
            for reduction in ("none", "mean", "sum"):
                upstream = some if reduction == "none" else torch.tensor(-1.7, device=device)
                hold(inputs, labels, frozen=frozen, reduction=reduction, upstream=upstream)


def check_shapes() -> None:
    """Vocabularies that leave the last ranks with fewer rows, or none."""
    options = {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 1e-2}
    for shape in ((7, 37, 131), (9, 16, 5), (6, 3, 1), (5, 16, 1000)):
        inputs, labels = linear_inputs(torch.float32, device, *shape, bias=True)
        hold(inputs, labels)
        if shape[-1] > 1:  # of one class, eager's probability is exactly 1
            hold(inputs, labels, **options)
        check_log_probs(inputs, labels, operator=log_probs)


def check_no_label() -> None:
    inputs, labels = linear_inputs(torch.float32, device, bias=True)
    hold(inputs, torch.full_like(labels, -100))
    hold({**inputs, "hidden_states": inputs["hidden_states"][:0]}, labels[:0])


def check_log_probs_of_labels() -> None:
    generator = torch.Generator().manual_seed(1)
    bent = {"softcap": 5.0, "logit_scale": 0.5, "temperature": 0.7}
    low_dtypes = LOW_DTYPES if on_kernels() else (torch.bfloat16,)
    for dtype in (*low_dtypes, torch.float64):
        inputs, labels = linear_inputs(dtype, device, 7, bias=True)
        some = torch.randn(3, len(labels), generator=generator).to(device)
        all_three = dict(zip(("log_probs", "entropy", "lse"), some, strict=True))
        cases: list[tuple[Any, tuple[str, ...], dict[str, float]]] = [
            (None, (), {}),
            ({"log_probs": some[0]}, ("weight", "bias"), bent),
            (all_three, (), bent),
            ({"entropy": some[1]}, ("hidden_states",), {}),
        ]
        for upstream, frozen, options in cases:
            how: dict[str, Any] = {"upstream": upstream, "frozen": frozen, "outputs": FIELDS}
            check_log_probs(inputs, labels, operator=log_probs, **how, **options)
        weights = torch.arange(3.0, 10.0, device=device)
        clipped = {"log_probs": weights.masked_fill(weights == weights[labels != -100][0], 0.0)}
        check_log_probs(inputs, labels, operator=log_probs, upstream=clipped, row_weights=weights)


def check_ties() -> None:
    """Of equal largest logits, on one rank or on several, the first is the most likely class."""
    weight = torch.zeros(8, 2, device=device)
    labels = torch.arange(8, device=device)
    for equal in ([1, 2], [1, 6], [5, 6, 7], [3, 4]):
        weight.zero_()[equal] = 1.0
        result = log_probs(torch.ones_like(weight), weight, labels, outputs=["is_top1"])
        assert result.is_top1.nonzero().flatten().tolist() == equal[:1]


def check_backward_twice() -> None:
    inputs, labels = linear_inputs(torch.float32, device, bias=True)
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    result = loss(**leaves, labels=labels, chunk_mib=chunk_mib(3, 66, torch.float32))
    first = torch.autograd.grad(result, [*leaves.values()], retain_graph=True)
    second = torch.autograd.grad(result, [*leaves.values()])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def check_errors() -> None:
    """Every rank raises, before a collective. A rank alone that has other rows leaves the others
    waiting: each knows only of its own.
    """
    inputs, labels = linear_inputs(torch.float32, device)
    with pytest.raises(ValueError, match=r"labels must be in \[0, 131\)"):
        loss(**inputs, labels=labels.clamp(min=0) + 131)
    x, weight = inputs.values()
    for size, rows in ((9, 131), (131, 0), (131, bounds(131)[1] - bounds(131)[0] - 1)):
        with pytest.raises(ValueError, match=rf"rows on rank {dist.get_rank()}, .*got {rows}"):
            linear_cross_entropy(x, weight[:rows], labels, vocab_shard=VocabShard(None, size))
    with pytest.raises(ValueError, match="vocab_size must be a whole number >= 1, got 0"):
        VocabShard(None, 0)


def check_collectives() -> None:
    """Each chunk makes one gather of a few numbers a token, and one sum of its gradient."""
    tokens, hidden_size, vocab_size = 6, 16, 128
    inputs, labels = linear_inputs(
        torch.float32, device, tokens, hidden_size, vocab_size, ignored=0
    )
    start, stop = bounds(vocab_size)
    own = {**inputs, "weight": inputs["weight"][start:stop]}
    how: dict[str, Any] = {"vocab_shard": VocabShard(None, vocab_size)}
    how["chunk_mib"] = 3 * 64 * 4 / MIB  # rows of a multiple of 64: on a GPU none has padding
    leaves = {name: value.requires_grad_() for name, value in own.items()}
    ignored = torch.full_like(labels, -100)
    every: dict[str, Any] = {"softcap": 5.0, "z_loss": 1e-2, "label_smoothing": 0.1}
    of_shard = partial(linear_cross_entropy, **leaves, **how)
    of_labels = partial(linear_log_probs, **leaves, labels=labels, outputs=FIELDS, **how)
    cases = [  # and how many numbers of a token are gathered
        (lambda: of_shard(labels=labels), 3),
        (lambda: of_shard(labels=labels, **every), 5),
        (lambda: of_shard(labels=ignored), 0),
        (lambda: of_labels().log_probs.mean(), 7),
    ]
    for loss_of, numbers in cases:
        with record_collectives() as found:
            loss_of().backward()
        chunks = 2 if numbers else 0
        gather = _gathered(numbers * 3), torch.float32
        assert [each[1:] for each in found] == [gather, (3 * hidden_size, torch.float32)] * chunks
        assert all("gather" in each[0] for each in found[::2])
        assert all("reduce" in each[0] for each in found[1::2])
    with torch.no_grad(), record_collectives() as found:
        linear_cross_entropy(**own, labels=labels, **how)
    assert [each[1:] for each in found] == [(_gathered(3 * 3), torch.float32)] * 2


def _gathered(numbers: int) -> int:
    """The numbers in a gather's tensors: this rank's own, and those of all."""
    return numbers * (1 + dist.get_world_size())


if __name__ == "__main__":
    main(*sys.argv[1:])
