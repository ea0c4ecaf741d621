"""Plugins and callbacks for trainers of other libraries. Where one is not installed, its module is
a stand-in with the interface of its release, as its own source declares it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from documents import ROOT, blocks, configuration
from tiny_models import tiny_batch, tiny_model
from torch.utils.data import DataLoader
from trainers import QUIET, samples_of
from truths import linear_log_probs

from liger_patch import apply_patch, patch_status
from liger_patch.layers.replace import count_layers
from liger_patch.patch.forward import record_of

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

from transformers import Trainer, TrainingArguments

from liger_patch.integrations.transformers import LigerPatchCallback


def make_trainer(folder: Path, model: Any = None, **how: Any) -> Trainer:
    samples = samples_of(tiny_batch(tiny_model(), batch=4))
    arguments = TrainingArguments(str(folder), max_steps=1, **QUIET)
    return Trainer(model=model, args=arguments, train_dataset=samples, **how)


def test_a_callback_patches_before_training(tmp_path: Path) -> None:
    model = tiny_model()
    callback = LigerPatchCallback(layers=False, chunk_mib=3.0)
    trainer = make_trainer(tmp_path, model, callbacks=[callback])
    assert patch_status(model).patched
    assert not patch_status(model).fused
    trainer.train()
    status = patch_status(model)
    assert status.fused
    assert not any(count_layers(model).values())


def test_a_callback_that_comes_too_late_is_an_error(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, tiny_model())
    trainer.add_callback(LigerPatchCallback())
    with pytest.raises(RuntimeError, match="a model that is not patched, too late to"):
        trainer.train()


def test_a_model_that_is_made_anew_is_an_error(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, model_init=lambda: tiny_model(), callbacks=[LigerPatchCallback()]
    )
    with pytest.raises(RuntimeError, match="call apply_patch within model_init"):
        trainer.train()
    trainer = make_trainer(
        tmp_path, model_init=lambda: apply_patch(tiny_model()), callbacks=[LigerPatchCallback()]
    )
    trainer.train()
    assert patch_status(trainer.model).fused


@pytest.mark.parametrize("option", ["use_liger_patch", "use_liger_kernel"])
def test_a_callback_beside_another_patch_is_an_error(option: str) -> None:
    how = SimpleNamespace(**{option: True}), None, None
    with pytest.raises(ValueError, match=f"{option}=True both patch the model"):
        LigerPatchCallback().on_init_end(*how, model=tiny_model())


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Import an integration anew, with a stand-in for what its library lacks here."""
    loaded: list[str] = []

    def load(name: str, module: str, **interface: Any) -> Any:
        library, *parents = (module.rsplit(".", n)[0] for n in range(module.count("."), -1, -1))
        if importlib.util.find_spec(library) is None:
            for each in (library, *parents):
                monkeypatch.setitem(sys.modules, each, ModuleType(each))
            vars(sys.modules[module]).update(interface)
        integration = f"liger_patch.integrations.{name}"
        loaded.append(integration)
        return importlib.import_module(integration)

    yield load
    for each in loaded:
        sys.modules.pop(each, None)


class BasePlugin:
    """Of Axolotl 0.19, as far as the plugin uses it."""

    def get_input_args(self) -> str | None: ...

    def post_model_load(self, cfg: Any, model: Any) -> None: ...


@pytest.fixture
def axolotl(load: Callable[..., Any]) -> Any:
    pytest.importorskip("pydantic", reason="Axolotl brings it")
    return load("axolotl", "axolotl.integrations.base", BasePlugin=BasePlugin)


def test_axolotl_patches_the_model_that_it_has_loaded(axolotl: Any) -> None:
    plugin = axolotl.LigerPatchPlugin()
    module, _, name = plugin.get_input_args().rpartition(".")
    make_arguments = getattr(importlib.import_module(module), name)
    for options, patched in [({}, False), ({"liger_patch": True}, True)]:
        model = tiny_model()
        plugin.post_model_load(make_arguments(**options), model)
        assert patch_status(model).patched == patched
    options = {"liger_patch": True, "liger_patch_layers": ["rms_norm"], "liger_patch_chunk_mib": 2}
    plugin.post_model_load(make_arguments(**options), model)
    layers = count_layers(model)
    assert [name for name, count in layers.items() if count] == ["rms_norm"]
    names = ("liger_patch", "liger_patch_checkpoint_offload")
    plugin.post_model_load(make_arguments(**dict.fromkeys(names, True)), model)
    record: Any = record_of(model)
    assert record.offload is not None


def of_example(name: str) -> tuple[str, dict[str, Any]]:
    """The command in its first line of code, and what it says."""
    text = (ROOT / f"examples/other_trainers/{name}.yaml").read_text(encoding="utf-8")
    command = next(line for line in text.splitlines() if f"{name}.yaml" in line)
    return command.removeprefix("# "), yaml.safe_load(text)


@pytest.mark.parametrize("example", [False, True])
def test_axolotl_takes_the_configuration(example: bool, axolotl: Any) -> None:
    given = configuration("plugins")
    if example:
        all_keys = of_example("axolotl")[1]
        axolotl.LigerPatchArgs(**all_keys)
        names = ("plugins", *axolotl.LigerPatchArgs.model_fields)
        given = {name: all_keys[name] for name in names if name in all_keys}
    assert given.pop("plugins") == [f"{axolotl.__name__}.LigerPatchPlugin"]
    assert given.keys() <= axolotl.LigerPatchArgs.model_fields.keys()
    model = tiny_model()
    axolotl.LigerPatchPlugin().post_model_load(axolotl.LigerPatchArgs(**given), model)
    assert patch_status(model).patched


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cut_cross_entropy": True}, "cut_cross_entropy: true patch the same loss"),
        ({"chunked_cross_entropy": True}, "chunked_cross_entropy: true patch the same loss"),
        ({"liger_fused_linear_cross_entropy": True}, "liger_fused_linear_cross_entropy: true"),
        ({"liger_patch_chunk_mib": "large"}, "liger_patch_chunk_mib"),
        ({"liger_patch_chunk_mib": -1}, "chunk_mib must be .* got -1"),
        (
            {"liger_patch_layers": ["rms_norm", "foo"]},
            r"layers must be .* got \['rms_norm', 'foo'\]",
        ),
        ({"liger_patch_checkpoint_offload": 0}, "checkpoint_offload must be .* GiB > 0, got 0.0"),
        (
            {"liger_patch_layer": False},
            "liger_patch_layer is no key of liger_patch, expected one of .*liger_patch_layers', ",
        ),
    ],
)
def test_axolotls_configuration_is_checked(
    axolotl: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        axolotl.LigerPatchArgs(liger_patch=True, **options)
    axolotl.LigerPatchArgs(liger_patch=True, base_model="a key of Axolotl")
    if "true" in message:
        axolotl.LigerPatchArgs(liger_patch=False, **options)


def test_llamafactorys_trainer_gets_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    words = of_example("llamafactory")[0].split()
    assert words[:4] == ["python", "-m", "liger_patch.integrations.llamafactory", "train"]
    integration = importlib.import_module(words[2])
    runs: list[Any] = []
    tuner = SimpleNamespace(run_exp=lambda args=None, callbacks=None: runs.append(callbacks))
    for name in ("llamafactory", "llamafactory.train", "llamafactory.train.tuner"):
        monkeypatch.setitem(sys.modules, name, tuner)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(sys, "argv", words[2:])
    integration.main()
    assert sys.argv == [words[2], words[4]]
    ((callback,),) = runs
    assert isinstance(callback, LigerPatchCallback)


def test_swifts_callback(load: Callable[..., Any], tmp_path: Path) -> None:
    load("swift", "swift.callbacks", callbacks_map={})
    given = of_example("swift")[1]
    assert given["external_plugins"] == "plugin.py"
    make_callback = sys.modules["swift.callbacks"].callbacks_map[given["callbacks"]]
    model = tiny_model()
    trainer = make_trainer(tmp_path, model, callbacks=[make_callback(None, None)])
    trainer.train()
    assert patch_status(model).fused


def test_swifts_accuracy_reads_no_logits(load: Callable[..., Any], reads: list[Any]) -> None:
    load("swift", "swift.callbacks", callbacks_map={})
    make_callback = sys.modules["swift.callbacks"].callbacks_map["liger_patch"]
    found: list[Any] = []
    trainer = SimpleNamespace(
        model=tiny_model(),
        template=SimpleNamespace(sequence_parallel_size=1),
        _compute_acc=lambda outputs, labels, cu_seqlens: found.append(
            outputs.logits.argmax(dim=-1)
        ),
    )
    batch = tiny_batch(trainer.model)
    with torch.no_grad():
        expected = trainer.model(**batch).logits.argmax(-1)
    right = (expected == batch["labels"].roll(-1, 1))[:, :-1]
    make_callback(None, trainer)
    apply_patch(trainer.model, layers=False)
    for training in (True, False):
        outputs = trainer.model.train(training)(**batch)
        trainer._compute_acc(outputs, batch["labels"], cu_seqlens=None)
    (predicted,) = found  # of the evaluation
    assert not reads
    supervised = batch["labels"][:, 1:] != -100
    assert (predicted == batch["labels"].roll(-1, 1))[:, :-1][supervised].equal(right[supervised])


def test_another_value_of_verls_flag_is_an_error(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGER_PATCH_VERL", "yes")
    with pytest.raises(ValueError, match="LIGER_PATCH_VERL must be 0, 1 or unset, got 'yes'"):
        load("verl", "verl.utils.experimental.torch_functional", FusedLinearForPPO=None)


@pytest.mark.parametrize("asked", ["", "1"])
def test_verls_fused_head(
    asked: str, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGER_PATCH_VERL", asked)
    module = "verl.utils.experimental.torch_functional"
    integration = load("verl", module, FusedLinearForPPO=None)
    ours = integration.FusedLinearForPPO
    verls = importlib.import_module(module)
    assert (verls.FusedLinearForPPO is ours) == (asked == "1")

    shapes = {"hidden_states": (2, 5, 8), "vocab_weights": (19, 8)}
    inputs = {n: torch.randn(s, dtype=torch.float64).requires_grad_() for n, s in shapes.items()}
    ids = torch.randint(19, (2, 5))
    log_probs, entropy = ours(impl_backend="torch")(**inputs, input_ids=ids, temperature=0.7)
    x, weight = inputs.values()
    expected = linear_log_probs(x.flatten(0, 1), weight, ids.flatten(), temperature=0.7)
    weights = torch.randn(2, 2, 5, dtype=torch.float64)
    results = []
    for found in ((log_probs, entropy), (expected.log_probs, expected.entropy)):
        found = torch.stack([each.view(2, 5) for each in found])
        results.append([found, *torch.autograd.grad((found * weights).sum(), [x, weight])])
    torch.testing.assert_close(*results)


# Lightning 2.6 with torch 2.13
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_lightnings_class_in_the_docs_trains_fused(precision: Any, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")
    losses: list[float] = []

    class Losses(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            losses.append(outputs["loss"].item())

    plain = tiny_model()
    plain.save_pretrained(tmp_path)
    batch = tiny_batch(plain, batch=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision=precision,
        max_epochs=5,
        callbacks=[Losses()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    (code,) = (block.code for block in blocks() if block.place == "integrations.md: Lightning")
    assert "lr=1e-5" in code
    names: dict[str, Any] = {}
    exec(code.replace("lr=1e-5", "lr=1e-2"), names)  # which a tiny model needs
    module = names["Model"](str(tmp_path))
    trainer.fit(module, DataLoader([batch], batch_size=None))
    assert patch_status(module.model).fused
    assert module.model.training
    if precision == "32-true":
        with torch.no_grad():
            assert losses[0] == pytest.approx(plain.train()(**batch).loss.item(), rel=1e-5)
    assert losses[-1] < losses[0] - 0.1
    # Lightning may call it again
    before = module.model
    module.configure_model()
    assert module.model is before
