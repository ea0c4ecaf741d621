"""Odds of a head whose vocabulary is distributed over ranks, for test_vocab_shard: bf16 on Hopper,
float32 under Triton's interpreter, which multiplies no bf16.

Run once for each process of the group. Exits with an error as ``sharded_head`` does, or where no
odds were computed.
"""

from __future__ import annotations

import math
import os
import sys
from functools import partial
from typing import Any

import pytest
import sharded_head
import torch
from gloo_group import join, leave
from kernel_forms import patch_triton_once
from log_probs_ways import check_log_probs
from odds_cases import SERVED, STATISTICS, in_float32
from sharded_head import GATHER, assert_same_bits, bounds, collectives, hold, log_probs, loss
from three_ways import chunk_mib, eager_cross_entropy, filled, linear_inputs
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import linear

from liger_patch.kernels.head import odds_inputs
from liger_patch.kernels.head.sharded_odds import ShardedOddsForm
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.vocab_shard import VocabShard

device, dtype = torch.device("cpu"), torch.float32


def main(file: str, device_type: str, backend: str, *checks: str) -> None:
    global device, dtype
    rank = int(os.environ["RANK"])
    if device_type == "cuda":  # gloo: one GPU serves all
        device, dtype = torch.device("cuda", rank if backend == "nccl" else 0), torch.bfloat16
        sharded_head.device = device
    else:
        odds_inputs.suits_odds = lambda *_: True
    patch_triton_once()
    join(file, rank, int(os.environ["WORLD_SIZE"]), "cuda" if backend == "nccl" else "cpu")
    computed = []
    run = ShardedOddsForm.run

    def counted(self: ShardedOddsForm, *args: Any, **how: Any) -> None:
        computed.append(self)
        run(self, *args, **how)

    ShardedOddsForm.run = counted
    for name in checks:
        print(f"check {name}", flush=True)
        computed.clear()
        globals()[f"check_{name}"]()
        assert computed, name
    leave()


def rows_mib(rows: int, vocab_size: int = 131) -> float:
    """The budget that holds ``rows`` rows of the largest shard's odds."""
    return chunk_mib(rows, -(-vocab_size // dist.get_world_size()), dtype)


def check_options() -> None:
    inputs, labels = linear_inputs(dtype, device, 8)
    for options in SERVED.values():
        hold(inputs, labels, chunk_mib=rows_mib(3), **filled(options, len(labels), 131, device))


def check_adapters() -> None:
    for rank in (8, 24):
        inputs, labels = linear_inputs(dtype, device, 8, rank=rank)
        hold(inputs, labels, chunk_mib=rows_mib(3))
        options = filled(SERVED["everything"], len(labels), 131, device)
        hold(inputs, labels, frozen=("weight",), **options)


def check_reductions() -> None:
    inputs, labels = linear_inputs(dtype, device, 8)
    some = torch.randn(len(labels), generator=torch.Generator().manual_seed(0)).to(device)
    for frozen in ((), ("hidden_states",), ("weight",)):
        hold(inputs, labels, frozen=frozen, reduction="none", upstream=some)
        upstream = torch.tensor(-1.7, device=device)
        hold(inputs, labels, frozen=frozen, reduction="sum", upstream=upstream)


def check_shapes() -> None:
    """Vocabularies that leave the last ranks with fewer rows, or none; tiles of any number."""
    for shape in ((13, 40, 131), (9, 16, 5), (6, 8, 1), (2, 16, 1000), (13, 8, 300)):
        inputs, labels = linear_inputs(dtype, device, *shape, ignored=0.1)
        labels[0], labels[-1] = 0, shape[-1] - 1
        hold(inputs, labels)


def check_beyond_60_nats() -> None:
    """Odds that overflow on one rank are computed again on all of them."""
    inputs, labels = linear_inputs(dtype, device, 11, ignored=0.1)
    wild = {**inputs, "hidden_states": inputs["hidden_states"] * 100}
    for options in ({}, {"softcap": 200.0}, {"z_loss": 1e-3}):
        hold(wild, labels, chunk_mib=rows_mib(4), **options)
        assert loss(**wild, labels=labels, reduction="none", **options).max() > 60
    one = {**inputs, "hidden_states": inputs["hidden_states"].clone()}
    one["hidden_states"][4] *= -100
    labels[4] = 130
    losses = [loss(**each, labels=labels, reduction="none") for each in (inputs, one)]
    others = torch.arange(11, device=device) != 4
    assert losses[1][4] > 60
    assert torch.equal(losses[0][others], losses[1][others])


def check_nan_and_inf() -> None:
    for value in (math.nan, math.inf):
        inputs, labels = linear_inputs(dtype, device, 6, ignored=0.0)
        inputs["hidden_states"][2, 3] = value
        losses = loss(**inputs, labels=labels, reduction="none")
        eager = eager_cross_entropy(linear(*inputs.values()), labels, reduction="none")
        assert torch.equal(losses.isfinite(), eager.isfinite())
    inputs, labels = linear_inputs(dtype, device, 6, ignored=0.0)
    labels[2], inputs["hidden_states"] = 130, inputs["hidden_states"].abs()
    inputs["weight"][130] = -math.inf
    losses = loss(**inputs, labels=labels, reduction="none")
    assert losses.isposinf().equal(labels == 130)


def check_statistics() -> None:
    """Of bf16 inputs, see ``in_float32``."""
    operator = partial(in_float32, log_probs) if device.type == "cpu" else log_probs
    bf16 = torch.bfloat16
    budget = chunk_mib(3, -(-131 // dist.get_world_size()), bf16)
    how: dict[str, Any] = {"operator": operator, "outputs": STATISTICS}
    bent = {"softcap": 5.0, "temperature": 0.7}
    for rank, options in ((0, {}), (0, bent), (8, {"logit_scale": 0.5, "temperature": 1.6})):
        inputs, labels = linear_inputs(bf16, device, 8, rank=rank)
        check_log_probs(inputs, labels, chunk_mib=budget, **how, **options)
    inputs, labels = linear_inputs(bf16, device, 8, ignored=0.1)
    inputs["hidden_states"][::2] *= 100
    ours = check_log_probs(inputs, labels, chunk_mib=budget, **how)
    lowest = ours["log_probs"]
    assert lowest is not None
    assert lowest.min() < -60
    for shape in ((5, 8, 600), (3, 16, 5), (2, 8, 2)):
        inputs, labels = linear_inputs(bf16, device, *shape, ignored=0.0)
        check_log_probs(inputs, labels, **how)
    inputs, labels = linear_inputs(bf16, device, 8)
    upstream = {name: torch.arange(len(labels), device=device) - 3.0 for name in ("lse", "entropy")}
    check_log_probs(inputs, labels, upstream=upstream, **how)  # not from odds


def check_ties() -> None:
    """Of equal largest logits in several tiles or on several ranks, the first is top1."""
    weight = torch.zeros(700, 16, device=device, dtype=dtype)
    states = torch.ones(4, 16, device=device, dtype=dtype)
    second = -(-700 // dist.get_world_size())  # the second rank's first class
    neighbours = [(second - 1, second)] if second < 700 else []
    for equal in ((3, 200), (3, 200, 690), (5, 640), (360, 690), *neighbours):
        weight.zero_()[list(equal)] = 1.0
        labels = torch.tensor((*equal, *[20] * (4 - len(equal))), device=device)
        result = log_probs(states, weight, labels, outputs=["is_top1"])
        assert result.is_top1.tolist() == [True, False, False, False], equal


def check_no_label() -> None:
    inputs, labels = linear_inputs(dtype, device)
    hold(inputs, torch.full_like(labels, -100))
    hold({**inputs, "hidden_states": inputs["hidden_states"][:0]}, labels[:0])


def check_backward_twice() -> None:
    inputs, labels = linear_inputs(dtype, device, 20, ignored=0.4)
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    result = loss(**leaves, labels=labels, chunk_mib=rows_mib(7))
    first = torch.autograd.grad(result, [*leaves.values()], retain_graph=True)
    second = torch.autograd.grad(result, [*leaves.values()])
    assert all(map(torch.equal, first, second))


def check_memory_that_fits_no_descriptor() -> None:
    """Of one rank alone: every rank chooses the same form, or their collectives would not meet."""
    inputs, labels = linear_inputs(dtype, device, ignored=0.0)
    start, stop = bounds(131)
    own = {**inputs, "weight": inputs["weight"][start:stop].contiguous()}
    shard = VocabShard(None, 131)
    expected = linear_cross_entropy(**own, labels=labels, vocab_shard=shard)
    if dist.get_rank() == 0:
        own = {name: _unaligned(each) for name, each in own.items()}
    found = linear_cross_entropy(**own, labels=labels, vocab_shard=shard)
    assert_same_bits(found)
    assert torch.equal(found, expected)


def _unaligned(matrix: Tensor) -> Tensor:
    memory = matrix.new_empty(matrix.numel() + 1)[1:].view(matrix.shape)
    assert memory.data_ptr() % 16
    return memory.copy_(matrix)


def check_errors() -> None:
    """Every rank raises, when its collectives so far have met."""
    inputs, labels = linear_inputs(dtype, device, 6, ignored=0.0)
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    for label in (131, -1, 10**12):
        wrong = labels.clone()
        wrong[4] = label
        for class_weight in (None, torch.ones(131, device=device)):
            with pytest.raises(ValueError, match=rf"got {label} \(1 outside\)"):
                loss(**leaves, labels=wrong, class_weight=class_weight)
    hold(inputs, labels)


def check_collectives() -> None:
    """The labels' logits are summed; of a chunk, four numbers of each token, six with statistics,
    are gathered twice, and its gradient is summed.
    """
    tokens, hidden_size, vocab_size = 6, 16, 64
    inputs, labels = linear_inputs(dtype, device, tokens, hidden_size, vocab_size, ignored=0)
    start, stop = bounds(vocab_size)
    own = {**inputs, "weight": inputs["weight"][start:stop].contiguous()}
    how: dict[str, Any] = {"vocab_shard": VocabShard(None, vocab_size)}
    how["chunk_mib"] = rows_mib(3, vocab_size)
    of_labels = "all_reduce", 3 * 8 * 4  # six numbers, aligned
    gathers = [(GATHER, 4 * 3 * 4)] * 2
    summed = "all_reduce", 3 * hidden_size * 4
    with collectives() as found:
        linear_cross_entropy(**own, labels=labels, **how)
    assert found == [of_labels, *gathers, *gathers]
    leaves = {name: value.requires_grad_() for name, value in own.items()}
    with collectives() as found:
        linear_cross_entropy(**leaves, labels=labels, **how).backward()
    assert found == [of_labels, *gathers, summed, *gathers, summed]
    with collectives() as found:  # one chunk runs before the count of labels is read
        linear_cross_entropy(**leaves, labels=torch.full_like(labels, -100), **how).backward()
    assert found == [of_labels, *gathers]


if __name__ == "__main__":
    main(*sys.argv[1:])
