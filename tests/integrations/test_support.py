"""What trains what heads: each trainer with each kind of head, fused or not, as docs/trl.md says,
with the numbers of the same trainer on logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tiny_models import ROWS, tiny_batch, tiny_model
from tiny_text import (
    conversations,
    judgements,
    preferences,
    prompts_and_completions,
    tiny_tokenizer,
)
from trainers import QUIET
from training_step import widened
from trl_models import MARKS, TIMES, assert_fused, assert_same, in_float64

from liger_patch import apply_patch, patch_status

pytest.importorskip("accelerate")
pytest.importorskip("peft")

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings(
        "ignore:Model (has|with) .tie_word_embeddings:UserWarning",
        "ignore:Could not find a config file in:UserWarning",
    ),
]
MODELS = {"Llama": "llama", "Gemma": "gemma2", "Qwen": "qwen3", "Others": "granite"}
OPTIONS: dict[str, Any] = {  # plain SGD without clipping: a loss that is scaled trains otherwise
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.02,
    "optim": "sgd",
    "max_grad_norm": 0.0,
    **QUIET,
    "bf16": False,  # TRL switches both on
    "gradient_checkpointing": False,
}


class Head(NamedTuple):
    """A column of the matrix.

    Attributes:
        targets: of the adapters; nothing is adapted without.
        saved: whether the head is trained beside them.
        dora: whether the adapters are of a kind that is not fused on a head.
    """

    targets: tuple[str, ...] = ()
    saved: bool = False
    dora: bool = False


HEADS = {
    "trained, no adapters": Head(),
    "LoRA on other layers": Head(("q_proj", "v_proj")),
    "LoRA on `lm_head` too": Head(("q_proj", "lm_head")),
    '`modules_to_save=["lm_head"]`': Head(("q_proj",), saved=True),
    "DoRA on `lm_head`": Head(("q_proj", "lm_head"), dora=True),
}


def make_model(family: str, head: Head, *, seed: int = 0) -> Any:
    model: Any = widened(tiny_model(ROWS[MODELS[family]], dtype=torch.float32, seed=seed))
    if not head.targets:
        return model
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=list(head.targets),
        modules_to_save=["lm_head"] if head.saved else None,
        init_lora_weights=False,
        use_dora=head.dora,
    )
    return peft.get_peft_model(model, config)


class OwnLoop:
    """Two steps, as a script of one's own makes them."""

    def __init__(self, model: Any) -> None:
        self.model = apply_patch(model)

    def train(self) -> list[float]:
        trained = [values for values in self.model.parameters() if values.requires_grad]
        optimizer, losses = torch.optim.SGD(trained, lr=0.02), []
        for seed in range(2):
            loss = self.model(**tiny_batch(self.model, seed=seed)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def own_loop(model: Any, folder: Path, reference: Callable[[], Any]) -> Any:
    return OwnLoop(model)


def of_transformers(model: Any, folder: Path, reference: Callable[[], Any]) -> Any:
    batch = tiny_batch(model, batch=8)
    samples = [{name: value[i] for name, value in batch.items()} for i in range(8)]
    arguments = transformers.TrainingArguments(str(folder), **OPTIONS)
    return transformers.Trainer(apply_patch(model), arguments, train_dataset=samples)


def of_trl(kind: str, data: Callable[[], Any], **options: Any) -> Callable[..., Any]:
    def make(model: Any, folder: Path, reference: Callable[[], Any]) -> Any:
        from liger_patch.integrations import trl as sft
        from liger_patch.integrations import trl_trainers as others

        module: Any = sft if kind == "SFT" else others
        samples, named, how = data(), {}, {**OPTIONS, **options, "use_liger_patch": True}
        if kind in ("GRPO", "RLOO"):
            samples = samples.select_columns(["prompt"])
            named["reward_funcs"] = _reward
            how |= {"num_generations": 2, "max_completion_length": 4, "beta": 0.0}
        elif kind == "Distillation":
            samples = samples.select_columns(["prompt"])
            how["max_completion_length"] = 4
        if kind in ("Distillation", "GKD"):
            named["teacher_model"] = reference()
        elif kind in ("DPO", "KTO") and not hasattr(model, "peft_config"):
            named["ref_model"] = reference()
        return getattr(module, f"{kind}Trainer")(
            model=model,
            args=getattr(module, f"{kind}Config")(str(folder), **how),
            train_dataset=samples,
            processing_class=tiny_tokenizer(),
            **named,
        )

    return make


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, each)) % 7) for each in completions]


TRAINERS: dict[str, Callable[..., Any]] = {
    "your own loop": own_loop,
    "Transformers' Trainer": of_transformers,
    "SFT": of_trl("SFT", prompts_and_completions),
    "DPO": of_trl("DPO", preferences),
    "KTO": of_trl("KTO", judgements),
    "GRPO": of_trl("GRPO", prompts_and_completions),
    "RLOO": of_trl("RLOO", prompts_and_completions),
    "distillation": of_trl("Distillation", prompts_and_completions),
    "GKD": of_trl("GKD", conversations, max_length=32, lmbda=0.0),
    "ORPO": of_trl("ORPO", preferences, max_length=32),
    "CPO and SimPO": of_trl("CPO", preferences, max_length=32, loss_type="simpo"),
}


# their head reads `lm_head.weight`: they raise where an adapter is on it
OF_TRLS_HEAD = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "distillation", "GKD")


def outcome(trainer: str, head: Head) -> str:
    """Return what docs/trl.md says of a trainer and a head."""
    if trainer in OF_TRLS_HEAD and "lm_head" in head.targets:
        return "TRL refuses"
    return "logits" if head.dora else "fused"


def cells() -> list[Any]:
    """One of the families in each. The quick ones meet every trainer, head and family."""
    families, heads = itertools.cycle(MODELS), itertools.cycle(HEADS)
    quick = {(trainer, next(heads)) for trainer in TRAINERS}
    return [
        pytest.param(
            *cell,
            next(families),
            id="-".join(cell),
            marks=() if cell in quick else pytest.mark.slow,
        )
        for cell in itertools.product(TRAINERS, HEADS)
    ]


def numbers(trainer: Any) -> dict[str, Any]:
    """What each step logs, and the weights that it leaves."""
    before = {name: values.detach().clone() for name, values in trainer.model.named_parameters()}
    losses = trainer.train()
    logged = [{"loss": loss} for loss in losses] if isinstance(losses, list) else []
    logged = logged or trainer.state.log_history
    moved = {
        name: values.detach() - before[name]
        for name, values in trainer.model.named_parameters()
        if values.requires_grad
    }
    found = {
        f"{i} {name}": torch.tensor(value, dtype=torch.float64)
        for i, entry in enumerate(logged)
        for name, value in entry.items()
        if not name.endswith(TIMES)
    }
    assert any(name.endswith(" loss") for name in found)
    return {**found, **moved}


@pytest.mark.parametrize(("trainer", "head", "family"), cells())
def test_every_cell_is_what_the_page_says(
    trainer: str,
    head: str,
    family: str,
    reads: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = HEADS[head]

    def train() -> tuple[Any, dict[str, Any]]:
        model = make_model(family, kind)
        made = TRAINERS[trainer](model, tmp_path, lambda: make_model(family, kind, seed=1))
        torch.manual_seed(0)  # of samples
        with in_float64():
            return made, numbers(made)

    expected = outcome(trainer, kind)
    if expected == "TRL refuses":
        with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
            train()
        return
    if expected == "logits":
        # of ORPO and CPO, TRL's own code takes logits
        otherwise = "computes ordinary logits|leaves the head to TRL"
        with pytest.warns(UserWarning, match=f"liger_patch ({otherwise})"):
            made, ours = train()
        assert patch_status(made.model).fused is False
    else:
        made, ours = train()
        assert reads == []
        assert_fused(made.model)
    of_head = ("lm_head", "embed_tokens")  # which is the head where it is tied
    trained = [v for n, v in ours.items() if "lora_B" in n or any(x in n for x in of_head)]
    assert any(values.any() for values in trained)
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    _, on_logits = train()
    if trainer == "RLOO":  # its advantages add up to 0: of the loss only gradients are left
        ours, on_logits = (
            {name: value for name, value in each.items() if not name.endswith("loss")}
            for each in (ours, on_logits)
        )
    assert_same(ours, on_logits)
