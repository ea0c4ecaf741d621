"""Find the longest row that fits in few steps, because a step of a long row takes a minute.

The peak memory of a step grows linearly with its row. So the first length that is tried is where
the line through two measured peaks meets the limit; the next ones are close to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

SHARE = 50  # of a row: what the search leaves open, 2 %


def width(tokens: int, step: int) -> int:
    """Return how close to ``tokens`` a search ends: a multiple of ``step``, about 2 %."""
    return max(step, tokens // SHARE // step * step)


def expected_longest(peaks: Mapping[int, float], room: float) -> int | None:
    """Return the tokens of which a step is expected to take all the room, None where unknown.

    Args:
        peaks: memory of the steps of some lengths.
        room: in the unit of the peaks.
    """
    lengths = sorted(peaks)
    if len(lengths) < 2:
        return None
    last = len(lengths) - 1
    i = next((i for i in range(1, last) if peaks[lengths[i]] > room), last)
    a, b = lengths[i - 1], lengths[i]
    growth = (peaks[b] - peaks[a]) / (b - a)
    return int(a + (room - peaks[a]) / growth) if growth > 0 else None


def candidates(
    fits: Callable[[int], bool],
    known: int,
    most: int,
    step: int,
    expected: Callable[[], int | None] = lambda: None,
) -> Iterator[int]:
    """Yield each length that is tried to find the longest that fits, a multiple of ``step``.

    Lengths double until one is expected. That one is tried, then longer or shorter ones in strides
    that double, until the longest is between two lengths; then their middle.

    Args:
        known: a length that fits, 0 for none.
        most: no longer row is tried.
        expected: returns the length that is expected, None as long as there is none.
    """
    top = most // step * step
    low, high = known // step * step, top + step  # fits, does not
    stride = 0  # > 0: to longer ones, < 0: to shorter ones
    is_guessed = False
    while high - low > width(high, step):
        guess = None if is_guessed else expected()
        if guess is not None:
            is_guessed = True
            tokens = min(max(guess // step * step, low + step), high - step)
        elif is_guessed:
            tokens = (low if stride > 0 else high) + stride
        else:
            tokens = max(step, 2 * low)
        if not low < tokens < high:
            is_open = high > top and tokens > low
            tokens = top if is_open else (low + high) // 2 // step * step
        is_fitting = fits(tokens)
        yield tokens
        low, high = (tokens, high) if is_fitting else (low, tokens)
        if is_guessed:
            near = width(tokens, step) * (1 if is_fitting else -1)
            stride = 2 * stride if stride * near > 0 else near
