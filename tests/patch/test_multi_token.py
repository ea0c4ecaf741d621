"""Multi-token prediction: several losses of one head in one forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import assert_same_step, step
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from untested_classes import NOTICE

from liger_patch import apply_patch, patch_status

DEPTH = 3


class MultiToken(LlamaForCausalLM):
    """Predicts the next tokens one after another, as DeepSeek V3 does: layer k, from the states of
    layer k - 1 and the embedding of the token that they predict, the token behind that.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = 2 * config.hidden_size, config.hidden_size
        self.chain = nn.ModuleList(nn.Linear(*size, bias=False) for _ in range(DEPTH - 1))

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> Any:
        states = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.lm_head(states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size)
            for depth, layer in enumerate(self.chain, start=1):
                ids = shifted(input_ids, depth, 0)
                states = layer(torch.cat((states, self.model.embed_tokens(ids)), -1)).tanh()
                loss = loss + 0.3 * self.loss_function(
                    self.lm_head(states),
                    labels,
                    self.config.vocab_size,
                    shift_labels=shifted(labels, depth + 1, -100),
                )
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def shifted(ids: Tensor, by: int, value: int) -> Tensor:
    return nn.functional.pad(ids, (0, by), value=value)[..., by:].contiguous()


@pytest.mark.parametrize("tied", [False, True])
def test_losses_of_one_head_sum_into_its_gradient(tied: bool, reads: list[Any]) -> None:
    config = tiny_model().config
    config.tie_word_embeddings = tied
    model = MultiToken(config).double().train()
    batch = tiny_batch(model)
    eager = step(model, batch)
    with pytest.warns(UserWarning, match=NOTICE):
        step(apply_patch(model), batch)
    reads.clear()  # of the comparison
    ours = step(model, batch)
    status = patch_status(model)
    assert (status.fused, status.reason, reads) == (True, None, [])
    assert_same_step(ours, eager)
