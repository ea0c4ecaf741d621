"""Tiny models and trainers as TRL makes them, and the numbers that they give.

Where TRL is not installed, importing this skips the test file that imports it.

Whole trainings are compared in float64: there ours differs from TRL's own by rounding alone, and is
held to the eps of float32. How far a training in float32 or bfloat16 may be off is how far TRL's
own is, from that truth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from tiny_models import tiny_model
from tiny_text import (
    conversations,
    judgements,
    preferences,
    prompts_and_completions,
    tiny_tokenizer,
)
from trainers import QUIET
from training_step import Step, in_float64, widened
from transformers import PreTrainedModel

if find_spec("trl") is None:  # its trainers take seconds to import: not before a test runs
    pytest.skip("trl is not installed", allow_module_level=True)

MARKS = [
    pytest.mark.filterwarnings(
        # Transformers 5.23 has renamed what TRL passes.
        "ignore:.(compute_loss_func|label_smoothing_factor). is deprecated:FutureWarning"
    )
]

LEFT_TO_TRL = "liger_patch leaves the head to TRL"
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # of TRL's head
TIMES = ("runtime", "_per_second", "step_time")  # what a log has of the clock
DEFAULTS: dict[str, Any] = {  # plain SGD without clipping: a loss that is scaled trains otherwise
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 8,
    "learning_rate": 0.02,
    "optim": "sgd",
    "max_grad_norm": 0.0,
    **QUIET,
    # TRL switches both on
    "bf16": False,
    "gradient_checkpointing": False,
}


def apply_trl_patch(model: Any, **options: Any) -> Any:
    from liger_patch.integrations.trl import apply_trl_patch

    return apply_trl_patch(model, **options)


def with_head(
    model: PreTrainedModel, outputs: tuple[str, ...] = OUTPUTS, **options: Any
) -> PreTrainedModel:
    """The model as TRL's trainers make it."""
    from trl.trainer.utils import add_fused_lm_head

    config = model.config.get_text_config()
    if hasattr(config, "output_router_logits"):  # the auxiliary loss joins the loss
        config.output_router_logits = True
        config.router_aux_loss_coef = 0.5
    add_fused_lm_head(model, outputs=outputs, **options)
    return model


def with_head_changed(change: Callable[[Any], None]) -> PreTrainedModel:
    model = tiny_model(dtype=torch.float32)
    change(model.lm_head)
    return with_head(model, ("log_probs", "entropy", "is_top1"))


def trainer_of(
    kind: str, folder: Path, flag: bool | None, samples: Any, named: dict[str, Any], **how: Any
) -> Any:
    """Of this package with the flag on or off; of TRL, and with its configuration, for None.

    Args:
        named: arguments of the trainer beside these samples; None for one that it does not take.
        how: those of its configuration.
    """
    from liger_patch.integrations import trl, trl_trainers

    ours: Any = trl if kind == "SFT" else trl_trainers
    trls = import_module("trl" if kind == "SFT" else trl_trainers.TRAINERS[kind][0])
    if flag is not None:
        how["use_liger_patch"] = flag
    module = trls if flag is None else ours
    defaults = {"eval_dataset": samples, "processing_class": tiny_tokenizer()}
    return getattr(module, f"{kind}Trainer")(
        args=getattr(module, f"{kind}Config")(str(folder), **{**DEFAULTS, **how}),
        train_dataset=samples,
        **{name: value for name, value in (defaults | named).items() if value is not None},
    )


def sft_trainer(
    model: Any,
    folder: Path,
    patch: bool | None = None,
    *,
    data: Callable[[], Any] = prompts_and_completions,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    named = {"model": model, **(options or {})}
    return trainer_of("SFT", folder, patch, data(), named, **arguments)


def prompts(column: str | None = None) -> Any:
    """Samples with a prompt, and with another sample's in this column."""
    samples = prompts_and_completions().select_columns(["prompt"])
    return samples if column is None else samples.add_column(column, _shuffled(samples, "prompt"))


def triples() -> Any:
    samples = preferences()
    return samples.add_column("reference", _shuffled(samples, "chosen"))


def _shuffled(samples: Any, column: str) -> Any:
    return samples.shuffle(seed=0)[column]


ON_POLICY: dict[str, Any] = {"max_completion_length": 6}
SELF_DISTILLATION: dict[str, Any] = {
    **ON_POLICY,
    "distillation_mode": "sampled_token",
    "distillation_alpha": 1.0,
    "num_generations": 2,
    "teacher_model_kind": "live",
}
OF_GROUPS: dict[str, Any] = {**ON_POLICY, "num_generations": 4, "per_device_train_batch_size": 8}
KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {  # samples, and the configuration
    "DPO": (preferences, {}),
    "KTO": (judgements, {}),
    "ORPO": (preferences, {"max_length": 32}),
    "CPO": (preferences, {"max_length": 32}),
    "TPO": (triples, {}),
    "OnlineDPO": (prompts, {"max_new_tokens": 6, "max_length": 32}),
    "A2PO": (prompts, {**ON_POLICY, "num_value_samples": 2, "filter_all_incorrect": False}),
    "SDFT": (lambda: prompts("privileged_context"), {**SELF_DISTILLATION, "temperature": 0.7}),
    "SDPO": (prompts, SELF_DISTILLATION),
    "GRPO": (prompts, {**OF_GROUPS, "beta": 0.0}),
    "RLOO": (prompts, {**OF_GROUPS, "beta": 0.0}),
    "Distillation": (prompts, ON_POLICY),
    "GKD": (conversations, {"lmbda": 0.0, "max_new_tokens": 4, "max_length": 32}),
}


def make_trainer(
    kind: str,
    folder: Path,
    flag: bool | None,
    model_type: str = "llama",
    *,
    adapters: dict[str, Any] | None = None,
    data: Any = None,
    rewards: Any = None,
    **how: Any,
) -> Any:
    """One of KINDS, of a tiny model in float64, with other weights for a reference or a teacher.

    Args:
        adapters: options of LoRA.
        data: samples in place of the kind's.
        how: of the configuration.
    """
    samples, options = KINDS[kind]
    data = samples() if data is None else data
    model = widened(tiny_model(model_type))
    if "moe" in model_type:
        model.config.output_router_logits = True
    named: dict[str, Any] = {"model": model, **({} if adapters is None else lora(**adapters))}
    if kind in ("DPO", "KTO") and adapters is None:
        named["ref_model"] = widened(tiny_model(model_type, seed=1))
    if kind in ("Distillation", "GKD"):
        named["teacher_model"] = widened(tiny_model("qwen3", seed=1))
    if kind in ("GRPO", "RLOO"):
        named["reward_funcs"] = rewards or reward
    if kind in ("OnlineDPO", "A2PO", "SDPO"):
        named["reward_funcs"] = [of_even_length]
        named["processing_class"] = tokenizer = tiny_tokenizer()
        tokenizer.padding_side = "left"
    if kind == "OnlineDPO":
        named["eval_dataset"] = None  # TRL's fails
    made = trainer_of(kind, folder, flag, data, named, **{**options, **how})
    torch.manual_seed(made.args.seed)  # of samples
    return made


def of_even_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(each.split()) % 2) for each in completions]


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, each)) % 7) for each in completions]


def lora(**options: Any) -> dict[str, Any]:
    import peft

    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], **options}
    return {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", **options)}


def train(trainer: Any) -> Step:
    """Every number that a training and an evaluation log, and how each weight has moved."""
    model = trainer.model
    before = {name: values.detach().clone() for name, values in model.named_parameters()}
    with in_float64() if model.dtype == torch.float64 else contextlib.nullcontext():
        trainer.train()
        if trainer.eval_dataset is not None:
            trainer.evaluate()
    numbers = {
        f"{entry['step']} {name}": torch.tensor(value, dtype=torch.float64)
        for entry in trainer.state.log_history
        for name, value in entry.items()
        if not name.endswith(TIMES)
    }
    assert trainer.state.global_step == sum(name.endswith(" loss") for name in numbers)
    moved = {
        name: values.detach().double() - before[name].double()
        for name, values in model.named_parameters()
        if name in before  # SDPO adds adapters that follow those
    }
    return {**numbers, **moved}


def call(model: PreTrainedModel, batch: dict[str, Any], **arguments: Any) -> Step:
    """All that TRL's head returns, and all gradients of a loss in which every token has another
    weight, entropies included.
    """
    model.zero_grad()
    with in_float64() if model.dtype == torch.float64 else contextlib.nullcontext():
        outputs = model(**batch, fused_lm_head=True, **arguments)
        loss = outputs.loss.clone()
        for sign, name in ((1, "log_probs"), (-1, "entropy")):
            if name in outputs:
                weights = torch.linspace(-1, 2, outputs[name].numel()).view_as(outputs[name])
                loss = loss + sign * (outputs[name] * weights.to(outputs[name].dtype)).sum()
        loss.backward()
    gradients = {name: values.grad for name, values in model.named_parameters()}
    model.zero_grad()
    return {**{name: value.detach() for name, value in outputs.items()}, **gradients}


def assert_same(ours: Step, trls: Step, *, eps: int = 1) -> None:
    """``eps``: of float32, see ``assert_no_worse``."""
    ours, trls = (
        {n: v.double() if v is not None and v.dtype == torch.bool else v for n, v in each.items()}
        for each in (ours, trls)
    )
    assert_no_worse(ours, trls, trls, torch.float32, eps=eps)
