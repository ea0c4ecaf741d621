"""From the hidden states of a chunk of tokens to their losses and the gradient of their logits.

Where one kernel computes the odds of a chunk, the gradient is rows of odds times a factor each;
elsewhere a product writes the logits and the rows' kernel turns them into their gradient in place.
C: tokens of the chunk, N: of the batch, V: vocabulary.
"""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from liger_patch.kernels.backend import HAS_TRITON
from liger_patch.kernels.cross_entropy import cross_entropy_rows
from liger_patch.kernels.head.gradients import OddsFactors
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.head.labels import Tokens
from liger_patch.kernels.head.options import LossOptions
from liger_patch.kernels.head.products import logits_
from liger_patch.kernels.head.pytorch import accumulation_dtype
from liger_patch.kernels.head.statistics import (
    TokenStatistics,
    UpstreamGradients,
    log_probs_gradient_rows_,
    token_statistics_rows,
)


class Head(Protocol):
    """A head, prepared for the tokens of a batch, which run through it chunk by chunk.

    Attributes:
        counts_on_device: whether the device knows where the supervised tokens end, so that a chunk
            may run before the host does, and whether losses alone take no (C, V) memory.
        losses: (N,) of the supervised tokens that have run.
        statistics: of the same tokens, None where not wanted.
        odds: what makes the memory of a run the gradient of the logits; None where it is that.
    """

    counts_on_device: bool
    losses: Tensor
    statistics: TokenStatistics | None

    @property
    def odds(self) -> OddsFactors | None: ...

    def run(
        self,
        factors: HeadInputs,  # of the C tokens
        start: int,
        *,
        memory: Tensor | None,  # (C, V), to be overwritten
        row_scale: Tensor | None,  # (N,), or (n,) where they are counted
    ) -> None:
        """Compute the losses of the C supervised tokens from ``start`` on.

        With ``row_scale``, memory then holds the gradient of the sum of ``row_scale * losses`` by
        the logits, or odds.
        """
        ...


def prepare_head(
    factors: HeadInputs,  # in the dtype of the products
    tokens: Tokens,
    options: LossOptions,
    statistics: Collection[str] = (),  # names of TokenStatistics
) -> Head:
    """The form that serves these inputs. Reads nothing from the device."""
    if HAS_TRITON:
        from liger_patch.kernels.head.hopper import OddsHead, serves_odds

        if serves_odds(factors, options, statistics):
            return OddsHead(factors, tokens, options, has_statistics=bool(statistics))
    return LogitsHead(factors, tokens, options, has_statistics=bool(statistics))


class LogitsHead:
    """A product, then the rows' kernels."""

    counts_on_device = False
    odds: OddsFactors | None = None

    def __init__(
        self,
        factors: HeadInputs,
        tokens: Tokens,
        options: LossOptions,
        *,
        has_statistics: bool = False,
    ) -> None:
        self._tokens, self._options = tokens, options
        x = factors.hidden_states
        dtype, count = accumulation_dtype(x.dtype), len(tokens.labels)
        self.losses = x.new_empty(count, dtype=dtype)
        self.statistics: TokenStatistics | None = None
        if has_statistics:
            entropy, lse, *others = x.new_empty(4, count, dtype=dtype)
            is_top1 = x.new_empty(count, dtype=torch.bool)
            self.statistics = TokenStatistics(entropy, lse, is_top1, *others)

    def run(
        self,
        factors: HeadInputs,
        start: int,
        *,
        memory: Tensor | None,
        row_scale: Tensor | None,
    ) -> None:
        assert memory is not None
        logits = logits_(memory, factors)
        chunk = slice(start, start + len(logits))
        labels = self._tokens.labels[chunk]
        if self.statistics is not None:
            token_statistics_rows(logits, labels, self._options, self.statistics.of(chunk))
        self.losses[chunk] = cross_entropy_rows(
            logits,
            labels,
            self._options,
            dlogits=None if row_scale is None else logits,
            row_scale=None if row_scale is None else row_scale[chunk],
        )


class UpstreamHead:
    """A product, then the gradient of its logits for upstream gradients of log_prob, entropy and
    lse. Computes no losses.
    """

    counts_on_device = False
    odds: OddsFactors | None = None

    def __init__(
        self,
        factors: HeadInputs,
        tokens: Tokens,
        options: LossOptions,
        upstream: UpstreamGradients,  # (n,)
    ) -> None:
        self._tokens, self._options, self._upstream = tokens, options, upstream
        self.losses = factors.hidden_states.new_empty(0)
        self.statistics: TokenStatistics | None = None

    def run(
        self,
        factors: HeadInputs,
        start: int,
        *,
        memory: Tensor | None,
        row_scale: Tensor | None,
    ) -> None:
        assert memory is not None
        logits = logits_(memory, factors)
        chunk = slice(start, start + len(logits))
        log_probs_gradient_rows_(
            logits,
            self._tokens.labels[chunk],
            self._options,
            UpstreamGradients(*(None if u is None else u[chunk] for u in self._upstream)),
        )
