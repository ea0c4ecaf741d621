"""The form of a chunk's memory, logits or odds: what the loop asks of each, and gets."""

from typing import NamedTuple, Protocol

from torch import Tensor

from liger_patch.kernels.head.inputs import HeadInputs


class TokenStatistics(NamedTuple):
    """Of each token, (N,); None where not computed. All but ``is_top1`` in the dtype of losses."""

    entropy: Tensor
    lse: Tensor
    is_top1: Tensor  # bool
    mean_logits: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None

    def of(self, tokens: slice) -> "TokenStatistics":
        """Return the same of some of the tokens."""
        return TokenStatistics(*(None if each is None else each[tokens] for each in self))  # pyright: ignore[reportArgumentType]


class UpstreamGradients(NamedTuple):
    """Of each token's log_prob, entropy and lse, (N,); None for zero."""

    log_probs: Tensor | None
    entropy: Tensor | None
    lse: Tensor | None

    def of(self, tokens: slice) -> "UpstreamGradients":
        """Return the same of some of the tokens."""
        return UpstreamGradients(*(None if each is None else each[tokens] for each in self))


class OddsFactors(NamedTuple):
    """What turns the odds of some tokens into the gradient of their logits, (tokens,) each.

    The gradient is ``factors[:, None] * odds``. The odds of the labels are 0: there it is
    ``label_gradients``.
    """

    factors: Tensor  # float32
    labels: Tensor
    label_gradients: Tensor  # float32

    def of(self, tokens: slice) -> "OddsFactors":
        """Return the same of some of the tokens."""
        return OddsFactors(*(each[tokens] for each in self))


class HeadForm(Protocol):
    """Computes losses and gradients of chunks of tokens: ``logits.LogitsForm``,
    ``odds.RowOddsForm`` and ``hopper.OddsForm``. C: tokens of a chunk, N: of the batch, n: of
    them supervised, V: vocabulary.

    Attributes:
        counts_on_device: whether the kernels read on the device where the supervised tokens end.
            Then a chunk may run before the host knows their count, and losses without gradients
            take no (C, V) memory.
        losses: (N,) of the supervised tokens of the chunks so far; empty with upstream gradients.
        statistics: of the same tokens, None where not wanted.
    """

    counts_on_device: bool
    losses: Tensor
    statistics: TokenStatistics | None

    @property
    def odds(self) -> OddsFactors | None:
        """What turns the odds in the memory of a chunk into dlogits; None where these are there."""
        ...

    def run(
        self,
        operands: HeadInputs,  # of the C tokens
        start: int,
        *,
        memory: Tensor | None,  # (C, V), to be overwritten
        row_scale: Tensor | None,  # (N,), or (n,) once the count is read
    ) -> None:
        """Compute the losses of the C supervised tokens from ``start`` on.

        With ``row_scale``, memory then holds the gradient by the logits of the sum of
        ``row_scale * losses``, or its odds; with upstream gradients, theirs.
        """
