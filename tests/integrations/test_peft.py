"""PEFT: adapters of a patched model train and merge as the eager one's, wherever it was patched;
also by Trainer, on kernels.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from exactness import assert_no_worse
from lora_models import ALL, MLP, OUT, QKV, Calls, adapted, peft
from slow_cases import slow_but
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from trainers import losses_and_norms
from training_step import Float64, assert_same_step, call, step, widened

from liger_patch import apply_patch, patch_status, revert_patch
from liger_patch.deferred.tensor import DeferredLogits

# PEFT says so where an adapter touches a tied head, which is what is tested.
# An older PEFT ties no adapters of tied layers, and says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Model (has|with) .tie_word_embeddings:UserWarning",
    "ignore:You have requested .ensure_weight_tying.:UserWarning",
    "ignore:.lora_bias=True. was passed",  # of a base without one
)

FALLBACK = "liger_patch computes ordinary logits"


def lora(**options: Any) -> peft.LoraConfig:
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], **options}
    return peft.LoraConfig(task_type="CAUSAL_LM", **options)


class Case(NamedTuple):
    """A PEFT configuration, and why the head under it is no ordinary product, None where it is."""

    options: dict[str, Any]
    reason: str | None = None
    model_type: str = "llama"
    kind: Callable[..., Any] = lora

    def config(self) -> Any:
        return self.kind(**self.options)


HEAD_TRAINED, HEAD_SAVED = {"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}
AND_BODY = {"target_modules": ["q_proj", "lm_head"]}
VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
CASES = {
    "lora": Case({}),
    "head saved with the adapter": Case(HEAD_SAVED),
    "tied head saved with the adapter": Case(HEAD_SAVED, model_type="gemma2"),
    "lora on the embedding of a tied head": Case(
        {"target_modules": ["q_proj", "embed_tokens"]}, model_type="gemma2"
    ),
    "lora on the head": Case(AND_BODY),
    "lora on a head with softcap": Case(HEAD_TRAINED, model_type="gemma2"),
    "lora on a head with a scale": Case(HEAD_TRAINED, model_type="granite"),
    "lora with a tied embedding": Case(
        {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        model_type="gemma2",
    ),
    "dora on the head": Case(
        AND_BODY | {"use_dora": True},
        "the head (peft.tuners.lora.layer.Linear with DoraLinearVariant) reads its logits itself",
    ),
    "lora with biases on the head": Case(
        HEAD_TRAINED | {"lora_bias": True},
        "the head (peft.tuners.lora.layer.Linear) or the model does more to the logits",
    ),
    "trainable tokens": Case({"trainable_token_indices": [20, 21]}),
    "prompt tuning": Case(VIRTUAL, kind=peft.PromptTuningConfig),
    "prefix tuning": Case(VIRTUAL, kind=peft.PrefixTuningConfig),
}
PATCHES = ("before", "after", "before and after")


def wrapped(model: nn.Module, config: Any, patch: str = "") -> nn.Module:
    """`model` with adapters that have an effect, patched before wrapping, after it, both or not."""
    if "before" in patch:
        apply_patch(model)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config)
    have_effect(model)
    if "after" in patch:
        assert apply_patch(model) is model
    return model


def have_effect(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.3)


@pytest.mark.parametrize("patch", slow_but(["after"], PATCHES))
@pytest.mark.parametrize("name", CASES)
def test_every_adapters_gradient_is_eagers(name: str, patch: str) -> None:
    case = CASES[name]
    base = widened(tiny_model(case.model_type))
    batch = tiny_batch(base)
    truth = step(wrapped(widened(tiny_model(case.model_type)), case.config()), batch)
    model = wrapped(base, case.config(), patch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = step(model, batch)
        step(model, batch)
    assert sum(FALLBACK in str(warning.message) for warning in caught) == (case.reason is not None)
    status = patch_status(model)
    assert status.fused is (case.reason is None)
    assert (status.reason or "").startswith(case.reason or "")
    assert any(value is not None for name, value in truth.items() if name != "loss")
    assert_no_worse(ours, truth, truth, torch.float32)


def test_adapters_of_transformers_own_integration_train_as_eager() -> None:
    results = []
    for patch in (False, True):
        model = widened(tiny_model())
        if patch:
            apply_patch(model)
        torch.manual_seed(1)
        try:
            model.add_adapter(lora(init_lora_weights=False))
        except ValueError as error:  # Transformers 5.24 wants PEFT 0.22
            if "The version of PEFT you are using is not compatible" not in str(error):
                raise
            pytest.skip(str(error))
        results.append(step(model, tiny_batch(model)))
    truth, ours = results
    assert patch_status(model).fused
    assert any(value is not None for name, value in truth.items() if "lora_" in name)
    assert_no_worse(ours, truth, truth, torch.float32)


# PEFT looks up the base model's config, which models made here do not have on disk.
@pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning")
def test_a_saved_adapter_is_one_of_the_eager_model(tmp_path: Path) -> None:
    model = wrapped(tiny_model(), lora(modules_to_save=["lm_head"]), "before")
    batch = tiny_batch(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    call(model, batch).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    trained = call(model, batch)
    loaded = peft.PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert torch.equal(call(loaded, batch).logits, trained.logits)
    patched_before = apply_patch(tiny_model())
    loaded = peft.PeftModel.from_pretrained(patched_before, tmp_path, is_trainable=True)
    again = call(loaded, batch)
    assert patch_status(loaded).fused
    assert torch.equal(again.loss, trained.loss)
    assert isinstance(again.logits, DeferredLogits)


@pytest.mark.parametrize("name", ["lora", "head saved with the adapter", "lora on the head"])
@pytest.mark.filterwarnings(f"ignore:{FALLBACK}")
def test_merge_and_unload_leaves_a_patched_model(name: str) -> None:
    config = CASES[name].config
    merged = {}
    for patch in ("", "after"):
        model = wrapped(widened(tiny_model()), config(), patch)
        batch = tiny_batch(model)
        call(model, batch)
        merged[patch] = model.merge_and_unload()
        for parameter in merged[patch].parameters():
            parameter.requires_grad_()
    truth, ours = (step(model, batch) for model in merged.values())
    assert patch_status(merged["after"]).fused
    assert_same_step(ours, truth)
    revert_patch(merged["after"])
    assert type(merged["after"]) is type(merged[""])


@pytest.mark.parametrize(
    ("options", "actives"),
    [
        pytest.param(HEAD_TRAINED, [["default"], ["second"], ["default", "second"]], id="trained"),
        pytest.param(HEAD_SAVED, [["second"], ["default"]], id="saved"),
    ],
)
def test_the_head_is_that_of_the_active_adapters(
    options: dict[str, Any], actives: list[list[str]]
) -> None:
    """Of different ranks and scales, also several at once, merged into the weight or disabled."""
    results: dict[str, dict[str, Tensor | None]] = {"": {}, "after": {}}
    for patch, found in results.items():
        model = wrapped(widened(tiny_model()), lora(**options), patch)
        model.add_adapter("second", lora(r=3, lora_alpha=2, **options))
        have_effect(model)
        batch = tiny_batch(model)
        for active in actives:
            if len(active) == 1:
                model.set_adapter(*active)
            else:  # PEFT's wrapper takes one
                model.base_model.set_adapter(active)
            values = step(model, batch)
            model.merge_adapter()
            merged = call(model, batch).loss
            torch.testing.assert_close(merged, values["loss"], rtol=1e-5, atol=0)
            model.unmerge_adapter()
            with model.disable_adapter():
                values["disabled"] = call(model, batch).loss.detach()
            found |= {f"{active} {name}": value for name, value in values.items()}
        assert patch_status(model).fused is (True if patch else None)
    truth, ours = results.values()
    assert_no_worse(ours, truth, truth, torch.float32)
    losses = {found.item() for name, found in ours.items() if name.endswith("loss")}
    assert len(losses) == len(actives)


@pytest.mark.parametrize("patch", PATCHES)
def test_revert_through_the_wrapper_restores_the_base_model(patch: str) -> None:
    base = tiny_model()
    eager_class = type(base)
    model = wrapped(base, lora(), patch)
    assert type(base) is not eager_class
    assert revert_patch(model) is model
    assert type(base) is eager_class
    assert "forward" not in vars(base)
    assert not patch_status(model).patched
    assert type(call(model, tiny_batch(model)).logits) is Tensor


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_first_read_after_a_merge_are_an_error(target: str, dtype: torch.dtype) -> None:
    """A merge writes through ``weight.data``, to the head's own weight or to one tied to it."""
    base: Any = tiny_model(dtype=dtype)
    if target == "embed_tokens":
        base.config.tie_word_embeddings = True
        base.tie_weights()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", target], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of tied weights
        model = apply_patch(peft.get_peft_model(base, config))
        before, unread = call(model, tiny_batch(base)), call(model, tiny_batch(base))
        before.logits.sum()
        model.merge_adapter()
    assert before.logits.isfinite().all()
    with pytest.raises(RuntimeError, match="an adapter was merged"):
        unread.logits.sum()
    merged = call(model, tiny_batch(base))
    model.unmerge_adapter()
    with pytest.raises(RuntimeError, match="an adapter was merged"):
        merged.logits.sum()


def test_adapters_that_peft_unmerges_when_the_head_is_called_are_fused() -> None:
    base: Any = tiny_model()
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = apply_patch(peft.get_peft_model(base, config))
    batch = tiny_batch(base)
    with model.disable_adapter():
        plain = call(model, batch)
    model.merge_adapter()
    with model.disable_adapter():
        unmerged = call(model, batch)
        assert patch_status(model).fused
        torch.testing.assert_close(unmerged.loss, plain.loss)
        torch.testing.assert_close(unmerged.logits.sum(), plain.logits.sum())


def trained(model: Any, folder: Path, **options: Any) -> dict[str, Tensor]:
    """The losses and gradient norms of five steps of Trainer, and the adapters behind them."""
    how = {"max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    options |= {"learning_rate": 0.05, "optim": "sgd", **how}
    batch = tiny_batch(model.get_base_model(), batch=8)
    history = losses_and_norms(model, folder, batch, **options)
    adapters = [p.detach().double().flatten() for n, p in model.named_parameters() if "lora_" in n]
    return {"losses and norms": history, "adapters": torch.cat(adapters)}


@pytest.mark.usefixtures("imported_objects_are_not_collected")
@pytest.mark.filterwarnings("ignore:torch.cpu.amp.autocast:FutureWarning")
@pytest.mark.parametrize(
    ("bf16", "checkpoints"),
    slow_but(
        [(False, None), (True, False), (True, True)],
        list(itertools.product([False, True], [None, False, True])),
    ),
)
def test_trainers_loss_curve_of_lora_on_kernels_is_eagers(
    bf16: bool, checkpoints: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With float32 adapters under autocast, as Trainer(bf16=True) runs them."""
    calls = Calls(monkeypatch)
    dtype = torch.bfloat16 if bf16 else torch.float32
    eager_model = adapted(dtype=dtype)
    model, wide = apply_patch(copy.deepcopy(eager_model)), copy.deepcopy(eager_model).double()
    options: dict[str, Any] = {"bf16": bf16}
    if checkpoints is not None:
        options["gradient_checkpointing"] = True
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": checkpoints}
        for each in (eager_model, model):
            each.enable_input_require_grads()
    eager = trained(eager_model, tmp_path, **options)
    calls.clear()
    ours = trained(model, tmp_path, **options)
    groups, by_peft = calls.taken(model)
    assert (groups[:3], by_peft) == ([QKV, OUT, MLP], [])
    times = 1 if checkpoints is None else 2  # of two layers, two batches in each of five steps
    assert sum(map(len, groups)) == len(ALL) * 2 * 2 * 5 * times
    assert patch_status(model).fused
    with Float64():
        truth = trained(wide, tmp_path)
    assert_no_worse(ours, eager, truth, dtype)
