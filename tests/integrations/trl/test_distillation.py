"""TRL's DistillationTrainer and GKDTrainer: TRL's own numbers and weights, without logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import assert_same_bits
from tiny_models import tiny_model
from torch import Tensor
from trl_models import LEFT_TO_TRL, MARKS, assert_same, in_float64, make_trainer, train

from liger_patch import apply_patch, patch_status

pytestmark = MARKS


@pytest.mark.parametrize("kind", ["Distillation", "GKD"])
def test_without_the_flag_or_with_logits_it_is_trls(
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


def test_head_of_another_kind_is_left_to_trl(tmp_path: Path) -> None:
    class Another(torch.nn.Parameter):
        pass

    trainers = [make_trainer("Distillation", tmp_path, flag) for flag in (None, True)]
    for trainer in trainers:
        trainer.teacher_model.lm_head.weight = Another(trainer.teacher_model.lm_head.weight.data)
    trls = train(trainers[0])
    torch.manual_seed(trainers[1].args.seed)
    with pytest.warns(UserWarning, match=f"{LEFT_TO_TRL}: the head's weight is a Another"):
        assert_same(train(trainers[1]), trls)
    assert patch_status(trainers[1].model).fused is False
