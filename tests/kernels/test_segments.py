"""Attention of packed sequences and sliding windows: what a mask describes is read exactly, and
computed without the mask no worse than with it.
"""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import truths
from layer_checks import check
from slow_cases import each_pair
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from liger_patch.kernels import attention, reference, segments
from liger_patch.kernels.attention import segment_attention, serves_flash_attention
from liger_patch.kernels.segments import Segments, segments_of, segments_of_intervals

TOKENS = 24


def make_segments(
    lengths: list[list[int]], window: int | None = None, device: str = "cpu"
) -> Segments:
    """Of rows that hold sequences of these lengths, the same sum in each row."""
    flat = [0, *(length for row in lengths for length in row)]
    ends = torch.tensor(flat, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    longest = max(flat)
    is_packed = any(len(row) > 1 for row in lengths)
    return Segments(ends if is_packed else None, longest, window)


def mask_of(lengths: list[list[int]], window: int | None = None) -> Tensor:
    tokens = sum(lengths[0])
    return reference.segment_mask(make_segments(lengths, window), len(lengths), tokens)


def assert_same(found: Any, expected: Segments) -> None:
    torch.testing.assert_close(found[:3], expected[:3])  # but for padding


LENGTHS = {
    "one sequence": [[TOKENS]],
    "rows of one sequence": [[TOKENS]] * 3,
    "packed": [[5, 1, 18]],
    "packed rows": [[5, 1, 18], [24], [1, 22, 1]],
    "single tokens": [[1] * TOKENS],
}


def test_the_reference_is_a_causal_mask_within_each_sequence():
    expected = torch.block_diag(*(torch.ones(n, n).tril() for n in (2, 3, 1))).bool()
    torch.testing.assert_close(mask_of([[2, 3, 1]])[0], expected)
    windowed = expected & torch.ones(6, 6).triu(-1).bool()
    torch.testing.assert_close(mask_of([[2, 3, 1]], window=2)[0], windowed)


@each_pair(block_bytes=[1, 7 * TOKENS, 2**20], window=[None, 2, 7, 17], lengths=LENGTHS.values())
def test_segments_are_read_from_their_mask(lengths, window, block_bytes, monkeypatch):
    monkeypatch.setattr(segments, "BLOCK_BYTES", block_bytes)
    longest = max(length for row in lengths for length in row)
    window = None if window is None or window >= longest else window  # else it hides no key
    found = segments_of(mask_of(lengths, window), len(lengths))
    assert_same(found, make_segments(lengths, window))


def test_a_window_of_one_key_is_as_many_sequences():
    found = segments_of(mask_of([[TOKENS]], window=1), 1)
    assert_same(found, make_segments([[1] * TOKENS]))


@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("row", [[TOKENS], [5, 1, 18]])
def test_one_mask_of_all_rows(row, window, expanded):
    mask = mask_of([row], window)
    found = segments_of(mask.expand(3, -1, -1) if expanded else mask, 3)
    assert_same(found, make_segments([row] * 3, window))


def _without(mask: Tensor, query: int, key: int) -> Tensor:
    mask = mask.clone()
    mask[..., query, key] = ~mask[..., query, key]
    return mask


CAUSAL = mask_of([[TOKENS]] * 2)
OTHERS = {
    "nothing": torch.zeros(1, TOKENS, TOKENS, dtype=torch.bool),
    "bidirectional": torch.ones(1, TOKENS, TOKENS, dtype=torch.bool),
    "padded on the right": CAUSAL & (torch.arange(TOKENS) < 20),
    "padded on the left": CAUSAL & (torch.arange(TOKENS) >= 4),
    "a prefix that sees itself": CAUSAL | (torch.arange(TOKENS) < 5),
    "a hole": _without(CAUSAL, 20, 7),
    "a later key": _without(CAUSAL, 7, 20),
    "a window that ends too early": mask_of([[TOKENS]], 7) & ~torch.eye(TOKENS, dtype=torch.bool),
    "an attention sink": mask_of([[TOKENS]], 7) | (torch.arange(TOKENS) < 1) & CAUSAL[:1],
    "windows of two sizes": torch.cat([mask_of([[TOKENS]], 5), mask_of([[TOKENS]], 7)]),
    "a key of another sequence": _without(mask_of([[5, 19]]), 7, 2),
    "a sequence that looks back": mask_of([[5, 19]]) | _without(mask_of([[TOKENS]], 3), 0, 0),
}


@pytest.mark.parametrize("mask", OTHERS.values(), ids=OTHERS)
def test_any_other_mask_is_none(mask):
    assert segments_of(mask, len(mask)) is None


def test_no_token_is_none():
    assert segments_of(torch.ones(2, 0, 0, dtype=torch.bool), 2) is None


def padded(*rows: str, window: int | None = None) -> tuple[Tensor, Tensor]:
    """The causal mask of rows that begin with tokens "0" or end with tokens "0", padding; and which
    tokens are none.
    """
    kept = torch.tensor([[token == "1" for token in row] for row in rows])
    return mask_of([[TOKENS]] * len(rows), window) & kept[:, None], kept


ONES = "1" * TOKENS


@pytest.mark.parametrize("window", [None, 7])
def test_padding_on_the_right_whose_results_are_not_used(window):
    """It counts as the end of its sequence."""
    mask, kept = padded("1" * 20 + "0" * 4, ONES, window=window)
    assert segments_of(mask, 2) is None
    for used in (kept, torch.zeros_like(kept)):
        assert_same(segments_of(mask, 2, used), Segments(None, TOKENS, window))
    used = torch.zeros_like(kept)
    used[0, 20] = True
    assert segments_of(mask, 2, used) is None


@pytest.mark.parametrize("window", [None, 7])
def test_padding_on_the_left_whose_results_are_not_used(window):
    """It counts as a sequence of its own, and so does a row of nothing else."""
    mask, kept = padded(
        "0" * 4 + "1" * 20, "0" * TOKENS, "0" * 3 + "1" * 15 + "0" * 6, window=window
    )
    assert segments_of(mask, 3) is None
    found = segments_of(mask, 3, kept)
    assert found.cu_seqlens.diff().tolist() == [4, 20, 24, 3, 21]
    torch.testing.assert_close(reference.segment_mask(found, 3, TOKENS)[kept], mask[kept])
    assert segments_of(mask, 3, torch.ones_like(kept)) is None
    used = kept.clone()
    used[0, 3] = True
    assert segments_of(mask, 3, used) is None


def test_padding_between_sequences():
    """As in a packed row whose sequences are padded: it belongs to the sequence before it."""
    mask = mask_of([[8, 16]])
    kept = torch.ones(TOKENS, dtype=torch.bool)
    kept[5:8] = False
    mask &= kept
    assert segments_of(mask, 1) is None
    assert_same(segments_of(mask, 1, kept[None]), make_segments([[8, 16]]))


BEHIND_PADDING = {
    "padding on the left whose keys are seen": CAUSAL & (torch.arange(TOKENS) >= 4)[:, None],
    "a query that sees nothing": CAUSAL & (torch.arange(TOKENS) != 9)[:, None],
    "a sequence around padding": CAUSAL & (torch.arange(TOKENS) != 9),
}


@pytest.mark.parametrize("mask", BEHIND_PADDING.values(), ids=BEHIND_PADDING)
def test_no_sequence_goes_on_behind_padding(mask):
    used = mask.diagonal(dim1=1, dim2=2)
    assert segments_of(mask, len(mask), used) is None


@pytest.mark.parametrize("seed", range(20))
def test_every_random_mask_is_read_as_itself_or_not_at_all(seed):
    """Segments with one bit changed, mostly."""
    generator = torch.Generator().manual_seed(seed)
    cuts = (torch.rand(2, TOKENS, generator=generator) < 0.2).nonzero()
    rows = [sorted({0, TOKENS, *cuts[cuts[:, 0] == row, 1].tolist()}) for row in range(2)]
    lengths = [[b - a for a, b in itertools.pairwise(row)] for row in rows]
    mask = mask_of(lengths, window=[None, 3, 9][seed % 3])
    if seed % 4:
        query, key = torch.randint(TOKENS, (2,), generator=generator).tolist()
        mask = torch.cat([mask[:1], _without(mask[1:], query, key)])
    found = segments_of(mask, 2)
    if seed % 4 == 0:
        assert found is not None
    if found is not None:
        torch.testing.assert_close(reference.segment_mask(found, 2, TOKENS), mask)


@pytest.mark.parametrize("seed", range(40))
def test_pairs_say_what_the_mask_of_intervals_says(seed):
    """Of random intervals around each query, some with padding."""
    generator = torch.Generator().manual_seed(seed)
    cuts = (torch.rand(2, TOKENS, generator=generator) < 0.15).cumsum(-1)
    place, window = torch.arange(TOKENS), [None, 3, 9][seed % 3]
    mask = (cuts[:, :, None] == cuts[:, None]) & (place <= place[:, None])
    if window is not None:
        mask &= place > place[:, None] - window
    kept = torch.ones(2, TOKENS, dtype=torch.bool)
    if seed % 2:  # on one side, or anywhere
        start, stop = sorted(torch.randint(TOKENS, (2,), generator=generator).tolist())
        kept[0, stop:], kept[1, :start] = False, False
        if seed % 4 == 3:
            kept &= torch.rand(2, TOKENS, generator=generator) < 0.9
    if seed % 5 == 4:  # one query sees another interval
        row, query = seed % 2, int(torch.randint(TOKENS, (1,), generator=generator))
        low, high = torch.randint(TOKENS, (2,), generator=generator).tolist()
        mask[row, query] = (place >= min(low, query)) & (place <= max(high, query))
    mask &= kept[:, None]
    rows = torch.arange(2)[:, None]

    def sees(queries: Tensor, keys: Tensor) -> Tensor:
        return mask[rows, queries, keys]

    for used in (None, kept, torch.zeros_like(kept)):
        expected = segments_of(mask, 2, used)
        found = segments_of_intervals(sees, kept, 2, window, used)
        if expected is not None:
            assert_same(found, expected)
            assert found.has_padding == expected.has_padding
        elif found is not None:  # the queries of padding see other keys, and nobody uses them
            assert used is not None
            seen = reference.segment_mask(found, 2, TOKENS)
            torch.testing.assert_close((seen & kept[:, None])[kept], mask[kept])
        holds = torch.tensor(False)
        assert segments_of_intervals(sees, kept, 2, window, used, holds=holds) is None


def test_flash_attention_does_not_serve_a_cpu():
    states = [torch.randn(1, 2, 8, 64, dtype=torch.bfloat16)] * 3
    assert not serves_flash_attention(states[0], states[1], states[2])


GPU_CASES = {
    "window": ([[300]] * 2, 64),
    "packed": ([[37, 200, 63], [300]], None),
    "packed, window": ([[37, 200, 63], [300]], 48),
    "one sequence": ([[300]] * 2, None),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", [8, 64, 256])
@pytest.mark.parametrize(("lengths", "window"), GPU_CASES.values(), ids=GPU_CASES)
def test_no_worse_than_with_the_mask(lengths, window, features, dtype):
    rows, tokens = len(lengths), sum(lengths[0])
    found = make_segments(lengths, window, "cuda")
    mask = reference.segment_mask(found, rows, tokens, torch.device("cuda"))
    assert_same(segments_of(mask, rows), found)
    generator = torch.Generator().manual_seed(0)

    def states(heads: int) -> Tensor:
        x = torch.randn(rows, tokens, heads, features, generator=generator)
        return x.to("cuda", dtype).transpose(1, 2)

    inputs = {"query": states(4), "key": states(2), "value": states(2)}
    assert serves_flash_attention(*inputs.values())

    def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.dtype == torch.float64:
            return truths.segment_attention(query, key, value, found, 0.1)
        key, value = (each.repeat_interleave(2, 1) for each in (key, value))
        y = scaled_dot_product_attention(query, key, value, mask[:, None], scale=0.1)
        return y.transpose(1, 2)

    check(partial(segment_attention, segments=found, scale=0.1), eager, inputs)


@pytest.mark.gpu
def test_what_flash_attention_serves(monkeypatch):
    """16 bits of sizes that it has, where it is on, and so many numbers."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def serves(features: int = 64, dtype: torch.dtype = torch.bfloat16) -> bool:
        states = torch.randn(1, 2, 8, features, dtype=dtype, device="cuda")
        return serves_flash_attention(states, states, states)

    assert serves()
    assert not serves(dtype=torch.float32)
    assert not any(map(serves, (4, 20, 264)))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert not serves()
    for most in (1023, 1024):
        monkeypatch.setattr(attention, "MOST_NUMBERS", most)
        assert serves() == (most == 1024)


@pytest.mark.gpu
def test_reading_a_long_mask_takes_no_copy_of_it():
    tokens = 32768
    mask = torch.ones(1, tokens, tokens, dtype=torch.bool, device="cuda").tril()  # 1 GiB
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert_same(segments_of(mask, 1), Segments(None, tokens, None))
    assert torch.cuda.max_memory_allocated() - before < 1.5 * segments.BLOCK_BYTES
