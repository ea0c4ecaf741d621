"""TRL's trainers of preferences and of distillation: TRL's own numbers, without logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_models import rows_of
from exactness import assert_same_bits
from slow_cases import slow_but
from tiny_models import tiny_model
from tiny_text import preferences
from torch import Tensor, nn
from torch.nn import functional
from training_step import Step, assert_fused
from trl_models import (
    LEFT_TO_TRL,
    MARKS,
    assert_same,
    in_float64,
    make_trainer,
    train,
    trainer_of,
)

from liger_patch import apply_patch, patch_status
from liger_patch.deferred import fuse
from liger_patch.layers import unpadded
from liger_patch.layers.replace import count_layers

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning"),
]
LORA: dict[str, Any] = {"adapters": {}}
ON_HEAD: dict[str, Any] = {"adapters": {"target_modules": ["q_proj", "lm_head"]}}
HEAD_SAVED: dict[str, Any] = {"adapters": {"modules_to_save": ["lm_head"]}}


def same_as_trls(ours: Step, trls: Step, *, eps: int = 1) -> None:
    for numbers in (ours, trls):
        numbers.pop("1 implicit_reward", None)  # 0, of A2PO's policy that is its reference
    assert_same(ours, trls, eps=eps)


@pytest.mark.parametrize(
    ("kind", "model_type", "how"),
    [
        pytest.param("DPO", "gemma2", {}, id="dpo, softcap"),
        pytest.param("DPO", "qwen3_moe", {"router_aux_loss_coef": 0.5}, id="dpo, auxiliary loss"),
        pytest.param("DPO", "llama", LORA, id="dpo, lora"),
        pytest.param("DPO", "llama", HEAD_SAVED, id="dpo, head saved"),
        pytest.param("DPO", "llama", {"use_weighting": True}, id="dpo, weighted"),
        pytest.param("DPO", "llama", {"loss_type": ["ipo", "sft"]}, id="dpo, ipo and sft"),
        pytest.param("DPO", "llama", {"precompute_ref_log_probs": True}, id="dpo, precomputed"),
        pytest.param("KTO", "llama", {}, id="kto"),
        pytest.param("KTO", "llama", LORA, id="kto, lora", marks=pytest.mark.slow),
        pytest.param("ORPO", "gemma2", {}, id="orpo, softcap"),
        pytest.param("ORPO", "qwen3_moe", {}, id="orpo, auxiliary loss"),
        pytest.param("ORPO", "llama", ON_HEAD, id="orpo, lora on head"),
        pytest.param("CPO", "gemma2", {"loss_type": "simpo", "cpo_alpha": 0.0}, id="simpo"),
        pytest.param("CPO", "llama", {"gradient_accumulation_steps": 2}, id="cpo, accumulation"),
        pytest.param("TPO", "gemma2", {"loss_type": "tpo-l", "tpo_alpha": 0.0}, id="tpo-l"),
        pytest.param("TPO", "llama", ON_HEAD, id="tpo, lora on head"),
        pytest.param("OnlineDPO", "gemma2", {"loss_type": "ipo"}, id="online dpo, ipo"),
        pytest.param("OnlineDPO", "llama", LORA, id="online dpo, lora"),
        pytest.param("A2PO", "gemma2", {"gradient_accumulation_steps": 2}, id="a2po, softcap"),
        pytest.param("SDFT", "gemma2", {**LORA, "teacher_model_kind": "base"}, id="sdft, lora"),
        pytest.param("SDPO", "gemma2", {"distillation_weight": 0.0}, id="sdpo, policy"),
        pytest.param(
            "SDPO",
            "llama",
            {**LORA, "teacher_model_kind": "ema", "distillation_weight": 0.5},
            id="sdpo, lora",
        ),
        pytest.param("Distillation", "gemma2", {"beta": 0.3, "temperature": 0.7}, id="jsd"),
        pytest.param("Distillation", "granite", {"beta": 0.0}, id="forward, scale"),
        pytest.param("Distillation", "llama", LORA, id="distillation, lora"),
        pytest.param("Distillation", "llama", HEAD_SAVED, id="distillation, head saved"),
        pytest.param(
            "Distillation",
            "llama",
            {"beta": 0.5, "gradient_accumulation_steps": 2, "gradient_checkpointing": True},
            id="distillation, accumulation",
        ),
        pytest.param("GKD", "gemma2", {"beta": 1.0}, id="gkd, reverse", marks=pytest.mark.slow),
        pytest.param("GKD", "granite", {"beta": 0.0, "seq_kd": True}, id="gkd, teacher's text"),
        pytest.param("GKD", "llama", {"lmbda": 1.0, **LORA}, id="gkd, on policy, lora"),
    ],
)
def test_models_are_trained_with_trls_numbers(
    kind: str,
    model_type: str,
    how: dict[str, Any],
    reads: list[Any],
    trls_calls: list[Any],
    tmp_path: Path,
) -> None:
    trls = train(make_trainer(kind, tmp_path, None, model_type, **how))
    assert trls_calls or kind not in ("DPO", "KTO", "Distillation", "GKD")  # others take logits
    trls_calls.clear()
    trainer = make_trainer(kind, tmp_path, True, model_type, **how)
    ours = train(trainer)
    assert (reads, trls_calls) == ([], [])
    for name in ("model", "ref_model", "teacher_model"):
        model = getattr(trainer, name, None)
        if name == "teacher_model" and kind in ("Distillation", "GKD"):  # its head alone
            assert patch_status(model).patched
        elif model is not None:
            assert_fused(model)
    # TRL keeps a precomputed reference in float32, beside which rewards and their loss are small
    same_as_trls(ours, trls, eps=16 if "precompute_ref_log_probs" in how else 1)
    if kind in ("DPO", "KTO"):
        assert ours["1 rewards/chosen"].any() == (trainer.ref_model is not None)


@pytest.mark.parametrize("kind", ["CPO", "ORPO"])
def test_encoder_decoders_are_trls(kind: str, tmp_path: Path) -> None:
    how = {"max_completion_length": 8}
    trls = train(make_trainer(kind, tmp_path, None, "t5", **how))
    assert_same(train(make_trainer(kind, tmp_path, True, "t5", **how)), trls)


class Another(nn.Parameter):
    pass


def with_a_hook(trainer: Any) -> None:
    trainer.model.lm_head.register_full_backward_hook(lambda *_: None)


def with_another_weight(trainer: Any) -> None:
    head = trainer.teacher_model.lm_head
    head.weight = Another(head.weight.data)


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("CPO", with_a_hook, "backward hooks of the head"),
        ("Distillation", with_another_weight, "the head's weight is a Another"),
    ],
)
def test_a_head_that_cannot_be_fused_is_trls(
    kind: str, change: Callable[[Any], None], reason: str, tmp_path: Path
) -> None:
    trls, ours = (make_trainer(kind, tmp_path, flag) for flag in (None, True))
    for trainer in (trls, ours):
        change(trainer)
    expected = train(trls)
    torch.manual_seed(ours.args.seed)
    with pytest.warns(UserWarning, match=f"{LEFT_TO_TRL}: {reason}"):
        assert_same(train(ours), expected)
    # at last in an evaluation, without a backward pass
    assert patch_status(ours.model).fused is (change is with_a_hook)


def test_modes_that_compare_logits_are_trls(tmp_path: Path) -> None:
    how = {"distillation_mode": "topk_logits", "distillation_topk": 5}
    trls, ours = (train(make_trainer("SDFT", tmp_path, f, **how)) for f in (None, True))
    assert_same(ours, trls)


def test_answers_alone_pass_through_the_head(
    tmp_path: Path, record: Callable[..., list[int]]
) -> None:
    """But of a head with a softcap, for the means of all logits."""
    counts = record(fuse, "linear_log_probs", lambda *, labels, **_: int((labels != -100).sum()))
    for model_type in ("llama", "gemma2"):
        trainer = make_trainer("CPO", tmp_path, True, model_type, max_steps=1)
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
    trls = train(make_trainer(kind, tmp_path, None))
    monkeypatch.setattr(unpadded, "may_serve_flash_attention", lambda *_: True)
    trainer = make_trainer(kind, tmp_path, True)
    shapes = rows_of(trainer.model)
    same_as_trls(train(trainer), trls)
    assert_fused(trainer.model)
    rows = [shape[0] for shape in shapes]
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


@pytest.mark.parametrize("patched", [1, 2], ids=["policy", "both"])
def test_the_flag_patches_policy_and_reference_with_their_options(
    patched: int, trls_calls: list[Any], tmp_path: Path
) -> None:
    """A reference that was not patched gets the policy's."""
    models = [tiny_model("gemma2", seed=seed) for seed in (0, 1)]
    for model in models[:patched]:
        apply_patch(model, layers=False, chunk_mib=3.0)
    named = dict(zip(("model", "ref_model"), models, strict=True))
    trainer = trainer_of("DPO", tmp_path, True, preferences(), named)
    trainer.train()
    assert trls_calls == []
    for model in (trainer.model, trainer.ref_model):
        assert_fused(model)
        assert "3 MiB a chunk" in str(patch_status(model))
        assert count_layers(model)["rms_norm"] == 0


@pytest.mark.parametrize("kind", ["Distillation", "GKD"])
def test_distillation_without_the_flag_or_with_logits_is_trls(
    kind: str, trls_calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trls = train(make_trainer(kind, tmp_path, None))
    trainer = make_trainer(kind, tmp_path, False)
    assert_same_bits(train(trainer), trls)
    assert not patch_status(trainer.model).patched
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    trls_calls.clear()
    assert_same(train(make_trainer(kind, tmp_path, True)), trls)
    assert trls_calls


def test_loss_of_a_subclass_gets_logits(
    reads: list[Any], trls_calls: list[Any], tmp_path: Path
) -> None:
    def halved(student_logits: Tensor, teacher_logits: Tensor, **named: Any) -> Tensor:
        return (student_logits - teacher_logits).square().mean() / 2

    results = []
    for flag in (None, True):
        trainer = make_trainer("GKD", tmp_path, flag)
        own = {"generalized_jsd_loss": staticmethod(halved)}
        trainer.__class__ = type("GKDTrainer", (type(trainer),), own)
        results.append(train(trainer))
    trls, ours = results
    assert_same(ours, trls)
    assert (reads, trls_calls) == ([], [])  # real logits all along


def test_heads_that_fsdp_shards_are_gathered(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from trl.trainer import distillation_trainer

    from liger_patch.integrations.trl_distillation import _divergence
    from liger_patch.patch.forward import record_of

    given = torch.randn(2, 5, 8), torch.randn(2, 5, 12), torch.randn(37, 8), torch.randn(37, 12)
    mask = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]])
    how: dict[str, Any] = {"temperature": 0.7, "num_items_in_batch": torch.tensor(6.0)}
    for each in ("student", "teacher"):
        how |= {f"{each}_lm_head_bias": None, f"{each}_logit_scale": 1.0}
        how[f"{each}_final_logit_softcapping"] = None
    record: Any = record_of(apply_patch(tiny_model()))

    def numbers(function: Any, *first: Any) -> dict[str, Tensor | None]:
        x, y, *heads = (each.double() for each in given)
        shards = [distribute_tensor(each, mesh, [Shard(0)]) for each in heads]
        leaves = [x.requires_grad_(), shards[0].requires_grad_()]
        with in_float64():
            result = function(*first, x, y, *shards, mask, 0.5, **how)
            gradients = torch.autograd.grad(result[0], leaves)
        names = ("loss", "entropy", "count", "hidden", "weight")
        whole: Any = gradients[1]
        return dict(zip(names, [*result, gradients[0], whole.full_tensor()], strict=True))

    file = f"file://{tmp_path}/group"
    torch.distributed.init_process_group("gloo", init_method=file, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        trls = numbers(distillation_trainer._chunked_divergence_loss)
        assert_same(numbers(_divergence, record), trls)
        assert record.fused
        # mixed precision: heads and biases of another dtype than the hidden states
        x, y, *heads = given
        shards = [distribute_tensor(each, mesh, [Shard(0)]) for each in heads]
        for each in ("student", "teacher"):
            how[f"{each}_lm_head_bias"] = distribute_tensor(torch.randn(37), mesh, [Shard(0)])
        arguments = x.bfloat16(), y.bfloat16(), *shards, mask, 0.5
        found = _divergence(record, *arguments, **how)[0]
        own = distillation_trainer._chunked_divergence_loss(*arguments, **how)[0]
        torch.testing.assert_close(found.float(), own.float(), rtol=2e-2, atol=1e-3)
    finally:
        torch.distributed.destroy_process_group()
