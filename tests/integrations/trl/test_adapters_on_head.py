"""LoRA on the head, which TRL's trainers refuse: with the flag they train it, with the numbers of
TRL's own head on the weight that holds the adapter.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_models import tiny_batch
from tiny_text import judgements, preferences, prompts_and_completions, tiny_tokenizer
from torch import Tensor
from training_step import widened
from trl_models import (
    DEFAULTS,
    MARKS,
    apply_trl_patch,
    assert_fused,
    assert_same,
    in_float64,
    lora,
    make_model,
    train,
    trls_calls,
)

from liger_patch import apply_patch, patch_status, revert_patch

pytestmark = MARKS

DATA = {"SFT": prompts_and_completions, "DPO": preferences, "KTO": judgements}
SAMPLED = {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}
REFUSAL = "Applying a PEFT adapter to `lm_head` is not supported"


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, each)) % 7) for each in completions]


def trls_module(kind: str) -> Any:
    import trl

    return sys.modules[getattr(trl, f"{kind}Trainer").__module__]


def our_module(kind: str) -> Any:
    from liger_patch.integrations import trl as of_sft
    from liger_patch.integrations import trl_trainers

    return of_sft if kind == "SFT" else trl_trainers


def make_trainer(
    kind: str,
    folder: Path,
    ours: bool,
    *,
    model_type: str = "llama",
    wrapped: bool = False,
    flag: bool = True,
    adapters: dict[str, Any] | None = None,
    **how: Any,
) -> Any:
    """Of adapters that change the head from the start; ``wrapped``: by PEFT before TRL."""
    import peft
    import trl

    module, how = (our_module(kind) if ours else trl), {**DEFAULTS, **how}
    if ours:
        how["use_liger_patch"] = flag
    if kind in ("GRPO", "RLOO"):
        how = {**SAMPLED, **how}
    torch.manual_seed(0)
    model: Any = widened(make_model(model_type))
    adapters = {"target_modules": ["q_proj", "lm_head"], **(adapters or {})}
    options = lora(init_lora_weights=False, **adapters)
    if wrapped:
        model = peft.get_peft_model(model, options.pop("peft_config"))
    if kind not in DATA:
        options["reward_funcs"] = reward
    samples = DATA.get(kind, prompts_and_completions)()
    if kind not in DATA:
        samples = samples.select_columns(["prompt"])
    return getattr(module, f"{kind}Trainer")(
        model=model,
        args=getattr(module, f"{kind}Config")(str(folder), **how),
        train_dataset=samples,
        eval_dataset=samples,
        processing_class=tiny_tokenizer(),
        **options,
    )


def with_adapters_in_its_weight(model: Any) -> None:
    """TRL's head multiplies by ``lm_head.weight``: here that is all that PEFT's layer computes."""
    head = model.get_output_embeddings()

    def weight(layer: Any) -> Tensor:
        active = [] if layer.disable_adapters else layer.active_adapters
        return layer.base_layer.weight + sum(layer.get_delta_weight(name) for name in active)

    head.__class__ = type("Merged", (type(head),), {"weight": property(weight)})


def trls_trainer(kind: str, folder: Path, **how: Any) -> Any:
    module = trls_module(kind)
    added = module.add_fused_lm_head

    def add(model: Any, **options: Any) -> None:
        with_adapters_in_its_weight(model)
        added(model, **options)

    with (
        mock.patch.object(module, "BaseTunerLayer", ()),
        mock.patch.object(module, "add_fused_lm_head", add),
    ):
        return make_trainer(kind, folder, False, **how)


def trls_numbers(kind: str, folder: Path, **how: Any) -> Any:
    trainer = trls_trainer(kind, folder, **how)
    with trls_calls() as calls:
        numbers = train(trainer)
    assert calls
    return numbers


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param("SFT", {}, id="sft"),
        pytest.param("SFT", {"model_type": "gemma2", "packing": True}, id="sft, tied, softcap"),
        pytest.param("SFT", {"wrapped": True, "loss_type": "dft"}, id="sft, dft, wrapped"),
        pytest.param("DPO", {}, id="dpo"),
        pytest.param("DPO", {"wrapped": True}, id="dpo, a copy is the reference"),
        pytest.param("KTO", {"wrapped": True}, id="kto"),
        pytest.param("GRPO", {}, id="grpo"),
        pytest.param("RLOO", {}, id="rloo"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model (has|with) .tie_word_embeddings:UserWarning")
def test_adapters_on_the_head_are_trained(
    kind: str, how: dict[str, Any], reads: list[Any], tmp_path: Path
) -> None:
    trls = trls_numbers(kind, tmp_path / "trls", **how)
    with trls_calls() as calls:
        trainer = make_trainer(kind, tmp_path / "ours", True, **how)
        ours = train(trainer)
    assert calls == reads == []
    assert_fused(trainer.model)
    if kind == "RLOO":  # its advantages add up to 0: of the loss only gradients are left
        ours, trls = ({n: v for n, v in x.items() if not n.endswith("loss")} for x in (ours, trls))
    assert_same(ours, trls)
    moved = [ours[name] for name in ours if "lm_head.lora" in name and ".ref." not in name]
    assert len(moved) == 2
    assert all(values is not None and values.any() for values in moved)


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_the_reference_is_precomputed_on_kernels(kind: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"wrapped": True, "precompute_ref_log_probs": True}
    with in_float64():
        trls = trls_trainer(kind, tmp_path, **how)
        with trls_calls() as calls:
            ours = make_trainer(kind, tmp_path, True, **how)
    assert calls == []
    assert_fused(ours.model)  # before a step of training
    sums = []
    for trainer in (ours, trls):
        columns = trainer.train_dataset[:]
        names = [name for name in columns if name.startswith("ref_")]
        assert names
        sums.append({name: torch.tensor(columns[name], dtype=torch.float64) for name in names})
    assert_same(*sums)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "GRPO", "RLOO"])
def test_without_the_flag_trl_refuses_them(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=REFUSAL):
        make_trainer(kind, tmp_path, True, flag=False)
    make_trainer(kind, tmp_path, True)  # which leaves TRL's own refusal as it was
    with pytest.raises(ValueError, match=REFUSAL):
        make_trainer(kind, tmp_path, False)


def test_threads_wait_for_each_other_and_leave_the_refusal() -> None:
    import trl

    from liger_patch.integrations.trl_adapters import adapters_on_head_allowed

    module, entered, leave = trls_module("SFT"), threading.Event(), threading.Event()
    own = module.BaseTunerLayer

    def second() -> None:
        with adapters_on_head_allowed(trl.SFTTrainer):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=second)
    try:
        with adapters_on_head_allowed(trl.SFTTrainer):
            with adapters_on_head_allowed(trl.SFTTrainer):  # of the same thread
                assert module.BaseTunerLayer == ()
            thread.start()
            assert not entered.wait(0.2)
        assert entered.wait(60)
    finally:
        leave.set()
        thread.join()
    assert module.BaseTunerLayer is own


def test_a_head_that_is_cast_to_float32_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=REFUSAL):
        make_trainer("GRPO", tmp_path, True, cast_lm_head_to_fp32=True)


def test_logits_are_read_where_they_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trls = trls_numbers("SFT", tmp_path)
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    trainer = make_trainer("SFT", tmp_path, True)
    with trls_calls() as calls:
        ours = train(trainer)
    assert calls == []
    assert patch_status(trainer.model).reason == "LIGER_PATCH_RETURN_LOGITS=1"
    assert_same(ours, trls)


def test_logits_are_read_where_the_head_cannot_be_fused(tmp_path: Path) -> None:
    trainer = make_trainer("SFT", tmp_path, True, adapters={"use_dora": True})
    with (
        trls_calls() as calls,
        pytest.warns(UserWarning, match="liger_patch computes ordinary logits: the logits of") as w,
    ):
        ours = train(trainer)
    assert len(w) == 1
    assert calls == []
    assert patch_status(trainer.model).fused is False
    moved = [ours[name] for name in ours if "lm_head.lora" in name]
    assert len(moved) == 3  # the magnitudes of DoRA too
    assert all(values is not None and values.any() for values in moved)


@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_reverted_model_does_not_call_trls_head(kind: str, copied: bool, tmp_path: Path) -> None:
    trainer = make_trainer(kind, tmp_path, True)
    revert_patch(trainer.model)
    if copied:
        trainer.model = trainer.model_wrapped = copy.deepcopy(trainer.model)
    with pytest.raises(RuntimeError, match=r"adapters on its head.*call apply_trl_patch"):
        trainer.train()


def test_other_calls_of_a_reverted_model_are_its_own(tmp_path: Path) -> None:
    trainer = make_trainer("SFT", tmp_path, True)
    base = trainer.model.get_base_model()
    batch, parameters = tiny_batch(base), inspect.signature(type(base).forward).parameters
    revert_patch(trainer.model)
    with torch.no_grad():
        expected = type(base).forward(base, **batch)
        ours = trainer.model(**batch)
    assert torch.equal(ours.logits, expected.logits)
    assert torch.equal(ours.loss, expected.loss)
    assert [*inspect.signature(base.forward).parameters] == [*parameters][1:]  # for generate


def test_a_reverted_model_can_be_patched_again(tmp_path: Path) -> None:
    expected = train(make_trainer("SFT", tmp_path / "once", True))
    trainer = make_trainer("SFT", tmp_path / "again", True)
    base = trainer.model.get_base_model()
    revert_patch(trainer.model)
    first = vars(base)["forward"]
    apply_patch(trainer.model)  # which leaves the refusal as it is
    revert_patch(trainer.model)
    assert vars(base)["forward"] is first
    apply_trl_patch(trainer.model, same_gradient=True)
    revert_patch(trainer.model)
    assert vars(base)["forward"].args == first.args  # one refusal, not one around another
    apply_trl_patch(trainer.model, same_gradient=True)
    ours = train(trainer)
    assert_fused(trainer.model)
    assert_same(ours, expected)


def test_merged_adapters_leave_a_reverted_model_to_trl(tmp_path: Path) -> None:
    model = make_trainer("SFT", tmp_path, True).model
    batch = tiny_batch(model)
    with in_float64(), trls_calls() as calls:
        ours = model(**batch, fused_lm_head=True)
        revert_patch(model)
        merged = copy.deepcopy(model).merge_and_unload()
        trls = merged(**batch, fused_lm_head=True)
        assert len(calls) == 1
        with pytest.raises(RuntimeError, match="adapters on its head"):
            model(**batch, fused_lm_head=True)  # of which the merged one is a copy
    assert len(calls) == 1
    assert_same({"log_probs": ours.log_probs}, {"log_probs": trls.log_probs})
