"""Attention with more than the keys of its segment: with sinks it is a softmax over one more logit,
of which no value is taken; with a prefix it is that over all keys, in two parts.
"""

from functools import partial
from itertools import accumulate

import plain_flash
import pytest
import torch
import truths
from layer_checks import check
from torch import Tensor

from liger_patch.kernels import attention, reference
from liger_patch.kernels.attention import gradient_of_sinks, prefix_attention, sink_attention
from liger_patch.kernels.segments import Prefixes, Segments

SCALE = 0.3


def states(
    batch: int,
    tokens: int,
    heads: int,
    key_heads: int,
    size: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> dict[str, Tensor]:
    heads_of = {"query": heads, "key": key_heads, "value": key_heads}
    shapes = {name: (batch, number, tokens, size) for name, number in heads_of.items()}
    return {name: torch.randn(shape).to(device, dtype) for name, shape in shapes.items()}


def by_softmax(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, sees: Tensor) -> Tensor:
    """Return (B, T, H, D) of states (B, H, T, D), with the sinks as another logit."""
    key, value = (
        each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value)
    )
    scores = (query @ key.transpose(-1, -2) * SCALE).masked_fill(~sees, float("-inf"))
    column = sinks[:, None, None].expand(*scores.shape[:3], 1)
    shares = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return (shares @ value).transpose(1, 2)


def test_the_gradient_of_sinks_is_a_sum_over_rows():
    dy, y = torch.randn(2, 2, 7, 3, 4, dtype=torch.float64)
    lse, sinks = torch.randn(2, 7, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    rows = [gradient_of_sinks(*row, sinks) for row in zip(dy, y, lse, strict=True)]
    torch.testing.assert_close(gradient_of_sinks(dy, y, lse, sinks), rows[0] + rows[1])


def sink_segments(tokens: int, window: int | None, starts: list[int], device: str) -> Segments:
    """Of two rows whose sequences start there."""
    ends = [start + row * tokens for row in range(2) for start in starts] + [2 * tokens]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    return Segments(cu_seqlens, int(cu_seqlens.diff().max()), window)


@pytest.fixture
def _plain_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_forward", "flash_backward"):
        monkeypatch.setattr(attention, name, getattr(plain_flash, name))


@pytest.mark.usefixtures("_plain_flash")
@pytest.mark.parametrize("starts", [[0], [0, 3, 4]])
@pytest.mark.parametrize("groups", [1, 2])
def test_sinks_are_exact_in_float64(groups, starts):
    given = states(2, 7, 4, 4 // groups, 8) | {"sinks": torch.randn(4, dtype=torch.float64)}
    segments = sink_segments(7, None, starts, "cpu")
    sees = reference.segment_mask(segments, 2, 7)[:, None]
    ours = partial(sink_attention, segments=segments, scale=SCALE)
    check(ours, partial(by_softmax, sees=sees), given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("starts", [[0], [0, 30, 101]])
@pytest.mark.parametrize("groups", [1, 4])
def test_flash_attention_with_sinks_is_no_worse(groups, starts, window, dtype):
    tokens = 130
    given = states(2, tokens, 8, 8 // groups, 64, dtype, "cuda")
    given["sinks"] = torch.randn(8).to("cuda", dtype)
    segments = sink_segments(tokens, window, starts, "cuda")
    sees = reference.segment_mask(segments, 2, tokens, torch.device("cuda"))[:, None]
    if len(starts) == 1:  # flash attention takes rows of one sequence as they are
        segments = Segments(None, tokens, window)
    ours = partial(sink_attention, segments=segments, scale=SCALE)
    found = check(ours, partial(by_softmax, sees=sees), given)
    assert torch.equal(found["result 0"], ours(**given))


# of groups: tokens of the prefix, of the sequences that continue it; then those of other sequences
ROWS = {
    "a pair": ([(5, [3, 4])], []),
    "groups and others": ([(7, [1, 2, 9]), (1, [4, 1])], [6, 1]),
    "one sequence": ([(3, [2])], [1]),
}
BOTH = prefix_attention, truths.segment_attention


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


def test_the_reference_shows_a_prefix_to_its_group():
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


@pytest.mark.usefixtures("_plain_flash")
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_two_parts_are_exact_in_float64(rows, key_heads, scale):
    segments = make_segments(*rows)
    given = states(1, int(segments.cu_seqlens[-1]), 4, key_heads, 8)
    check(*(partial(each, segments=segments, scale=scale) for each in BOTH), given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_two_flash_attentions_are_no_worse(key_heads, size, dtype):
    segments = make_segments([(150, [70, 300, 1]), (17, [33, 129])], [200, 1], "cuda")
    given = states(1, int(segments.cu_seqlens[-1]), 8, key_heads, size, dtype, "cuda")
    ours, eager = (partial(each, segments=segments) for each in BOTH)
    found = check(ours, eager, given)
    assert torch.equal(found["result 0"], ours(**given))
