"""Classes without a row, as a repository with code of its own has them."""

from __future__ import annotations

from typing import Any

from tiny_models import LLAMA, tiny_model
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

NOTICE = "liger_patch has no test of .* they agree, and the loss is fused"


class Tomorrow(LlamaForCausalLM):
    """A class as a repository with code of its own has it: its loss is ``loss_of``."""

    def loss_of(self, logits: Any, labels: Tensor) -> Any:
        return self.loss_function(logits, labels, self.config.vocab_size)

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> Any:
        hidden_states = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.lm_head(hidden_states)
        computed = None if labels is None else self.loss_of(logits, labels)
        return CausalLMOutputWithPast(loss=computed, logits=logits)


class LooksAtTypes(Tomorrow):
    """A loss that is another one for deferred logits: nobody can promise that there is none."""

    def loss_of(self, logits: Any, labels: Tensor) -> Any:
        computed = super().loss_of(logits, labels)
        return computed if type(logits) is Tensor else 1.001 * computed


def make_model(cls: type[PreTrainedModel] = Tomorrow) -> Any:
    """Return a model of the class with the weights of a tiny Llama."""
    model = tiny_model(LLAMA)
    own = cls(model.config).to(model.dtype)
    own.load_state_dict(model.state_dict(), strict=False)
    return own.train()
