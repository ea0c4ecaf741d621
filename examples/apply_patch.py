"""Patches one model and trains it as always. Offline, on a tiny random model, in seconds."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from liger_patch import apply_patch, patch_status

VOCAB_SIZE = 512

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config)  # or AutoModelForCausalLM.from_pretrained(...)

apply_patch(model)

counting = (torch.randint(VOCAB_SIZE, (256, 1)) + torch.arange(32)) % VOCAB_SIZE
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="outputs/apply_patch",
        max_steps=40,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in counting],
)
trainer.train()
print(patch_status(model))
