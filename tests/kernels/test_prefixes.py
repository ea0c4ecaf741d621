"""Attention of sequences that continue a prefix: that over all their keys, in two parts."""

from __future__ import annotations

from itertools import accumulate

import plain_flash
import pytest
import torch
from exactness import assert_no_worse
from torch import Tensor

from liger_patch.kernels import prefixes, reference
from liger_patch.kernels.prefixes import prefix_attention
from liger_patch.kernels.segments import Prefixes, Segments

# of groups: tokens of the prefix, of the sequences that continue it; then those of other sequences
ROWS = {
    "a pair": ([(5, [3, 4])], []),
    "groups and others": ([(7, [1, 2, 9]), (1, [4, 1])], [6, 1]),
    "one sequence": ([(3, [2])], [1]),
}


def make_segments(
    groups: list[tuple[int, list[int]]], others: list[int], device: str = "cpu"
) -> Segments:
    def ends(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    of_prefixes = [prefix for prefix, _ in groups]
    of_groups = [sum(each) for _, each in groups]
    lengths = [*of_prefixes, *(n for _, each in groups for n in each), *others]
    cu_seqlens = ends(of_groups), ends(of_prefixes)
    longest = max(of_groups), max(of_prefixes)
    shared = Prefixes(sum(of_prefixes), sum(of_groups), cu_seqlens, longest)
    return Segments(ends(lengths), max(lengths), None, prefixes=shared)


def make_states(
    segments: Segments, heads: int, key_heads: int, size: int, device: str = "cpu"
) -> list[Tensor]:
    assert segments.cu_seqlens is not None
    torch.manual_seed(0)
    shape = 1, heads, int(segments.cu_seqlens[-1]), size
    states = [torch.randn(shape, device=device, dtype=torch.float64) for _ in range(3)]
    return [states[0], *(each[:, :key_heads].contiguous() for each in states[1:])]


def results(call, states: list[Tensor], segments: Segments, scale: float | None) -> dict:
    leaves = [each.detach().requires_grad_() for each in states]
    y = call(*leaves, segments, scale)
    torch.manual_seed(1)
    dy = torch.randn(y.shape, device=y.device, dtype=torch.float64).to(y.dtype)
    gradients = torch.autograd.grad(y, leaves, dy)
    return {"y": y, **dict(zip(("query", "key", "value"), gradients, strict=True))}


def test_the_reference_shows_a_prefix_to_its_group() -> None:
    segments = make_segments([(2, [1, 2])], [1])
    expected = torch.tensor(
        [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [1, 1, 0, 1, 0, 0],
            [1, 1, 0, 1, 1, 0],
            [0, 0, 0, 0, 0, 1],
        ]
    )
    assert torch.equal(reference.segment_mask(segments, 1, 6)[0], expected.bool())


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_two_parts_are_exact_in_float64(
    rows: tuple, key_heads: int, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flash_forward", "flash_backward"):
        monkeypatch.setattr(prefixes, name, getattr(plain_flash, name))
    segments = make_segments(*rows)
    states = make_states(segments, 4, key_heads, 8)
    found = results(prefix_attention, states, segments, scale)
    expected = results(reference.segment_attention, states, segments, scale)
    for name, true in expected.items():
        torch.testing.assert_close(found[name], true, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_two_flash_attentions_are_no_worse(key_heads: int, size: int, dtype: torch.dtype) -> None:
    segments = make_segments([(150, [70, 300, 1]), (17, [33, 129])], [200, 1], "cuda")
    states = make_states(segments, 8, key_heads, size, "cuda")
    low = [each.to(dtype) for each in states]
    ours = results(prefix_attention, low, segments, None)
    eager = results(reference.segment_attention, low, segments, None)
    truth = results(reference.segment_attention, [each.double() for each in low], segments, None)
    assert_no_worse(ours, eager, truth, dtype)
    assert torch.equal(ours["y"], results(prefix_attention, low, segments, None)["y"])
