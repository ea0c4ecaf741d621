"""verl: log-probabilities and entropies of its fused heads by ``linear_log_probs``.

    export LIGER_PATCH_VERL=1
    python -m verl.trainer.main_ppo actor_rollout_ref.model.use_fused_kernels=True ...

verl finds this module by the entry point ``liger_patch`` in its group ``verl.plugins``. Without the
environment variable nothing changes. Interface: ``FusedLinearForPPO`` of verl 0.9.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_patch.kernels.linear_log_probs import linear_log_probs
from liger_patch.patch import flags


class FusedLinearForPPO(nn.Module):
    """Takes verl's arguments; ``chunk_size`` and ``impl_backend`` are not used."""

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()

    def forward(
        self,
        hidden_states: Tensor,  # (..., H)
        vocab_weights: Tensor,  # (V, H)
        input_ids: Tensor,  # (...)
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies (...) in float32."""
        result = linear_log_probs(
            hidden_states.flatten(0, -2),
            vocab_weights,
            input_ids.flatten().to(torch.int64),
            temperature=temperature,
            outputs=("entropy",),
            same_gradient=False,
        )
        assert result.entropy is not None
        return result.log_probs.view_as(input_ids), result.entropy.view_as(input_ids)


def register() -> None:
    """Put ``FusedLinearForPPO`` in the place of verl's, where LIGER_PATCH_VERL=1 asks for it."""
    if flags.verl():
        from verl.utils.experimental import torch_functional  # pyright: ignore[reportMissingImports]

        torch_functional.FusedLinearForPPO = FusedLinearForPPO


register()
