"""Chunks: how the rows are divided, and that the division does not show in the result."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from three_ways import check_linear, chunk_mib, linear_inputs

from liger_patch.kernels.chunk_sizes import (
    NARROW_CHUNKS,
    ROW_MULTIPLE,
    chunk_bounds,
    chunks_of,
    rows_before_count,
    summed_chunk_rows,
)

repeatable = settings(derandomize=True, deadline=None, database=None)


@repeatable
@given(
    tokens=st.integers(0, 100_000),
    row_bytes=st.integers(1, 1_000_000),
    budget_bytes=st.integers(0, 2**30),
)
def test_few_chunks_cover_every_row_once_within_the_budget(tokens, row_bytes, budget_bytes):
    bounds = chunk_bounds(tokens, row_bytes, budget_bytes)
    edges = [0] + [stop for _, stop in bounds]
    assert [start for start, _ in bounds] == edges[:-1]
    assert edges[-1] == tokens
    sizes = [stop - start for start, stop in bounds]
    assert all(sizes)
    assert all(size == 1 or size * row_bytes <= budget_bytes for size in sizes)
    assert len(set(sizes[:-1])) <= 1  # equal, but for what is left at the end
    assert not sizes or sizes[-1] <= sizes[0]
    if budget_bytes >= ROW_MULTIPLE * row_bytes and len(sizes) > 1:
        assert sizes[0] % ROW_MULTIPLE == 0
    most = max(1, budget_bytes // row_bytes)
    whole = most if most < ROW_MULTIPLE else most - most % ROW_MULTIPLE
    assert len(sizes) <= -(-tokens // whole)


@repeatable
@given(tokens=st.integers(0, 100_000), rows=st.integers(1, 5000), n=st.integers(0, 100_000))
def test_a_chunk_before_the_count_only_where_chunks_are_few(tokens, rows, n):
    """And those after it are the chunks of all tokens, as far as they are needed."""
    within_budget = chunk_bounds(tokens, 1, rows)
    first, n = rows_before_count(tokens, 1, rows), min(n, tokens)
    if 0 < len(within_budget) <= NARROW_CHUNKS:
        assert chunks_of(first, tokens) == within_budget
        needed = [(start, min(stop, n)) for start, stop in within_budget if start < n]
        assert chunks_of(first, n) == needed
    else:
        assert first == 0


def test_sizes_are_equal_rather_than_full_and_a_rest():
    assert chunk_bounds(1100, 1, 1024) == [(0, 640), (640, 1100)]


@pytest.mark.parametrize("chunks", [1, 2, 4, 16, 64, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_error_of_dweight_does_not_grow_with_the_chunks(chunks, dtype):
    """Rounded to 16 bits after every chunk, dweight loses what each one adds (Liger #512, #827)."""
    tokens, vocab_size = 2048, 64
    inputs, labels = linear_inputs(
        dtype, torch.device("cpu"), tokens, 32, vocab_size, bias=True, ignored=0.0
    )
    check_linear(inputs, labels, chunk_mib=chunk_mib(tokens // chunks, vocab_size, dtype))


@repeatable
@given(tokens=st.integers(0, 100_000), rows=st.integers(1, 3000), wide=st.integers(0, 10**7))
def test_a_16_bit_sum_is_rounded_at_most_16_times(tokens, rows, wide):
    size, widened = summed_chunk_rows(tokens, 10, 10 * rows, wide)
    bounds = chunks_of(size, tokens)
    within_budget = chunk_bounds(tokens, 10, 10 * rows)
    if widened:
        assert bounds == within_budget
        assert len(bounds) > NARROW_CHUNKS
        assert 10 * tokens / NARROW_CHUNKS + 10 * ROW_MULTIPLE - 10 * rows > wide
    elif bounds != within_budget:
        assert len(bounds) <= NARROW_CHUNKS < len(within_budget)
        assert 10 * bounds[0][1] - 10 * rows <= wide
    else:
        assert len(bounds) <= NARROW_CHUNKS


def test_the_cheaper_way_to_fewer_roundings_is_taken():
    assert summed_chunk_rows(4096, 1, 128, 10_000) == (256, False)
    assert summed_chunk_rows(4096, 1, 128, 127) == (128, True)
