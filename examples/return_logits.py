"""LIGER_PATCH_RETURN_LOGITS=1, read at every forward: ordinary logits and the ordinary loss.

Set it in the shell, as in `LIGER_PATCH_RETURN_LOGITS=1 python train.py`. Here it changes between
two calls of one patched model, to show that both ways give the same loss and the same gradients.
"""

import os

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from liger_patch import apply_patch

torch.manual_seed(0)
config = Gemma2Config(
    vocab_size=4096,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
model = apply_patch(Gemma2ForCausalLM(config))
tokens = torch.randint(config.vocab_size, (4, 64))

losses, gradients = {}, {}
for flag in ("0", "1"):
    os.environ["LIGER_PATCH_RETURN_LOGITS"] = flag
    outputs = model(input_ids=tokens, labels=tokens)
    model.zero_grad()
    outputs.loss.backward()
    losses[flag] = outputs.loss.detach()
    gradients[flag] = {name: weight.grad for name, weight in model.named_parameters()}
    logits = type(outputs.logits).__name__
    print(f"LIGER_PATCH_RETURN_LOGITS={flag}  loss {losses[flag]:.6f}  logits: a {logits}")

torch.testing.assert_close(losses["0"], losses["1"])
torch.testing.assert_close(gradients["0"], gradients["1"])
print("same loss, same gradients")
