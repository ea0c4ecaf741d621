"""How models with TRL's head are patched: the flag, apply_trl_patch, what it refuses, the way
back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from documents import configuration
from exactness import assert_same_bits
from tiny_models import ROWS, tiny_batch, tiny_model
from tiny_text import prompts_and_completions, tiny_tokenizer
from torch import nn
from training_step import assert_fused, widened
from transformers import PreTrainedModel
from trl_models import (
    DEFAULTS,
    MARKS,
    apply_trl_patch,
    assert_same,
    call,
    lora,
    sft_trainer,
    train,
    with_head,
)

from liger_patch import apply_patch, patch_status, registry, revert_patch
from liger_patch.patch import flags
from liger_patch.patch.forward import record_of
from liger_patch.patch.offload import CheckpointOffload, _Checkpoints

pytestmark = MARKS


# The flag


def is_trls(model: PreTrainedModel) -> bool:
    """Whether a model is as TRL makes it, and nothing of this package is in it."""
    own_class = getattr(transformers, ROWS[model.config.model_type].class_name)
    forward = vars(model)["forward"].__func__
    return (
        type(model) is own_class
        and record_of(model) is None
        and not patch_status(model).patched
        and forward.__code__.co_name == "_fused_forward"
    )


@pytest.mark.parametrize("kind", ["ours", "Transformers'"])
def test_without_the_flag_all_is_trls(kind: str, tmp_path: Path) -> None:
    from liger_patch.integrations import trl as ours

    trls = train(sft_trainer(tiny_model("gemma2"), tmp_path))
    config: Any = ours.SFTConfig if kind == "ours" else transformers.TrainingArguments
    model, samples = tiny_model("gemma2"), prompts_and_completions()
    # by position, as TRL's takes them
    trainer = ours.SFTTrainer(
        model, config(str(tmp_path), **DEFAULTS), None, samples, samples, tiny_tokenizer()
    )
    assert is_trls(model)
    assert_same_bits(train(trainer), trls)
    assert is_trls(model)


def test_a_parser_reads_the_flag(tmp_path: Path) -> None:
    from trl import TrlParser

    from liger_patch.integrations.trl import SFTConfig

    parser = TrlParser((SFTConfig,))
    always = ["--output_dir", str(tmp_path), "--bf16", "false"]
    flags = {
        (): False,
        ("--use_liger_patch", "true"): True,
        ("--use_liger_patch",): True,
        ("--use_liger_patch", "false"): False,
    }
    for arguments, flag in flags.items():
        (config,) = parser.parse_args_and_config([*always, *arguments])
        assert type(config) is SFTConfig
        assert config.use_liger_patch is flag, arguments
        assert config.to_dict()["use_liger_patch"] is flag


def test_a_parser_reads_the_configuration_in_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl import TrlParser

    from liger_patch.integrations.trl import SFTConfig

    given = configuration("use_liger_patch")
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(given))
    for name in given.pop("env"):
        monkeypatch.setenv(name, "")  # which the parser sets: the test's end takes it back
    always = ["--output_dir", str(tmp_path), "--bf16", "false"]
    (config,) = TrlParser((SFTConfig,)).parse_args_and_config([*always, "--config", str(file)])
    assert {name: getattr(config, name) for name in given} == given
    assert flags.chunk_mib() == 1024


def test_a_flag_that_is_no_bool_is_an_error(tmp_path: Path) -> None:
    from liger_patch.integrations import trl_trainers as ours

    args: Any = {"output_dir": str(tmp_path), "use_liger_patch": "false", "use_cpu": True}
    with pytest.raises(ValueError, match="use_liger_patch must be True or False, got 'false'"):
        ours.DPOTrainer(tiny_model(), args=ours.DPOConfig(**args), train_dataset=[])


def test_a_patched_model_within_peft_is_taken_over_with_its_chunks(tmp_path: Path) -> None:
    import peft

    config = lora()["peft_config"]
    trls = train(sft_trainer(peft.get_peft_model(widened(tiny_model()), config), tmp_path))
    torch.manual_seed(0)
    model = apply_patch(widened(tiny_model()), chunk_mib=3.0)
    trainer = sft_trainer(peft.get_peft_model(model, config), tmp_path, True)
    assert "3 MiB a chunk" in str(patch_status(model))
    assert_same(train(trainer), trls)
    assert_fused(trainer.model)
    assert "3 MiB a chunk" in str(patch_status(model))


@pytest.mark.parametrize("checkpoint_offload", [False, True, 2.5])
def test_a_patched_model_keeps_its_offloaded_checkpoints(
    checkpoint_offload: bool | float, tmp_path: Path
) -> None:
    model = apply_patch(tiny_model(), checkpoint_offload=checkpoint_offload)
    sft_trainer(model, tmp_path, True)
    said = dict(patch_status(model).rows)["checkpoint offload"]
    assert said == ("on, no eager training step yet" if checkpoint_offload else "off")
    record: Any = record_of(model)
    if record.offload is not None:
        assert record.offload.host_gib == (2.5 if checkpoint_offload == 2.5 else None)


def test_trls_calls_offload_checkpoints(tmp_path: Path, record: Callable[..., list[int]]) -> None:
    results, dropped = [], record(_Checkpoints, "drop_copied", lambda each: each.sent)
    for device_types in ((), ("cpu",)):
        torch.manual_seed(0)
        trainer = sft_trainer(tiny_model(), tmp_path, gradient_checkpointing=True)
        model = apply_trl_patch(trainer.model, same_gradient=True, checkpoint_offload=True)
        patch: Any = record_of(model)
        patch.offload = CheckpointOffload(device_types, min_bytes=1) if device_types else None
        results.append(train(trainer))
        assert_fused(model)
    assert str(patch.offload).startswith("1 layer inputs")
    assert dropped
    assert set(dropped) == {1}  # before the loss of each step
    assert_same_bits(*results)


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"z_loss": 1e-3}, {"reduction": "sum"}], ids=str
)
def test_options_that_change_the_loss_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    model = apply_patch(tiny_model(), **options)
    (name,) = options
    with pytest.raises(ValueError, match=rf"^{name}=\S+ has no part .*trainer's configuration"):
        sft_trainer(model, tmp_path, True)
    assert patch_status(model).patched
    assert model(**tiny_batch(model)).loss.isfinite()


def test_options_that_come_later_are_refused_at_the_call() -> None:
    model = apply_trl_patch(with_head(tiny_model()))
    apply_patch(model, label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"^label_smoothing=0\.1 has no part in TRL's loss"):
        model(**tiny_batch(model), fused_lm_head=True)
    apply_patch(model)
    call(model, tiny_batch(model))
    assert_fused(model)


# apply_trl_patch


def test_a_model_without_trls_head_is_refused() -> None:
    model = tiny_model()
    expected = r"no fused head of TRL.*RLOO is made, with trl 1\.15 and 1\.16, got .*trl_trainers"
    with pytest.raises(RuntimeError, match=expected):
        apply_trl_patch(model)
    assert not patch_status(model).patched
    assert "forward" not in vars(model)


def test_a_callback_beside_the_flag_is_named(tmp_path: Path) -> None:
    from liger_patch.integrations.transformers import LigerPatchCallback

    options = {"callbacks": [LigerPatchCallback()]}
    with pytest.raises(ValueError, match="LigerPatchCallback and use_liger_patch=True both patch"):
        sft_trainer(tiny_model(), tmp_path, patch=True, options=options)
    with pytest.warns(UserWarning, match="leaves the head to TRL: TRL has replaced the forward"):
        sft_trainer(tiny_model(), tmp_path, patch=False, options=options)


def test_trls_trainer_says_that_it_does_not_know_the_flag(tmp_path: Path) -> None:
    import trl

    from liger_patch.integrations.trl import SFTConfig

    sft_trainer(tiny_model(), tmp_path, patch=True, max_steps=1).train()
    arguments = {**DEFAULTS, "max_steps": 1, "use_liger_patch": True}
    trainer = trl.SFTTrainer(
        tiny_model(),
        args=SFTConfig(str(tmp_path), **arguments),
        train_dataset=prompts_and_completions(),
        processing_class=tiny_tokenizer(),
    )
    with pytest.warns(UserWarning, match="a trainer that does not know the flag"):
        trainer.train()


@pytest.mark.parametrize("wrong", ["x", 1, None])
def test_same_gradient_is_true_or_false(wrong: Any) -> None:
    model = with_head(tiny_model())
    with pytest.raises(ValueError, match=f"same_gradient must be True or False, got {wrong!r}"):
        apply_trl_patch(model, same_gradient=wrong)
    assert not patch_status(model).patched


@pytest.mark.parametrize(
    "make",
    [
        lambda: apply_patch(tiny_model()),
        lambda: apply_trl_patch(with_head(tiny_model(), ("log_probs",))),
    ],
    ids=["apply_patch", "another trainer"],
)
def test_a_model_that_was_patched_before_trl_is_refused(
    make: Callable[[], Any], trls_calls: list[Any]
) -> None:
    model = make()
    with pytest.warns(UserWarning, match="leaves the head to TRL: TRL has replaced the forward"):
        with_head(model)
    assert patch_status(model).fused is False
    with pytest.raises(ValueError, match=r"patched before TRL added its head.*revert_patch"):
        apply_trl_patch(model)
    # as the message says
    revert_patch(model)
    apply_trl_patch(with_head(model))
    batch = tiny_batch(model)
    trls_calls.clear()
    ours = call(model, batch)
    assert trls_calls == []
    assert_fused(model)
    assert_same(ours, call(apply_trl_patch(with_head(tiny_model())), batch))


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ARCHITECTURES", registry.ARCHITECTURES[:1])


@pytest.mark.usefixtures("unknown")
def test_an_architecture_without_a_row_is_fused() -> None:
    """TRL's head leaves the model's own loss out: there is nothing to compare."""
    model = with_head(widened(tiny_model("gemma2")))
    batch = tiny_batch(model)
    trls = call(model, batch)
    assert_same(call(apply_trl_patch(model), batch), trls)
    assert_fused(model)
    assert patch_status(model).architecture == "not tested"


@pytest.mark.usefixtures("unknown")
def test_strict_wants_a_row() -> None:
    model = with_head(tiny_model())
    with pytest.raises(ValueError, match="'llama', which has no row"):
        apply_trl_patch(model, strict=True)
    assert not patch_status(model).patched
    with pytest.raises(TypeError, match="PreTrainedModel"):
        apply_trl_patch(nn.Linear(2, 2))


def test_patching_twice_replaces_the_options_and_one_revert_undoes_both() -> None:
    model = with_head(tiny_model("gemma2"), temperature=0.7)
    batch = tiny_batch(model)
    before = vars(model)["forward"]
    trls, loss_before = call(model, batch), model(**batch).loss
    once = call(apply_trl_patch(model), batch)
    assert_fused(model)
    assert apply_trl_patch(model, same_gradient=True, chunk_mib=3.0) is model
    assert "3 MiB a chunk" in str(patch_status(model))
    assert_same_bits(call(model, batch), once)
    assert_fused(model)
    revert_patch(model)
    assert vars(model)["forward"] == before
    assert is_trls(model)
    assert_same_bits(call(model, batch), trls)
    assert torch.equal(model(**batch).loss, loss_before)
