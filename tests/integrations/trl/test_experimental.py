"""TRL's experimental trainers that take logits: TRL's own numbers and weights, without logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow_but
from tiny_models import tiny_model
from tiny_text import preferences, prompts_and_completions, tiny_tokenizer
from torch import Tensor
from torch.nn import functional
from training_step import Step, assert_fused, widened
from trl_models import LEFT_TO_TRL, MARKS, assert_same, lora, train, trainer_of

from liger_patch.deferred import fuse
from liger_patch.layers import unpadded

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning"),
]
ON_POLICY: dict[str, Any] = {"max_completion_length": 6}
SELF_DISTILLATION = {
    **ON_POLICY,
    "distillation_mode": "sampled_token",
    "distillation_alpha": 1.0,
    "num_generations": 2,
    "teacher_model_kind": "live",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "ORPO": {"max_length": 32},
    "CPO": {"max_length": 32},
    "TPO": {},
    "OnlineDPO": {"max_new_tokens": 6, "max_length": 32},
    "A2PO": {**ON_POLICY, "num_value_samples": 2, "filter_all_incorrect": False},
    "SDFT": {**SELF_DISTILLATION, "temperature": 0.7},
    "SDPO": SELF_DISTILLATION,
}
REWARDED = ("OnlineDPO", "A2PO", "SDPO")


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(each.split()) % 2) for each in completions]


def data_of(kind: str) -> Any:
    if kind in ("ORPO", "CPO"):
        return preferences()
    if kind == "TPO":
        samples = preferences()
        return samples.add_column("reference", samples.shuffle(seed=0)["chosen"])
    samples = prompts_and_completions().select_columns(["prompt"])
    if kind != "SDFT":
        return samples
    return samples.add_column("privileged_context", samples.shuffle(seed=0)["prompt"])


def make_trainer(
    kind: str, model_type: str, folder: Path, flag: bool | None, *, adapters: Any = None, **how: Any
) -> Any:
    how, model = {**OPTIONS[kind], **how}, widened(tiny_model(model_type))
    if "moe" in model_type:
        model.config.output_router_logits = True
    named: dict[str, Any] = {} if adapters is None else lora(target_modules=adapters)
    named["model"] = model
    if kind == "OnlineDPO":
        named["eval_dataset"] = None  # TRL's fails
    if kind in REWARDED:
        named["reward_funcs"] = [reward]
        named["processing_class"] = tokenizer = tiny_tokenizer()
        tokenizer.padding_side = "left"
    made = trainer_of(kind, folder, flag, data_of(kind), named, **how)
    torch.manual_seed(0)  # of samples
    return made


def same_as_trls(ours: Step, trls: Step) -> None:
    for numbers in (ours, trls):
        numbers.pop("1 implicit_reward", None)  # 0, of A2PO's policy that is its reference
    assert_same(ours, trls)


@pytest.mark.parametrize(
    ("kind", "model_type", "how"),
    [
        pytest.param("ORPO", "gemma2", {}, id="orpo, softcap"),
        pytest.param("ORPO", "qwen3_moe", {}, id="orpo, auxiliary loss"),
        pytest.param("ORPO", "llama", {"adapters": ["q_proj", "lm_head"]}, id="orpo, lora on head"),
        pytest.param("CPO", "gemma2", {"loss_type": "simpo", "cpo_alpha": 0.0}, id="simpo"),
        pytest.param("CPO", "llama", {"loss_type": "ipo"}, id="cpo, ipo"),
        pytest.param("CPO", "llama", {"gradient_accumulation_steps": 2}, id="cpo, accumulation"),
        pytest.param("TPO", "gemma2", {"loss_type": "tpo-l", "tpo_alpha": 0.0}, id="tpo-l"),
        pytest.param("TPO", "llama", {"adapters": ["q_proj", "lm_head"]}, id="tpo, lora on head"),
        pytest.param("OnlineDPO", "gemma2", {"loss_type": "ipo"}, id="online dpo, ipo"),
        pytest.param("OnlineDPO", "llama", {"adapters": ["q_proj"]}, id="online dpo, lora"),
        pytest.param("A2PO", "gemma2", {"gradient_accumulation_steps": 2}, id="a2po, softcap"),
        pytest.param(
            "SDFT",
            "gemma2",
            {"adapters": ["q_proj"], "teacher_model_kind": "base"},
            id="sdft, lora",
        ),
        pytest.param("SDPO", "gemma2", {"distillation_weight": 0.0}, id="sdpo, policy"),
        pytest.param(
            "SDPO",
            "llama",
            {"adapters": ["q_proj"], "teacher_model_kind": "ema", "distillation_weight": 0.5},
            id="sdpo, lora",
        ),
    ],
)
def test_models_are_trained_with_trls_numbers(
    kind: str, model_type: str, how: dict[str, Any], reads: list[Any], tmp_path: Path
) -> None:
    trls = train(make_trainer(kind, model_type, tmp_path, None, **how))
    trainer = make_trainer(kind, model_type, tmp_path, True, **how)
    ours = train(trainer)
    assert reads == []
    for name in ("model", "ref_model", "teacher_model"):
        if getattr(trainer, name, None) is not None:
            assert_fused(getattr(trainer, name))
    same_as_trls(ours, trls)
    logged = {
        "ORPO": ("logits/chosen", "logps/rejected", "nll_loss", "eval_loss"),
        "CPO": ("logits/chosen", "logps/rejected", "nll_loss", "eval_loss"),
        "TPO": ("logits/chosen", "entropy", "mean_token_accuracy", "eval_loss"),
        "OnlineDPO": ("logps/chosen", "objective/kl", "objective/entropy", "rewards/margins"),
        "A2PO": ("implicit_reward", "eval_loss"),
        "SDFT": ("self_distillation/distillation_loss", "eval_loss"),
        "SDPO": ("self_distillation/reward_mean", "completions/mean_length", "eval_loss"),
    }
    assert {f"3 {name}" for name in logged[kind]} <= ours.keys()


@pytest.mark.parametrize("kind", ["CPO", "ORPO"])
def test_encoder_decoders_are_trls(kind: str, tmp_path: Path) -> None:
    how = {"max_completion_length": 8}
    trls = train(make_trainer(kind, "t5", tmp_path, None, **how))
    assert_same(train(make_trainer(kind, "t5", tmp_path, True, **how)), trls)


def test_a_head_that_cannot_be_fused_is_trls(tmp_path: Path) -> None:
    trls, ours = (make_trainer("CPO", "llama", tmp_path, flag) for flag in (None, True))
    for trainer in (trls, ours):
        trainer.model.lm_head.register_full_backward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=f"{LEFT_TO_TRL}: backward hooks of the head"):
        results = train(ours)
    assert_same(results, train(trls))


def test_modes_that_compare_logits_are_trls(tmp_path: Path) -> None:
    how = {"distillation_mode": "topk_logits", "distillation_topk": 5}
    trls, ours = (train(make_trainer("SDFT", "llama", tmp_path, f, **how)) for f in (None, True))
    assert_same(ours, trls)


def test_answers_alone_pass_through_the_head(
    tmp_path: Path, record: Callable[..., list[int]]
) -> None:
    """But of a head with a softcap, for the means of all logits."""
    counts = record(fuse, "linear_log_probs", lambda *, labels, **_: int((labels != -100).sum()))
    for model_type in ("llama", "gemma2"):
        trainer = make_trainer("CPO", model_type, tmp_path, True, max_steps=1)
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.compute_loss(trainer.model, batch)
        answers = [batch[f"{kind}_labels"] for kind in ("chosen", "rejected")]
        longest = max(each.shape[1] for each in answers)
        supervised = sum(int((each != -100).sum()) for each in answers)
        of_all = sum(len(each) for each in answers) * longest
        assert counts.pop() == (supervised if model_type == "llama" else of_all)


@pytest.mark.parametrize("kind", slow_but(["TPO", "SDFT"], ["TPO", "A2PO", "SDFT", "SDPO"]))
def test_padding_is_left_out(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the calls for a loss: generation runs rows of a batch."""
    trls = train(make_trainer(kind, "llama", tmp_path, None))
    monkeypatch.setattr(unpadded, "may_serve_flash_attention", lambda *_: True)
    trainer = make_trainer(kind, "llama", tmp_path, True)
    rows: list[int] = []

    def hook(_: Any, given: tuple[Tensor, ...]) -> None:
        rows.append(given[0].shape[0])

    hook.__module__ = "torch.nn"  # one of yours keeps the padding
    trainer.model.model.rotary_emb.register_forward_pre_hook(hook)
    same_as_trls(train(trainer), trls)
    assert_fused(trainer.model)
    assert 1 in rows
    assert kind != "TPO" or {*rows} == {1}


def test_other_reads_of_logits_are_errors() -> None:
    from liger_patch.integrations.trl_preferences import NextTokens

    labels = torch.tensor([[[1], [2], [-100]], [[4], [5], [6]]])
    logits: Any = NextTokens({"log_probs": -torch.ones(2, 3, 1), "labels": labels}, 0.5)
    flat, tokens = logits.view(-1, 1), labels.view(-1)
    others = labels.clone()
    others[0, 1:, 0] = torch.tensor([0, 7])  # neither counts: 0 stands for a label that is ignored
    assert torch.equal(torch.gather(logits, -1, others), -torch.ones(2, 3, 1))
    assert functional.cross_entropy(flat, tokens) == 1
    others[1, 0] = 8
    reads: dict[str, Callable[[], Any]] = {
        "topk": lambda: logits.topk(2),
        "gather of token 8 where 4 follows": lambda: torch.gather(logits, -1, others),
        "cross_entropy of token 0 where 2 follows": lambda: functional.cross_entropy(
            flat, others.view(-1)
        ),
        "/ 2.0": lambda: logits / 2.0,
        "/ 0.5": lambda: logits / 0.5 / 0.5,
        r"\*": lambda: logits * logits,  # the trainer asked for no entropy
        "mean": lambda: logits.mean(),
        "argmax": lambda: logits.argmax(dim=-1),
    }
    for read, function in reads.items():
        with pytest.raises(
            AttributeError, match=f"'{read}' of logits is not computed.*RETURN_LOGITS=1"
        ):
            function()
    for read, function in {
        "topk": lambda: torch.topk(logits, 2),
        "gather": lambda: torch.gather(logits, -1, torch.zeros(2, 3, 2, dtype=torch.long)),
        "unsupported operand type": lambda: logits * torch.ones(1),
        r"'NextTokens' and 'float'": lambda: logits * 2.0,
        "cross_entropy": lambda: functional.cross_entropy(flat, tokens, label_smoothing=0.1),
    }.items():
        with pytest.raises(TypeError, match=read):
            function()
