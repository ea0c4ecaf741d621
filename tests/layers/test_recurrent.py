"""Recurrent layers of packed rows: each sequence gets what it gets by itself, in every architecture
whose layers are unpacked.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import types
import warnings
from typing import Any

import pytest
import torch
import transformers
from packed_samples import (
    flattened_for_kernels,
    make_model,
    make_samples,
    padded,
    positions_only,
    tensors,
    truth_of,
    two_rows,
)
from rows import model_type
from slow_cases import slow_but
from tiny_models import ROWS, tiny_model
from torch import Tensor, nn
from training_step import (
    Float64,
    assert_right,
    call,
    gradients,
    patched,
    step,
    widened,
    with_checkpoints,
)

from liger_patch import apply_patch, patch_status, registry
from liger_patch.layers import recurrent
from liger_patch.layers.checks import layers_of
from liger_patch.layers.recurrent import PACKED, PADDED, PackedRows, packed_rows
from liger_patch.patch import packing as of_calls
from liger_patch.patch.packing import rows_of_call

# whose attention makes its masks without positions
ACROSS = ("granitemoehybrid",)
RECURRENT = [row for row in registry.available() if "recurrent" in row.kinds.split()]
# rows with images around the recurrent layers of other rows; of such, qwen3_5 is always tested
AROUND = ("lfm3_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "qwen3_5_moe", "qwen4_exp")
PACKABLE = [row for row in RECURRENT if row.model_type not in ACROSS]
DELTA, MAMBA = "qwen3_next", "bamba"
LENGTHS = (9, 4, 13, 6)


def has_recurrent(name: str) -> bool:
    model = apply_patch(tiny_model(name))
    return any("recurrent" in layers_of(module) for module in model.modules())


pytestmark = pytest.mark.skipif(
    DELTA not in ROWS or not has_recurrent(DELTA),
    reason="before Transformers 5.17, recurrent layers take no keywords",
)


def mixer(name: str = DELTA) -> Any:
    """A recurrent layer on kernels, in float64."""
    model = apply_patch(make_model(name))
    return next(module for module in model.modules() if "recurrent" in layers_of(module))


def rows_of(lengths: list[list[int]], length: int) -> tuple[PackedRows, Tensor]:
    """Rows of sequences of these lengths, each behind a padded token, and what is padding."""
    starts, kept = (torch.zeros(len(lengths), length, dtype=torch.bool) for _ in range(2))
    for row, sequences in enumerate(lengths):
        place = 0
        for each in sequences:
            starts[row, place] = True
            kept[row, place + 1 : place + 1 + each] = True
            place += each + 1
    starts[:, 0] = True
    return packed_rows(starts, kept), kept


@pytest.mark.parametrize("packing", slow_but([two_rows], [positions_only, two_rows]))
@pytest.mark.parametrize(
    "row", slow_but([r for r in PACKABLE if r.model_type not in AROUND], PACKABLE), ids=model_type
)
def test_packed_rows_train_as_their_sequences(row: registry.Architecture, packing: Any) -> None:
    """The second of two rows ends with padding, whose positions are 0."""
    model, samples = make_model(row.model_type), make_samples(*LENGTHS)
    if not has_recurrent(row.model_type):
        pytest.skip(f"its layers take no keywords in Transformers {transformers.__version__}")
    truth = truth_of(model, samples)
    each = [call(model, {"input_ids": tensors(s)["input_ids"]}).logits[0] for s in samples]
    with patched(model), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        batch = packing(samples)
        ours = step(model, batch)
        del batch["labels"]
        logits = call(model, batch).logits.flatten(0, 1)[: sum(LENGTHS)]
    torch.testing.assert_close(ours, truth)
    if packing is positions_only:
        torch.testing.assert_close(logits, torch.cat(each))


@pytest.mark.parametrize(
    "row",
    slow_but([ROWS[name] for name in (DELTA, MAMBA, "kimi_linear") if name in ROWS], RECURRENT),
    ids=model_type,
)
def test_left_padding_equals_none(row: registry.Architecture) -> None:
    """By the layers' own code, which leaves padding out of the state."""
    model, samples = make_model(row.model_type), make_samples(*LENGTHS)
    truth = truth_of(model, samples)
    batch = padded(samples, "left")
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert rows_of_call(batch) is None
    with patched(model):
        torch.testing.assert_close(step(model, batch), truth)


@pytest.mark.parametrize("name", [DELTA, MAMBA, "kimi_linear", "olmo_hybrid"])
@pytest.mark.parametrize(
    "lengths", [[[3, 5]], [[1, 1, 2], [9]], [[40, 1, 2, 3], [17, 16, 1]]], ids=str
)
def test_padding_between_sequences_is_left_out(name: str, lengths: list[list[int]]) -> None:
    layer, length = mixer(name), max(sum(row) + len(row) for row in lengths)
    rows, kept = rows_of(lengths, length)
    width = next(m.in_features for m in layer.modules() if isinstance(m, nn.Linear))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(lengths), length, width, dtype=torch.float64, generator=generator)
    x.masked_fill_(~kept[..., None], float("nan")).requires_grad_()
    weight = torch.randn(len(lengths), length, width, dtype=torch.float64, generator=generator)
    with Float64():
        ours = layer(x, **{PACKED: rows})
        (of_x,) = torch.autograd.grad((ours * weight).sum(), x)
        sequences = x[kept].split([each for row in lengths for each in row])
        expected = torch.cat([layer(each[None])[0] for each in sequences])
        (expected_of_x,) = torch.autograd.grad((expected * weight[kept]).sum(), x)
    torch.testing.assert_close(ours[kept], expected)
    torch.testing.assert_close(of_x, expected_of_x)
    assert not ours[~kept].any()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", [DELTA, MAMBA])
def test_checkpoints_are_computed_again_with_the_same_sequences(name: str, reentrant: bool) -> None:
    """Also where another call has come in between. What is computed again is float32."""
    model, samples = make_model(name).train(), make_samples(*LENGTHS)
    truth = truth_of(model, samples)
    low: Any = copy.deepcopy(model).float()
    eager = truth_of(low, samples)
    with patched(with_checkpoints(low, reentrant)):
        loss = call(low, positions_only(samples)).loss
        call(low, positions_only(samples[::-1]))
        ours = {"loss": loss.detach(), **gradients(low, loss)}
    assert_right(ours, eager, truth)


@pytest.mark.parametrize("name", [DELTA, MAMBA])
def test_half_precision_is_no_worse_than_separate_sequences(name: str) -> None:
    model, samples = make_model(name), make_samples(*LENGTHS)
    truth = truth_of(model, samples)
    low: Any = copy.deepcopy(model).bfloat16()
    eager = truth_of(low, samples)
    with patched(low):
        ours = step(low, positions_only(samples))
    assert_right(ours, eager, truth, torch.bfloat16)


@pytest.mark.parametrize("name", [DELTA, MAMBA, "qwen3_5_moe"])
def test_what_kernels_ask_for_is_taken_without_them(name: str) -> None:
    """Transformers' own code raises there."""
    model = make_model(name)
    for samples in (make_samples(*LENGTHS), make_samples(9)):
        truth = truth_of(model, samples)
        with patched(model):
            torch.testing.assert_close(step(model, flattened_for_kernels(samples)), truth)


def batches_of(model: nn.Module) -> list[tuple[int, int]]:
    """The batches that recurrent layers compute, as calls append them: (sequences, tokens)."""
    found: list[tuple[int, int]] = []
    for module in model.modules():
        if "recurrent" in layers_of(module):
            first = next(m for m in module.modules() if isinstance(m, nn.Linear))
            first.register_forward_pre_hook(lambda _, x: found.append(x[0].shape[:2]))
    return found


def test_hooks_see_one_batch() -> None:
    """Those of ZeRO-3 gather weights: a number of calls of its own would make ranks wait."""
    model = apply_patch(make_model(DELTA), layers=["recurrent"])
    found = batches_of(model)
    call(model, positions_only(make_samples(40, 3, 2, 3)))
    assert found == [(4, 40)]
    status = str(patch_status(model))
    assert f"1 recurrent: {recurrent.UNPACKED}" in status
    assert "delta_net" not in status


def test_a_copy_keeps_sequences_apart() -> None:
    model, samples = make_model(DELTA), make_samples(*LENGTHS)
    truth = truth_of(model, samples)
    apply_patch(model, layers=["recurrent"])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(step(other, positions_only(samples)), truth)


def test_a_loss_function_of_a_user_gets_no_rows() -> None:
    def loss(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model, batch = make_model(DELTA), positions_only(make_samples(*LENGTHS))
    model.loss_function = loss
    with patched(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the loss, which is not fused
        found = call(model, batch).loss
    assert found.isfinite()


@pytest.mark.parametrize(
    "positions", [None, torch.arange(12)[None], torch.arange(12)[None] + 3, torch.zeros(1, 12)]
)
def test_single_sequences_run_the_layers_own_code(
    positions: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = apply_patch(make_model(DELTA))
    monkeypatch.setattr(recurrent, "_unpacked", None)  # an error, if it were called
    monkeypatch.setattr(recurrent, "_in_one_row", None)
    found = batches_of(model)
    ids = torch.arange(1, 13)[None]
    if positions is None:  # the host need not wait for the device to know
        monkeypatch.setattr(of_calls, "packed_rows", None)
    call(model, {"input_ids": ids, "labels": ids, "position_ids": positions})
    assert found == [(1, 12)]


JUMPING = torch.arange(12)[None] + 4 * (torch.arange(12) > 5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("positions", [JUMPING, torch.zeros_like(JUMPING)], ids=["jump", "same"])
def test_uneven_positions_begin_no_sequence(positions: Tensor, masked: bool) -> None:
    """Transformers cuts attention there in calls without a cache and a mask."""
    model, ids = widened(tiny_model(DELTA)), torch.arange(1, 13)[None]
    assert model.training
    assert model.config.use_cache
    mask = torch.ones_like(ids) if masked else None
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions, "attention_mask": mask}
    expected = model(**batch).loss
    torch.testing.assert_close(apply_patch(model)(**batch).loss, expected, check_dtype=False)


@pytest.mark.parametrize("seed", range(20))
def test_batches_have_at_most_twice_the_tokens(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 2 ** (1 + seed // 2), (1 + 5 * seed,), generator=generator).tolist()
    rows, _ = rows_of([lengths], sum(lengths) + len(lengths))
    assert sum(each.count * each.longest for each in rows.groups) <= PADDED * sum(lengths)
    assert len(rows.groups) <= 1 + seed // 2 + 1
    tokens = torch.cat([each.tokens for each in rows.groups])
    assert tokens.sort().values.tolist() == rows.tokens.tolist()
    for each in rows.groups:
        assert each.places.unique().shape == each.places.shape
        assert int(each.places.max()) < each.count * each.longest


@pytest.mark.parametrize("name", [DELTA, "qwen3_5"])
def test_packed_rows_are_evaluated_without_a_cache(name: str) -> None:
    """Trainer switches the cache off in the configuration, not in that of a model's text."""
    model, samples = tiny_model(name), make_samples(9, 4)
    batch = positions_only(samples)
    apart = [call(model, {"input_ids": tensors(s)["input_ids"]}).logits[0] for s in samples]
    assert model.config.get_text_config().use_cache
    with patched(model), torch.no_grad():
        assert call(model.eval(), batch).loss.isfinite()
        del batch["labels"]
        logits = call(model, batch).logits[0, :13]
    torch.testing.assert_close(logits, torch.cat(apart))


def test_a_cache_of_packed_rows_is_an_error() -> None:
    model, batch = apply_patch(make_model(DELTA)), positions_only(make_samples(9, 4))
    del batch["labels"]
    with pytest.raises(ValueError, match=r"no cache.* pass use_cache=False \(got one in Qwen3Next"):
        call(model, batch, use_cache=True)
    cache = transformers.DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="no cache"):
        call(model, batch, past_key_values=cache)


@pytest.mark.parametrize("name", [DELTA, MAMBA])
def test_generation_is_eagers(name: str) -> None:
    """Also with left padding, whose positions do not rise."""
    model = tiny_model(name).eval()
    batch = padded(make_samples(9, 4), "left")
    del batch["labels"]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    expected = model.generate(**batch, **options)
    apply_patch(model)
    assert torch.equal(model.generate(**batch, **options), expected)


@pytest.mark.parametrize("kernels", [("chunk", "conv"), ("chunk",), ("conv",), ()], ids=str)
def test_kernels_that_keep_sequences_apart_get_one_row(
    kernels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of which one does not keep them apart get unpacked sequences."""
    from transformers.integrations import hub_kernels

    model = make_model(DELTA)
    layer = next(m for m in model.modules() if recurrent.carries_state(m))
    module = sys.modules[type(layer).__module__]
    own_rule, own_convolution = (
        inspect.unwrap(getattr(module, name))
        for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
    )
    shapes = []

    def rule(query, key, value, g, beta, use_qk_l2norm_in_kernel, cu_seqlens=None):
        shapes.append(tuple(query.shape[:2]))
        lengths = [query.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
        parts = zip(*(each.split(lengths, 1) for each in (query, key, value, g, beta)), strict=True)
        options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return torch.cat([own_rule(*part, **options)[0] for part in parts], 1), None

    def convolution(hidden_states, weight, bias, activation, seq_idx=None):
        if seq_idx is None:
            return own_convolution(hidden_states, weight, bias, activation)
        assert seq_idx.dtype == torch.int32
        parts = hidden_states.split(seq_idx[0].bincount().tolist(), -1)
        return torch.cat([own_convolution(each, weight, bias, activation) for each in parts], -1)

    truth = truth_of(model, make_samples(*LENGTHS))
    package = types.SimpleNamespace(chunk_gated_delta_rule=rule, causal_conv1d_fn=convolution)
    monkeypatch.setitem(sys.modules, "package", package)
    for kind, name, own in (
        ("chunk", "chunk_gated_delta_rule", own_rule),
        ("conv", "causal_conv1d_fn", own_convolution),
    ):
        if kind in kernels:
            wrap = hub_kernels.use_kernel_func_from_hub_with_fallback(name, "package")
            monkeypatch.setattr(module, own.__name__, wrap(own))
    layer.__class__ = type(type(layer).__name__, (type(layer),), {})  # looked at anew
    with patched(model):
        for packing in (positions_only, two_rows, flattened_for_kernels):
            torch.testing.assert_close(step(model, packing(make_samples(*LENGTHS))), truth)
        # without kernels of libraries, ours
        how = recurrent.UNPACKED if len(kernels) == 1 else recurrent.BY_KERNELS
        assert f"1 recurrent: {how}" in str(patch_status(model))
    length = sum(LENGTHS)
    if len(kernels) == 2:
        assert shapes == [(1, length), (1, shapes[1][1]), (1, length)]
