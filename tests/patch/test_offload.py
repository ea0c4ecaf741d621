"""Offloaded checkpoints: the same gradients bit for bit, and layer inputs that leave the device."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_patch import apply_patch, patch_status, registry, revert_patch
from liger_patch.apply import transformers_model
from liger_patch.patch import offload as offload_module
from liger_patch.patch.forward import record_of
from liger_patch.patch.layer_input import PIECE_BYTES, Lane, LayerInput
from liger_patch.patch.offload import FUNCTION, CheckpointOffload

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"
)
ROWS = {row.model_type: row for row in registry.available()}
KINDS = pytest.mark.parametrize("reentrant", [False, True])


def model_of(reentrant: bool | None = False, **options: Any) -> PreTrainedModel:
    """A Llama with dropout, by default of three layers; ``reentrant=None``: no checkpointing."""
    options = {"attention_dropout": 0.5, "num_hidden_layers": 3, **options}
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
        **options,
    )
    torch.manual_seed(0)
    return checkpointing(LlamaForCausalLM(config).train(), reentrant)


def checkpointing(model: Any, reentrant: bool | None) -> Any:
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model


def offloaded(model: Any, **options: Any) -> CheckpointOffload:
    """Patch a model on the CPU to hold its checkpoints in other host memory."""
    apply_patch(model, checkpoint_offload=True, **options)
    offload = CheckpointOffload(device_types=("cpu",), min_bytes=1)
    record = record_of(transformers_model(model))
    assert record is not None
    assert record.offload is not None
    record.offload = offload
    return offload


def step(model: Any, seed: int = 0, **arguments: Any) -> dict[str, Tensor]:
    """Loss and gradients of a call."""
    batch = {**tiny_batch_of(model, seed), **arguments}
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def tiny_batch_of(model: Any, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids.to(model.device), "labels": ids.to(model.device)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert len(found) > 1
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def functions(model: nn.Module) -> list[Any]:
    return [vars(m)[FUNCTION] for m in model.modules() if FUNCTION in vars(m)]


def inputs_alive(model: Any, call: Callable[[], Any]) -> tuple[Any, list[bool]]:
    """The result of a call, and for each decoder layer whether the memory of its input is held."""
    storages: list[Any] = []

    def note(module: nn.Module, args: tuple) -> None:
        storages.append(weakref.ref(args[0].untyped_storage()))

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    result = call()
    for handle in handles:
        handle.remove()
    gc.collect()
    return result, [storage() is not None for storage in storages]


@KINDS
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("layers", [False, True])
def test_gradients_are_those_of_plain_checkpoints(
    reentrant: bool, autocast: bool, layers: bool
) -> None:
    plain = apply_patch(model_of(reentrant), layers=layers)
    model = model_of(reentrant)
    offload = offloaded(model, layers=layers)
    for seed in (0, 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert_same_bits(step(model, seed), step(plain, seed))
    assert str(offload) == f"2 layer inputs, {2 * PIECE_BYTES / 2**20:g} MiB of host memory"


@KINDS
@pytest.mark.parametrize("model_type", ["gemma2", "gemma3n_text", "gemma4_text", "qwen3_moe"])
def test_architectures_that_pass_more_to_their_layers(model_type: str, reentrant: bool) -> None:
    if model_type not in ROWS:
        pytest.skip(f"this Transformers has no {model_type}")
    steps = []
    for is_offloaded in (False, True):
        model = checkpointing(tiny_model(ROWS[model_type]), reentrant)
        apply_patch(model)
        offload = offloaded(model) if is_offloaded else None
        loss = model(**tiny_batch(model), use_cache=False).loss
        loss.backward()
        steps.append({"loss": loss.detach(), **gradients(model)})
        if offload is not None:
            count = sum(isinstance(m, GradientCheckpointingLayer) for m in model.modules())
            assert str(offload).startswith(f"{count - 1} layer inputs")
    assert_same_bits(steps[1], steps[0])


@KINDS
def test_inputs_leave_the_device_but_for_the_last(reentrant: bool) -> None:
    """The last one is never copied; the loss drops the one before."""
    batch = tiny_batch_of(model := apply_patch(model_of(reentrant, num_hidden_layers=5)))
    loss, alive = inputs_alive(model, lambda: model(**batch).loss)
    assert alive == [True] * 5
    offload = offloaded(model)
    loss, alive = inputs_alive(model, lambda: model(**batch).loss)
    assert alive == [False, False, False, False, True]
    assert offload.host_bytes == 4 * PIECE_BYTES
    loss.backward()


@KINDS
def test_host_memory_is_used_again(reentrant: bool) -> None:
    offload = offloaded(model := model_of(reentrant))
    for seed in range(3):
        step(model, seed)
        gc.collect()
        assert offload.host_bytes == 2 * PIECE_BYTES


@KINDS
def test_several_forward_passes_before_a_backward_pass(reentrant: bool) -> None:
    results = []
    for is_offloaded in (False, True):
        model = apply_patch(model_of(reentrant))
        offload = offloaded(model) if is_offloaded else None
        torch.manual_seed(0)
        losses = [model(**tiny_batch_of(model, seed)).loss for seed in (0, 1, 2)]
        for loss in (losses[1], losses[0] + losses[2]):
            loss.backward()
        results.append(gradients(model))
        if offload is not None:
            assert offload.host_bytes == 6 * PIECE_BYTES
    assert_same_bits(results[1], results[0])


def test_retained_graph() -> None:
    results = []
    for is_offloaded in (False, True):
        model = apply_patch(model_of())
        if is_offloaded:
            offloaded(model)
        torch.manual_seed(0)
        loss = model(**tiny_batch_of(model), use_cache=False).loss
        loss.backward(retain_graph=True)
        loss.backward()
        results.append(gradients(model))
    assert_same_bits(results[1], results[0])


def test_gradient_of_an_input_alone() -> None:
    """Only part of the graph runs, and what was fetched for the rest is dropped."""
    offload = offloaded(model := model_of())
    expected = step(model)["model.layers.2.mlp.up_proj.weight"]
    torch.manual_seed(0)
    loss = model(**tiny_batch_of(model), use_cache=False).loss
    (found,) = torch.autograd.grad(loss, [model.get_parameter("model.layers.2.mlp.up_proj.weight")])
    assert torch.equal(found, expected)
    del loss
    gc.collect()
    assert offload.host_bytes == 2 * PIECE_BYTES


@KINDS
def test_checkpoint_around_the_whole_model(reentrant: bool) -> None:
    results = []
    for is_offloaded in (False, True):
        model = apply_patch(model_of(reentrant))
        if is_offloaded:
            offloaded(model)
        batch = tiny_batch_of(model)
        embeddings = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()

        def loss_of(values: Tensor, model: Any = model, labels: Tensor = batch["labels"]) -> Any:
            return model(inputs_embeds=values, labels=labels, use_cache=False).loss

        torch.manual_seed(0)
        checkpoint(loss_of, embeddings, use_reentrant=False).backward()
        assert embeddings.grad is not None
        results.append({"input": embeddings.grad, **gradients(model)})
    assert_same_bits(results[1], results[0])


def test_inputs_larger_than_a_piece_and_with_other_strides() -> None:
    offload = CheckpointOffload(device_types=("cpu",), min_bytes=1)
    layer = Checkpointed()
    values = torch.randn(700, 3, 3001)
    for made in (lambda x: x, lambda x: x.transpose(0, 2), lambda x: x[1:]):
        x, layer.seen = made(values.clone().requires_grad_()), []
        with offload.forward_pass(layer):
            y, last = layer(x), layer(torch.ones(4, requires_grad=True))
        seen, layer.seen = layer.seen[:1], []
        (found,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(found, torch.cos(x))
        assert [t.stride() for t in layer.seen] == [t.stride() for t in seen]
        del last
    assert offload.host_bytes == 2 * PIECE_BYTES


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(8, 9)[:, 5:],
        lambda: torch.randn(8, 1).expand(8, 9),
        lambda: torch.randn(0, 9),
        lambda: nn.Parameter(torch.randn(8, 9)),
    ],
    ids=["gaps", "expanded", "empty", "a parameter"],
)
def test_inputs_that_stay_on_the_device(make: Callable[[], Tensor]) -> None:
    offload = CheckpointOffload(device_types=("cpu",), min_bytes=1)
    layer = Checkpointed()
    x = make().requires_grad_()
    with offload.forward_pass(layer):
        y, last = layer(x), layer(torch.ones(4, requires_grad=True))
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, torch.cos(x))
    assert str(offload) == "0 layer inputs, 0 MiB of host memory"  # the last is never copied
    del last


class Checkpointed(GradientCheckpointingLayer):
    """A layer whose forward notes what it is given, and can modify it."""

    gradient_checkpointing = True

    def __init__(self, *, modifies: bool = False, fails: bool = False) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.modifies = modifies
        self.fails = fails
        setattr(self, FUNCTION, plain_checkpoint)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        self.seen.append(x)
        y = x.sin()
        if self.modifies:
            x.mul_(2)
        if self.fails:
            raise ArithmeticError("the layer fails")
        return y


def plain_checkpoint(*args: Any, **kwargs: Any) -> Any:
    return checkpoint(*args, **kwargs, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:liger_patch offloads no checkpoint")
@pytest.mark.parametrize(("min_bytes", "later"), [(1, 0), (1, 1), (1, 2), (2**20, 0)])
def test_an_input_modified_in_place_is_an_error(min_bytes: int, later: int) -> None:
    """PyTorch itself does not look at saved tensors that hooks have seen."""
    offload = CheckpointOffload(device_types=("cpu",), min_bytes=min_bytes)
    layer = Checkpointed(modifies=True)
    with offload.forward_pass(layer):
        y = layer(torch.ones(4, requires_grad=True) * 1)
        others = [layer(torch.ones(4, requires_grad=True) * 1) for _ in range(later)]
    assert len(others) * PIECE_BYTES == offload.host_bytes
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_other_arguments_stay_as_they_are() -> None:
    offload = CheckpointOffload(device_types=("cpu",), min_bytes=1)
    layer = Checkpointed()
    x, mask, others = torch.ones(4, requires_grad=True), torch.ones(4).bool(), torch.ones(4)
    with offload.forward_pass(layer):
        y = layer(layer(x, mask, others, "name"), mask, others, "name")
    assert str(offload).startswith("1 layer inputs")
    y.sum().backward()


@KINDS
def test_an_exception_leaves_nothing_behind(reentrant: bool) -> None:
    offload = offloaded(model := model_of(reentrant))
    before = functions(model)
    failing = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model)
    failing.remove()
    assert all(a is b for a, b in zip(functions(model), before, strict=True))
    found = step(model)
    gc.collect()
    assert offload.host_bytes == 2 * PIECE_BYTES
    assert_same_bits(found, step(apply_patch(model_of(reentrant))))


def test_calls_without_gradients_offload_nothing() -> None:
    offload = offloaded(model := model_of())
    with torch.no_grad():
        model(**tiny_batch_of(model))
    model.eval()
    model(**tiny_batch_of(model)).loss.backward()
    assert str(offload) == "on, no eager training step yet"
    assert offload.host_bytes == 0


def test_calls_without_labels_offload_too() -> None:
    offload = offloaded(model := model_of())
    model(input_ids=tiny_batch_of(model)["input_ids"]).logits.sum().backward()
    assert str(offload).startswith("2 layer inputs")


def test_nothing_of_it_stays_on_the_model() -> None:
    model = model_of()
    before = functions(model)
    offloaded(model)
    loss = model(**tiny_batch_of(model)).loss
    assert all(a is b for a, b in zip(functions(model), before, strict=True))
    loss.backward()
    copied = copy.deepcopy(model)
    revert_patch(model)
    assert not any("liger_patch" in name for m in model.modules() for name in vars(m))
    record = record_of(copied)
    assert record is not None
    assert record.offload is not None
    assert record.offload.host_bytes == 0
    assert_same_bits(step(copied), step(apply_patch(model)))
    assert str(record.offload).startswith("2 layer inputs")


def test_pickles_have_the_options_alone() -> None:
    offload = offloaded(model := model_of())
    step(model)
    offload.host_gib = 2.5
    loaded = pickle.loads(pickle.dumps(offload))
    assert (loaded.device_types, loaded.min_bytes, loaded.host_gib) == (("cpu",), 1, 2.5)
    assert loaded.host_bytes == 0


def test_revert_frees_the_host_memory() -> None:
    offload = offloaded(model := model_of(), layers=False)
    loss = model(**tiny_batch_of(model)).loss
    step(model)
    assert offload.host_bytes == 4 * PIECE_BYTES
    expected = gradients(model)
    model.zero_grad()
    revert_patch(model)
    assert offload.host_bytes == 0
    loss.backward()  # whose inputs are still there
    assert gradients(model).keys() == expected.keys()
    released = weakref.ref(offload)
    del offload, loss
    assert released() is None


def test_patching_again_replaces_the_option() -> None:
    model = apply_patch(model_of(), checkpoint_offload=True)
    record = record_of(model)
    assert record is not None
    first = record.offload
    assert first is not None
    apply_patch(model, checkpoint_offload=True)
    assert record.offload is first
    for gib in (64, 2.5):
        apply_patch(model, checkpoint_offload=gib)
        second = record.offload
        assert second is not None
        assert second is not first
        assert second.host_gib == gib
        apply_patch(model, checkpoint_offload=gib)
        assert record.offload is second
    apply_patch(model)
    assert record.offload is None
    assert dict(patch_status(model).rows)["checkpoint offload"] == "off"


@pytest.mark.parametrize("value", ["cpu", None, 0, -1.0, float("inf"), float("nan"), 10**400])
def test_another_value_is_an_error(value: Any) -> None:
    said = f"checkpoint_offload must be True, False or a finite number of GiB > 0, got {value!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        apply_patch(model_of(), checkpoint_offload=value)


@KINDS
@pytest.mark.parametrize("fitting", [0, 1, 2, 3])
def test_inputs_beyond_the_bound_stay_on_the_device(reentrant: bool, fitting: int) -> None:
    """Those of the last layers, with the same gradients; a warning says so once."""
    plain = apply_patch(model_of(reentrant, num_hidden_layers=5))
    offload = offloaded(model := model_of(reentrant, num_hidden_layers=5))
    offload.host_gib = (fitting + 0.5) * PIECE_BYTES / 2**30
    shortage = (
        f"all but the last take 0.0625 GiB of host memory, and checkpoint_offload="
        f"{offload.host_gib:g} allows {offload.host_gib:.4g} GiB"
    )
    said = f"liger_patch keeps {5 - fitting} of 5 layer inputs on the GPU: {shortage}"
    with pytest.warns(UserWarning, match=f"^{re.escape(said)}$"):
        found = step(model)
    assert_same_bits(found, step(plain))
    batch = tiny_batch_of(model, 1)
    torch.manual_seed(1)
    loss, alive = inputs_alive(model, lambda: model(**batch, use_cache=False).loss)
    assert alive == [False] * fitting + [True] * (5 - fitting)
    model.zero_grad()
    loss.backward()
    assert_same_bits({"loss": loss.detach(), **gradients(model)}, step(plain, 1))
    assert offload.host_bytes == fitting * PIECE_BYTES
    mib = fitting * PIECE_BYTES // 2**20
    assert dict(patch_status(model).rows)["checkpoint offload"] == (
        f"{fitting} layer inputs, {mib} MiB of host memory; {5 - fitting} stay on the GPU: "
        f"{shortage}"
    )


@KINDS
@pytest.mark.parametrize(("pieces", "fetched"), [(2, 2), (100, 4)])
def test_inputs_are_on_their_way_before_they_are_needed(
    pieces: int, fetched: int, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first one to be fetched, behind layers whose inputs are on the device."""
    come: list[bool] = []
    get = LayerInput._fetched

    def noted(self: LayerInput) -> Tensor:
        come.append(self.fetched is not None)
        return get(self)

    monkeypatch.setattr(LayerInput, "_fetched", noted)
    offload = offloaded(model := model_of(reentrant, num_hidden_layers=5))
    offload.host_gib = pieces * PIECE_BYTES / 2**30
    short = pytest.warns(UserWarning, match="keeps 3 of 5")
    with short if pieces == 2 else contextlib.nullcontext():
        step(model)
    assert come == [True] * fetched


def test_a_bound_with_a_retained_graph_and_several_forward_passes() -> None:
    results = []
    for is_offloaded in (False, True):
        model = apply_patch(model_of(num_hidden_layers=5))
        if is_offloaded:
            offloaded(model).host_gib = 5 * PIECE_BYTES / 2**30
        torch.manual_seed(0)
        with (
            pytest.warns(UserWarning, match="keeps 4 of 5")
            if is_offloaded
            else contextlib.nullcontext()
        ):
            losses = [model(**tiny_batch_of(model, seed)).loss for seed in (0, 1, 2)]
        losses[1].backward(retain_graph=True)
        sum(losses).backward()
        results.append(gradients(model))
    assert_same_bits(results[1], results[0])


def test_memory_that_is_available_is_read_where_more_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    available = [PIECE_BYTES * pieces for pieces in (2, 0, 1, 100)]
    monkeypatch.setattr(offload_module, "available_bytes", lambda: available.pop(0))
    plain = apply_patch(model_of(num_hidden_layers=6))
    offload = offloaded(model := model_of(num_hidden_layers=6))
    said = (
        "keeps 4 of 6 layer inputs on the GPU: all but the last take 0.07812 GiB of host memory, "
        "and 0.03125 GiB are available (checkpoint_offload=<GiB> sets another bound)"
    )
    with pytest.warns(UserWarning, match=f"^liger_patch {re.escape(said)}$"):
        found = [step(model, 0)]
    held = [offload.host_bytes]
    for seed in (1, 2, 3, 4):
        found.append(step(model, seed))
        held.append(offload.host_bytes)
    assert held == [PIECE_BYTES * pieces for pieces in (2, 2, 3, 5, 5)]
    assert available == []
    for seed, each in enumerate(found):
        assert_same_bits(each, step(plain, seed))
    assert str(offload) == f"5 layer inputs, {5 * PIECE_BYTES // 2**20} MiB of host memory"


def test_a_system_that_does_not_say_what_is_available_sets_no_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload_module, "available_bytes", lambda: None)
    offload = offloaded(model := model_of())
    step(model)
    assert offload.host_bytes == 2 * PIECE_BYTES


@KINDS
def test_memory_that_the_system_refuses(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input stays where it is, and no more memory is asked for."""
    allocate, refused = torch.empty, []

    def empty(*size: Any, **options: Any) -> Tensor:
        if options.get("pin_memory") is not None and offload.host_bytes == 2 * PIECE_BYTES:
            refused.append(size)
            raise RuntimeError("CUDA error: out of memory")
        return allocate(*size, **options)

    plain = apply_patch(model_of(reentrant, num_hidden_layers=5))
    offload = offloaded(model := model_of(reentrant, num_hidden_layers=5))
    monkeypatch.setattr(torch, "empty", empty)
    said = (
        "liger_patch keeps 3 of 5 layer inputs on the GPU: all but the last take 0.0625 GiB of "
        "host memory, and no more than 0.03125 GiB could be pinned"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(said)}$"):
        found = [step(model, 0)]
    found.append(step(model, 1))
    assert refused == [(PIECE_BYTES,)]
    for seed, each in enumerate(found):
        assert_same_bits(each, step(plain, seed))
    apply_patch(model, checkpoint_offload=True)
    record = record_of(model)
    assert record is not None
    assert record.offload is not None
    assert not record.offload.has_failed  # memory that was freed since is asked for


def test_pieces_of_an_input_that_does_not_fit_are_used_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane = Lane(torch.device("cpu"))
    taken = lane.pieces(2)
    assert taken is not None
    lane.free.extend(taken)

    def empty(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    assert lane.pieces(3) is None
    assert lane.made == 2
    found = lane.pieces(2)
    assert found is not None
    assert {id(piece) for piece in found} == {id(piece) for piece in taken}


@pytest.mark.parametrize(
    ("reentrant", "reason"),
    [
        (None, "no layer was checkpointed (see model.gradient_checkpointing_enable())"),
        (False, "the model is on the cpu, and not on cuda"),
    ],
)
def test_a_step_that_offloads_nothing_warns_once(reentrant: bool | None, reason: str) -> None:
    model = apply_patch(model_of(reentrant), checkpoint_offload=True)
    expected = step(apply_patch(model_of(reentrant)))
    message = f"liger_patch offloads no checkpoint: {reason}"
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        found = step(model)
    assert_same_bits(found, expected)
    step(model)  # without a warning: pytest makes an error of it
    assert dict(patch_status(model).rows)["checkpoint offload"] == f"none: {reason}"


def test_inputs_that_are_all_too_short_are_a_warning() -> None:
    offload = offloaded(model := model_of(False))
    offload.min_bytes = 2**20
    with pytest.warns(UserWarning, match="no layer saved a cpu tensor of at least 1 MiB$"):
        step(model)


@KINDS
def test_rows_too_short_among_others_are_no_warning(reentrant: bool) -> None:
    offload = offloaded(model := model_of(reentrant))
    step(model)
    offload.min_bytes = 2**20
    step(model)
    assert str(offload) == "none: no layer saved a cpu tensor of at least 1 MiB"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own
def test_compiled_models_keep_their_checkpoints() -> None:
    results = []
    for is_offloaded in (False, True):
        model = apply_patch(model_of(attention_dropout=0.0), layers=False)
        offload = offloaded(model, layers=False) if is_offloaded else None
        results.append(step(torch.compile(model, backend="eager")))
        assert offload is None or offload.host_bytes == 0
    assert_same_bits(*results)


@KINDS
def test_lora(reentrant: bool) -> None:
    peft = pytest.importorskip("peft")
    results = []
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "up_proj"])
        model = checkpointing(peft.get_peft_model(model_of(None), config), reentrant)
        apply_patch(model)
        offload = offloaded(model) if is_offloaded else None
        for name, values in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(values)
        results.append(step(model))
        if offload is not None:
            assert str(offload).startswith("2 layer inputs")
    assert_same_bits(results[1], results[0])


@pytest.mark.gpu
@KINDS
def test_gradients_and_memory_on_a_gpu(reentrant: bool) -> None:
    """Peak memory falls by the inputs of all layers but four: the last two, that of the embeddings,
    which is a leaf, and slack (an H200 kept 3.3 of 12, and 3.7 of 16). With a bound of five inputs,
    it falls by these but two: the leaf, and slack.
    """
    layers, hidden, tokens = 12, 512, 16384
    size, fitting = tokens * hidden * 2, 5
    sizes: Any = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": hidden}
    found, peaks, before = [], [], 0
    for checkpoint_offload in (False, True, fitting * size / 2**30):
        config = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)
        torch.manual_seed(0)
        with torch.device("cuda"):
            model: Any = LlamaForCausalLM(config)
        model = model.to(torch.bfloat16).train()
        model = apply_patch(checkpointing(model, reentrant), checkpoint_offload=checkpoint_offload)
        for name, values in model.named_parameters():
            values.requires_grad_("down_proj" in name)
        ids = torch.randint(0, 64, (128, tokens // 128), device="cuda")
        is_bounded = not isinstance(checkpoint_offload, bool)
        for i in range(3):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            warns = pytest.warns(UserWarning, match=f"keeps {layers - fitting} of {layers}")
            with warns if is_bounded and i == 0 else contextlib.nullcontext():
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            del loss
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        found.append(gradients(model))
        revert_patch(model)
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])
    assert peaks[0] - peaks[1] >= (layers - 4) * size
    assert peaks[0] - peaks[2] >= (fitting - 2) * size


@pytest.mark.gpu
@KINDS
def test_many_steps_without_a_wait_on_a_gpu(reentrant: bool) -> None:
    """The host runs ahead by several steps, so that memory is used again while copies run."""
    results = []
    for checkpoint_offload in (False, True):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model: Any = model_of(reentrant)
        model = model.to(torch.bfloat16)
        offload = CheckpointOffload(min_bytes=1)
        apply_patch(model, checkpoint_offload=checkpoint_offload)
        record = record_of(model)
        assert record is not None
        if checkpoint_offload:
            record.offload = offload
        torch.manual_seed(0)
        ids = torch.randint(0, 64, (64, 512), device="cuda")
        for start in range(0, 64, 2):
            batch = ids[start : start + 2, : 512 - start]
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        results.append(gradients(model))
        if checkpoint_offload:
            assert str(offload).startswith("2 layer inputs")
            assert offload.host_bytes == 2 * PIECE_BYTES
    assert_same_bits(results[1], results[0])
