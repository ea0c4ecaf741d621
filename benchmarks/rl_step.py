"""Measure updates of TRL's DPOTrainer and GRPOTrainer, with TRL's own head and with our flag.

    python -m benchmarks rl_step
    python -m benchmarks rl_step --model DPO

Loss and metrics are TRL's; a DPO update computes its reference too, the model without adapters.
Rows are padded as TRL pads them: DPO's to the longest of the batch, GRPO's prompts on the left and
completions to the longest. Lengths are log-normal. "padded" is our flag with the padding left in
the batch, "prompts repeated" without it, but with the prompt of a pair or group before each of its
completions. Tokens are those that the model's layers compute in one pass. Measured and checked as
``training_step.py`` does it: forward and backward of LoRA adapters on all layers, no optimizer, no
generation.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from .benchmark import Benchmark
from .lora_step import QWEN_CUT
from .model_contenders import Loss, shared_copy
from .models import MODELS, Model
from .sft_step import tiny_tokenizer
from .terminal import terminal_steps_table
from .training_step import run_model

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
        ids = torch.randint(self.config.vocab_size, prompt.shape, generator=generator)
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


def contenders(
    model: nn.Module, *, update: Update, tokens: dict[str, int], **_: Any
) -> dict[str, Callable[[], Loss]]:
    """Return functions that make the contenders, by name. All share the weights of ``model``.

    Args:
        tokens: gets what each contender's layers compute in one pass, by name.
    """
    names: dict[str, dict[str, float]] = {  # our constants that leave tokens out
        "TRL": {},
        "liger_patch, padded": {"LEAST_SAVED": 1.0},
        "liger_patch, prompts repeated": {"MOST_ROWS": 0},
        "liger_patch": {},
    }
    return {
        name: partial(_loss, model, update, name, constants, tokens)
        for name, constants in names.items()
    }


def _loss(
    model: nn.Module,
    update: Update,
    name: str,
    constants: dict[str, float],
    tokens: dict[str, int],
) -> Loss:
    trainer = _trainer(shared_copy(model), update, on_kernels=name != "TRL")
    compute = _dpo_loss if update.trainer == "DPO" else partial(_grpo_loss, prompt=update)

    def loss(batch: Mapping[str, Tensor]) -> Tensor:
        with _changed(constants), _counted(trainer.model, name, tokens):
            return compute(trainer, batch)

    return loss


@contextmanager
def _changed(constants: dict[str, float]) -> Iterator[None]:
    from liger_patch.layers import unpadded

    with ExitStack() as stack:
        for name, value in constants.items():
            stack.enter_context(mock.patch.object(unpadded, name, value))
        yield


@contextmanager
def _counted(model: Any, name: str, tokens: dict[str, int]) -> Iterator[None]:
    """Count the tokens of a contender's first call: later ones are timed."""
    if name in tokens:
        yield
        return

    def count(_: nn.Module, arguments: tuple[Tensor]) -> None:
        tokens[name] = arguments[0].numel()

    count.__module__ = "torch.nn"  # a hook of a user's keeps the padding
    hook = model.get_input_embeddings().register_forward_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _trainer(model: Any, update: Update, on_kernels: bool) -> Any:
    from datasets import Dataset

    from liger_patch.integrations import trl_trainers

    config = getattr(trl_trainers, f"{update.trainer}Config")
    make = getattr(trl_trainers, f"{update.trainer}Trainer")
    own: dict[str, Any] = {"per_device_train_batch_size": update.sequences}
    columns, more = ["prompt", "chosen", "rejected"], {}
    if update.trainer == "GRPO":
        own |= {"num_generations": GROUP, "max_completion_length": 4 * update.completion}
        columns, more = (
            ["prompt"],
            {"reward_funcs": lambda completions, **_: [0.0] * len(completions)},
        )
    args = config(
        tempfile.mkdtemp(),
        use_liger_patch=on_kernels,
        gradient_checkpointing=update.checkpointing,
        bf16=False,  # the weights are in bf16 already
        use_cpu=next(model.parameters()).device.type == "cpu",
        report_to=[],
        **own,
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


def _dpo_loss(trainer: Any, batch: Mapping[str, Tensor]) -> Tensor:
    names = "input_ids", "attention_mask", "completion_mask"
    return trainer._compute_loss(trainer.model, {name: batch[name] for name in names}, False)


def _grpo_loss(trainer: Any, batch: Mapping[str, Tensor], prompt: Update) -> Tensor:
    ids, mask, completion = (
        batch[name] for name in ("input_ids", "attention_mask", "completion_mask")
    )
    left = int(completion.any(0).int().argmax())  # where completions begin
    inputs = {
        "prompt_ids": ids[:, :left],
        "prompt_mask": mask[:, :left],
        "completion_ids": ids[:, left:],
        "completion_mask": mask[:, left:],
        "advantages": batch["advantages"],
        "num_items_in_batch": completion.sum(),
    }
    return trainer._compute_loss(trainer.model, inputs)


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


def _rows(update: Update, rounds: int, device: str = "cuda") -> list[dict]:
    tokens: dict[str, int] = {}
    of = partial(contenders, update=update, tokens=tokens)
    rows = run_model(update, rounds=rounds, device=device, of=of)
    found = ((row, tokens.get(row["contender"])) for row in rows)
    return [row if count is None else {**row, "tokens": count} for row, count in found]


def _cases(options: argparse.Namespace) -> Any:
    chosen = [each for each in UPDATES if any(part in each.name for part in options.model or [""])]
    return {"rl_steps": [partial(_rows, each, options.rounds) for each in chosen]}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", action="append", help="only the rows whose name contains this, or another"
    )


BENCHMARK = Benchmark(
    packages=("transformers", "trl", "peft"),
    cases=_cases,
    table=terminal_steps_table,
    rounds=8,
    add_options=_add_options,
)
