"""Define updates of TRL's trainers: a model, a batch of sequences, and the loss of a trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .lora_contenders import fill_adapters
from .lora_step import QWEN_CUT
from .models import MODELS, Model
from .sft_step import tiny_tokenizer

SPREAD = 0.6  # standard deviation of the logarithms of lengths
GROUP = 8  # completions of a prompt
TEXT = "<eos>"  # of a dataset that is never read


@dataclass(frozen=True)
class Update(Model):
    """A batch of TRL's: ``sequences`` rows, whose prompts and completions have these mean lengths.

    Attributes:
        trainer: "DPO" or "GRPO".
        prompt, completion: mean numbers of tokens; no completion has over four times as many.
        checkpointing: whether layers run again in the backward pass.
    """

    trainer: str = "DPO"
    prompt: int = 150
    completion: int = 300
    checkpointing: bool = False

    def build(self, device: torch.device | str = "cuda") -> Any:
        model = super().build(device)
        # the reference of DPO is TRL's copy of the adapters, which rounds otherwise in 16 bits: a
        # loss of differences would show that; while lora_B is zero, both have the same numbers
        if self.lora_rank is not None and self.trainer != "DPO":
            fill_adapters(model)
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        return model

    def batch(self, device: torch.device | str = "cuda") -> dict[str, Tensor]:
        """Return what the trainer's loss takes, and ``labels`` as other benchmarks count them."""
        generator = torch.Generator().manual_seed(0)
        sharing = 2 if self.trainer == "DPO" else GROUP
        prompts = self._lengths(self.prompt, self.sequences // sharing, generator)
        # pairs are in two halves, groups side by side
        many = prompts.repeat(2) if sharing == 2 else prompts.repeat_interleave(GROUP)
        completions = self._lengths(self.completion, self.sequences, generator)
        left, right = int(many.max()), int(completions.max())
        places = torch.arange(left + right) - left
        prompt = (places < 0) & (places >= -many[:, None])
        completion = (places >= 0) & (places < completions[:, None])
        # 0 is the padding's: Unsloth finds it by its id
        ids = torch.randint(1, self.config.vocab_size, prompt.shape, generator=generator)
        shared = ids[: len(prompts), :left]
        ids[:, :left] = shared.repeat(2, 1) if sharing == 2 else shared.repeat_interleave(GROUP, 0)
        if self.trainer == "DPO":  # padded on the right, behind prompt and completion
            order = (prompt | completion).int().argsort(dim=1, descending=True, stable=True)
            longest = int((many + completions).max())
            ids, prompt, completion = (
                of.gather(1, order)[:, :longest] for of in (ids, prompt, completion)
            )
        mask = prompt | completion
        found = {
            "input_ids": ids * mask,
            "attention_mask": mask.long(),
            "completion_mask": completion.long(),
            "advantages": torch.randn(self.sequences, generator=generator),
            "labels": ids.masked_fill(~completion, -100),
        }
        return {name: value.to(device) for name, value in found.items()}

    def _lengths(self, mean: int, count: int, generator: torch.Generator) -> Tensor:
        drawn = torch.randn(count, generator=generator) * SPREAD - SPREAD**2 / 2
        return (drawn.exp() * mean).clamp(8, 4 * mean).long()


def make_trainer(model: Any, update: Update, source: str, **flags: Any) -> Any:
    """Return the trainer of the module ``source``, with these options of its configuration."""
    from datasets import Dataset

    config = getattr(import_module(source), f"{update.trainer}Config")
    make = getattr(import_module(source), f"{update.trainer}Trainer")
    own: dict[str, Any] = {"per_device_train_batch_size": update.sequences}
    columns, more = ["prompt", "chosen", "rejected"], {}
    if update.trainer == "GRPO":
        own |= {"num_generations": GROUP, "max_completion_length": 4 * update.completion}
        columns, more = (
            ["prompt"],
            {"reward_funcs": lambda completions, **_: [0.0] * len(completions)},
        )
    args = config(
        output_dir=tempfile.mkdtemp(),
        gradient_accumulation_steps=1,  # of which Unsloth makes 2
        gradient_checkpointing=update.checkpointing,
        use_cpu=next(model.parameters()).device.type == "cpu",
        report_to=[],
        **own,
        **flags,
    )
    trainer = make(
        model,
        args=args,
        train_dataset=Dataset.from_dict({name: [TEXT] * update.sequences for name in columns}),
        processing_class=tiny_tokenizer(),
        **more,
    )
    trainer.current_gradient_accumulation_steps = 1  # as its training loop sets it
    return trainer


def dpo_loss(trainer: Any, batch: Mapping[str, Tensor]) -> Tensor:
    names = "input_ids", "attention_mask", "completion_mask"
    return trainer._compute_loss(trainer.model, {name: batch[name] for name in names}, False)


def grpo_loss(trainer: Any, batch: Mapping[str, Tensor]) -> Tensor:
    ids, mask, completion = (
        batch[name] for name in ("input_ids", "attention_mask", "completion_mask")
    )
    left = first_of_completions(batch)
    inputs = {
        "prompt_ids": ids[:, :left],
        "prompt_mask": mask[:, :left],
        "completion_ids": ids[:, left:],
        "completion_mask": mask[:, left:],
        "advantages": batch["advantages"],
        "num_items_in_batch": completion.sum(),
    }
    return trainer.compute_loss(trainer.model, inputs)


def first_of_completions(batch: Mapping[str, Tensor]) -> int:
    return int(batch["completion_mask"].any(0).int().argmax())


LLAMA = next(each for each in MODELS if each.name.startswith("Llama-3.2-1B"))


def _update(model: Model, name: str, rows: int, **how: Any) -> Update:
    short = model.name.partition(",")[0]
    checkpointing = " + checkpointing" if how.get("checkpointing") else ""
    return Update(f"{short}, {name}{checkpointing}", model.config, rows, lora_rank=16, **how)


DPO = {"trainer": "DPO", "prompt": 120, "completion": 250}
MATH = {"trainer": "GRPO", "prompt": 150, "completion": 300}
REASONING = {"trainer": "GRPO", "prompt": 150, "completion": 2500}
CONTEXT = {"trainer": "GRPO", "prompt": 3000, "completion": 300}
UPDATES = (
    _update(LLAMA, "DPO of 16 pairs, 120 + 250", 32, **DPO),
    _update(LLAMA, "DPO of 16 pairs, 120 + 250", 32, **DPO, checkpointing=True),
    _update(LLAMA, "GRPO of 32, 150 + 300", 32, **MATH),
    _update(LLAMA, "GRPO of 16, 150 + 2500", 16, **REASONING, checkpointing=True),
    _update(LLAMA, "GRPO of 16, 3000 + 300", 16, **CONTEXT, checkpointing=True),
    _update(QWEN_CUT, "DPO of 8 pairs, 120 + 250", 16, **DPO, checkpointing=True),
    _update(QWEN_CUT, "GRPO of 16, 150 + 300", 16, **MATH, checkpointing=True),
    _update(QWEN_CUT, "GRPO of 16, 150 + 2500", 16, **REASONING, checkpointing=True),
    _update(QWEN_CUT, "GRPO of 16, 3000 + 300", 16, **CONTEXT, checkpointing=True),
)
