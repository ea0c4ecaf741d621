"""From the hidden states of a chunk of tokens to their losses and the gradient of their logits.

Where one kernel computes the odds of a chunk, the gradient is rows of odds times a factor each;
elsewhere a product writes the logits and the rows' kernel turns them into their gradient in place.
C: tokens of the chunk, N: of the batch, V: vocabulary.
"""

from typing import Protocol

from torch import Tensor

from liger_patch.kernels.backend import HAS_TRITON
from liger_patch.kernels.cross_entropy import cross_entropy_rows
from liger_patch.kernels.cross_entropy_pytorch import accumulation_dtype
from liger_patch.kernels.gradients import OddsFactors
from liger_patch.kernels.head_inputs import HeadInputs
from liger_patch.kernels.loss_options import LossOptions
from liger_patch.kernels.products import logits_
from liger_patch.kernels.supervised import Tokens


class Head(Protocol):
    """A head, prepared for the tokens of a batch, which run through it chunk by chunk.

    Attributes:
        counts_on_device: whether the device knows where the supervised tokens end, so that a chunk
            may run before the host does, and whether losses alone take no (C, V) memory.
        losses: (N,) of the supervised tokens that have run.
        odds: what makes the memory of a run the gradient of the logits; None where it is that.
    """

    counts_on_device: bool
    losses: Tensor

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
) -> Head:
    """The form that serves these inputs. Reads nothing from the device."""
    if HAS_TRITON:
        from liger_patch.kernels.odds_head import OddsHead, serves_odds

        if serves_odds(factors, options):
            return OddsHead(factors, tokens, options)
    return LogitsHead(factors, tokens, options)


class LogitsHead:
    """A product, then the rows' kernel."""

    counts_on_device = False
    odds: OddsFactors | None = None

    def __init__(self, factors: HeadInputs, tokens: Tokens, options: LossOptions) -> None:
        self._tokens, self._options = tokens, options
        x = factors.hidden_states
        self.losses = x.new_empty(len(x), dtype=accumulation_dtype(x.dtype))

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
        self.losses[chunk] = cross_entropy_rows(
            logits,
            self._tokens.labels[chunk],
            self._options,
            dlogits=None if row_scale is None else logits,
            row_scale=None if row_scale is None else row_scale[chunk],
        )
