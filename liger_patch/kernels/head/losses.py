"""The loss of a head from its chunks: what ``linear_cross_entropy`` computes, as it is called and
as an operator. N: tokens, n: supervised tokens.
"""

from typing import Any

from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype
from liger_patch.kernels.head.chunked import ChunkConfig, run_chunks
from liger_patch.kernels.head.inputs import HeadInputs, Wanted
from liger_patch.kernels.head.labels import token_factors


def loss_factors(
    config: ChunkConfig, labels: Tensor, *, token_weight: Tensor | None, **how: Any
) -> Tensor:
    """Return (N,) the factors of the tokens' losses in the order of the compacted labels; ``how``:
    reduction and ``num_items_in_batch``.
    """
    dtype = accumulation_dtype(config.dtype)
    factors = token_factors(
        labels, config.labels, config.options, token_weight=token_weight, dtype=dtype, **how
    )
    if token_weight is None:
        return factors.contiguous()
    return factors.index_select(0, config.labels.rows)


def loss_and_gradients(
    config: ChunkConfig, inputs: HeadInputs, factors: Tensor, reduction: str
) -> tuple[Tensor, list[Tensor | None] | None]:
    """Return the loss, (N,) or (), and its gradients where the forward pass can compute them."""
    in_forward = config.has_gradients_in_forward(same_for_all=reduction != "none")
    result = run_chunks(config, inputs, factors, config.wanted if in_forward else Wanted())
    losses = result.losses * factors[: len(result.losses)]
    loss = config.labels.scatter(losses) if reduction == "none" else losses.sum()
    return loss, result.gradients if in_forward else None


def loss_gradients(
    config: ChunkConfig, inputs: HeadInputs, factors: Tensor, grad_output: Tensor
) -> list[Tensor | None]:
    """Compute the chunks again, with the upstream gradient (N,) or () in place."""
    labels = config.labels
    n = labels.read_count()
    upstream = labels.gather(grad_output) if grad_output.dim() else grad_output
    return run_chunks(config, inputs, factors[:n] * upstream, config.wanted).gradients
