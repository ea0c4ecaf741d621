"""Norms of queries and keys that are left to the rotary embedding: which models' are, and that the
model computes the same.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from compiled_graphs import WARNINGS
from exactness import assert_no_worse
from slow_cases import slow_but
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_step import Step, joined, step, tell_apart, widened
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from liger_patch import apply_patch, registry, revert_patch
from liger_patch.kernels.normed_rotary import normed_rotary
from liger_patch.kernels.rms_norm import rms_norm
from liger_patch.kernels.rotary import rotary
from liger_patch.layers import norm, normed_heads
from liger_patch.layers.normed_heads import UncomputedNorm
from liger_patch.layers.rotations import rotates_or_falls_back

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    *WARNINGS,
]

ROWS = {row.model_type: row for row in registry.available()}
TAKING = [  # all rows whose attentions' norms are left to the rotary embedding
    "apertus", "cosmos3_omni", "doge", "dots1", "gemma3", "gemma3_text", "hy_v3", "laguna",
    "lighton_ocr", "mellum", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl",
    "minimax_m3_vl_text", "moss_transcribe_diarize", "qianfan_ocr", "qwen3", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_asr", "qwen3_moe", "qwen3_next",
    "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "qwen4_exp_text", "t5gemma2",
]  # fmt: skip
TOGETHER, APART = "together", "apart"


class Calls:
    """Which way each pair of norms goes, in order, on a CPU that counts as one with Triton."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self._patch = monkeypatch

        def together(*arguments: Any, **options: Any) -> Any:
            self.made.append(TOGETHER)
            return normed_rotary(*arguments, **options)

        def apart(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
            self.made += [APART] * (x.dim() == 4)
            return rms_norm(x, *arguments, **options)

        monkeypatch.setattr(normed_heads, "normed_rotary", together)
        for module in (norm, normed_heads):
            monkeypatch.setattr(module, "rms_norm", apart)
        self.serve(True)

    def serve(self, serves: bool) -> None:
        self._patch.setattr(normed_heads, "serves_triton", lambda *_: serves)

    def taken(self, function: Callable[[], Any]) -> tuple[Any, list[str]]:
        """Return the function's result, and which ways were taken meanwhile."""
        self.made.clear()
        result = function()
        return result, list(self.made)


class Watching(TorchDispatchMode):
    """As modes that count operations do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def make_model(model_type: str = "qwen3", **options: Any) -> Any:
    return tiny_model(ROWS[model_type], **options)


def assert_same_bits(ours: Step, expected: Step) -> None:
    """But for the gradients of norms, which are other sums of the same numbers."""
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        got = ours[name]
        if value is None or got is None:
            assert value is got, name
        elif "_norm" in name:
            torch.testing.assert_close(got, value)
        else:
            assert torch.equal(got, value), name


@pytest.mark.parametrize(
    "model_type",
    slow_but(["qwen3", "gemma3_text"], [name for name in TAKING if name in ROWS]),
)
def test_a_model_computes_what_it_computes_with_the_norms_apart(
    model_type: str, calls: Calls
) -> None:
    model = make_model(model_type).double()
    batch = tiny_batch(model)
    truth = step(copy.deepcopy(model), batch)
    apply_patch(model)
    calls.serve(False)
    expected, taken = calls.taken(lambda: step(model, batch))
    assert TOGETHER not in taken
    calls.serve(True)
    ours, taken = calls.taken(lambda: step(model, batch))
    assert TOGETHER in taken
    torch.testing.assert_close(ours, expected)
    truth, ours = tell_apart(truth, ours)
    assert_no_worse(ours, truth, truth, torch.float32)


@pytest.mark.parametrize(
    "model_type",
    slow_but(["olmo2"], [name for name in ROWS if name not in TAKING]),
)
def test_no_other_model_takes_it(model_type: str, calls: Calls) -> None:
    """None of those with another rotary embedding, with norms of all features at once, or with
    layers that do not rotate.
    """
    model = apply_patch(make_model(model_type))
    taken = calls.taken(lambda: step(model, tiny_batch(model)))[1]
    assert TOGETHER not in taken


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3", "afmoe", "t5gemma2"])
def test_caches_and_attention_functions_are_given_tensors(
    model_type: str, use_cache: bool, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other libraries take nothing else. AFMoE has layers that do not rotate, T5Gemma 2
    norms keys that it does not rotate.
    """
    model, seen = apply_patch(make_model(model_type)), []
    attend, update = ALL_ATTENTION_FUNCTIONS["sdpa"], DynamicCache.update

    def spied_attention(module: Any, *states: Any, **options: Any) -> Any:
        seen.extend(map(type, states[:3]))
        return attend(module, *states, **options)

    def spied_update(self: Any, *states: Any, **options: Any) -> Any:
        seen.extend(map(type, states[:2]))
        return update(self, *states, **options)

    monkeypatch.setitem(cast(Any, ALL_ATTENTION_FUNCTIONS), "sdpa", spied_attention)
    monkeypatch.setattr(DynamicCache, "update", spied_update)
    model.set_attn_implementation("sdpa")
    model.eval()(**tiny_batch(model), use_cache=use_cache)
    assert seen
    assert set(seen) == {Tensor}


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_is_no_worse_than_eager(model_type: str, dtype: torch.dtype, calls: Calls) -> None:
    model = make_model(model_type, dtype=dtype)
    batch = tiny_batch(model)
    truth, eager = step(widened(model), batch), step(model, batch)
    apply_patch(model)
    ours, taken = calls.taken(lambda: step(model, batch))
    assert taken == [TOGETHER] * model.config.num_hidden_layers
    calls.serve(False)
    assert_same_bits(ours, step(model, batch))
    truth, eager, ours = joined(truth, eager, ours)
    assert_no_worse(ours, eager, truth, dtype)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_a_checkpointed_layer_goes_the_same_way_twice(
    model_type: str, reentrant: bool, calls: Calls
) -> None:
    model = apply_patch(make_model(model_type))
    batch = tiny_batch(model)
    expected = step(model.train(), batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ours, taken = calls.taken(lambda: step(model, batch))
    assert taken == [TOGETHER] * 2 * model.config.num_hidden_layers
    assert_same_bits(ours, expected)


def test_a_checkpointed_layer_may_be_watched_the_first_time_only(calls: Calls) -> None:
    """It must save the same tensors when it is computed again."""
    model = apply_patch(make_model()).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with Watching():
        loss = model(**tiny_batch(model)).loss
    _, taken = calls.taken(loss.backward)
    assert taken == [TOGETHER] * model.config.num_hidden_layers


@pytest.mark.parametrize("autocast", [False, True])
def test_lora(autocast: bool, calls: Calls) -> None:
    lora_models = pytest.importorskip("lora_models")
    model = apply_patch(lora_models.adapted("qwen3"))
    batch = tiny_batch(model.get_base_model())

    def one() -> Step:
        return lora_models.training_step(model, batch, autocast=autocast)

    ours, taken = calls.taken(one)
    assert taken == [TOGETHER] * 2
    calls.serve(False)
    expected, taken = calls.taken(one)
    assert taken == [APART] * 4
    assert_same_bits(ours, expected)


def test_hooks_of_a_norm_see_its_result(calls: Calls) -> None:
    model = apply_patch(make_model())
    batch = tiny_batch(model)
    expected, seen = step(model, batch), []
    attention = model.model.layers[0].self_attn
    handle = attention.k_norm.register_forward_hook(lambda *each: seen.append(each[-1]))
    ours, taken = calls.taken(lambda: step(model, batch))
    assert taken == [APART, APART, TOGETHER]
    assert [type(each) for each in seen] == [Tensor]
    assert_same_bits(ours, expected)
    handle.remove()
    assert calls.taken(lambda: step(model, batch))[1] == [TOGETHER] * 2


@pytest.mark.parametrize("layers", [["rms_norm"], ["rotary"]], ids=str)
def test_both_layers_are_needed(layers: list[str], calls: Calls) -> None:
    model = apply_patch(make_model(), layers=layers)
    assert TOGETHER not in calls.taken(lambda: step(model, tiny_batch(model)))[1]


def test_revert_patch_and_copies(calls: Calls) -> None:
    model = make_model()
    batch = tiny_batch(model)
    expected = step(model, batch)
    apply_patch(model)
    copied = copy.deepcopy(model)
    assert calls.taken(lambda: step(copied, batch))[1] == [TOGETHER] * 2
    revert_patch(model)
    ours, taken = calls.taken(lambda: step(model, batch))
    assert taken == []
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0)


def test_norms_of_different_forms_are_computed_apart(calls: Calls) -> None:
    model = apply_patch(make_model())
    model.model.layers[0].self_attn.q_norm.variance_epsilon = 1e-3
    ours, taken = calls.taken(lambda: step(model, tiny_batch(model)))
    assert taken == [APART, APART, TOGETHER]
    calls.serve(False)
    assert_same_bits(ours, step(model, tiny_batch(model)))


def test_norms_are_not_left_to_another_rotary_function(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be an autograd function, that looks for tensors among its arguments."""
    model = apply_patch(make_model())
    attention: Any = model.model.layers[0].self_attn
    module: Any = sys.modules[type(attention).__module__]
    own, types = module.apply_rotary_pos_emb, []

    def other(q: Any, k: Any, *tables: Tensor) -> Any:
        types.append((type(q), type(k)))
        return own(q, k, *tables)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", other)
    _, taken = calls.taken(lambda: step(model, tiny_batch(model)))
    assert taken == [APART] * 4
    assert types == [(Tensor, Tensor)] * 2


def test_tables_without_memory_of_their_own_take_the_models_own_way(calls: Calls) -> None:
    """As the tables of a tensor-parallel model may be."""

    class Wrapper(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        def __tensor_flatten__(self):
            return [], None

        @classmethod
        def __tensor_unflatten__(cls, *_: Any):
            raise NotImplementedError

    model = apply_patch(make_model())
    expected = step(model, tiny_batch(model))
    model.model.rotary_emb.register_forward_hook(
        lambda *each: tuple(table.as_subclass(Wrapper) for table in each[-1])
    )
    ours, taken = calls.taken(lambda: step(model, tiny_batch(model)))
    assert taken == [APART] * 4
    torch.testing.assert_close(ours, expected)


@pytest.mark.usefixtures("nothing_is_compiled")
def test_torch_compile_traces_the_norms(calls: Calls) -> None:
    model: Any = make_model().double()
    del model.model.layers[1:]  # each takes the compiler seconds
    apply_patch(model)
    ids = tiny_batch(model)["input_ids"]

    def backbone(ids: Tensor) -> Tensor:
        return model.model(input_ids=ids, use_cache=False).last_hidden_state

    expected, taken = calls.taken(lambda: backbone(ids))
    assert taken == [TOGETHER]
    compiled = torch.compile(backbone, backend="aot_eager")
    ours, taken = calls.taken(lambda: compiled(ids))
    assert TOGETHER not in taken
    parameters = [p for p in model.model.parameters() if p.requires_grad]
    ours, expected = (torch.autograd.grad(y.sum(), parameters) for y in (ours, expected))
    torch.testing.assert_close(ours, expected)


@pytest.mark.usefixtures("nothing_is_compiled")
def test_a_rotation_that_is_compiled_alone_computes_the_norms(calls: Calls) -> None:
    """Dynamo compiles single functions where it has given up on their callers."""
    attention: Any = apply_patch(make_model()).model.layers[0].self_attn
    module: Any = sys.modules[type(attention).__module__]
    rotate = rotates_or_falls_back(module.apply_rotary_pos_emb, "apply_rotary_pos_emb", rotary)
    x = torch.randn(1, 3, 4, attention.head_dim, requires_grad=True)
    tables = torch.randn(2, 1, 3, attention.head_dim)
    leaves = [x, attention.q_norm.weight, attention.k_norm.weight]

    def results(function: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        with normed_heads.norms_left_to_rotation(attention):
            q, k = (attention.q_norm(x), attention.k_norm(x))
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = function(q, k, *tables)
        return q, k, *torch.autograd.grad(q.square().sum() + k.square().sum(), leaves)

    expected, taken = calls.taken(lambda: results(rotate))
    assert taken == [TOGETHER]
    compiled = torch.compile(rotate, backend="aot_eager")
    torch.testing.assert_close(results(compiled), expected)


def test_torch_func_takes_the_models_own_way(calls: Calls) -> None:
    model = make_model().double()
    weights = {name: value.detach() for name, value in model.model.named_parameters()}
    ids = tiny_batch(model)["input_ids"]

    def loss(weights: dict[str, Tensor]) -> Tensor:
        arguments = {"input_ids": ids, "use_cache": False}
        outputs = torch.func.functional_call(model.model, weights, (), arguments)
        return outputs.last_hidden_state.square().mean()

    expected = torch.func.grad(loss)(weights)
    apply_patch(model)
    ours, taken = calls.taken(lambda: torch.func.grad(loss)(weights))
    assert taken == []
    torch.testing.assert_close(ours, expected)


def test_threads_leave_the_norms_of_their_own_attention(calls: Calls) -> None:
    model = apply_patch(make_model())
    attention = model.model.layers[0].self_attn
    x, types = torch.randn(1, 3, 4, attention.head_dim), []

    def call() -> None:
        types.append(type(attention.q_norm(x)))

    with normed_heads.norms_left_to_rotation(attention):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        call()
        types.append(type(model.model.layers[1].self_attn.q_norm(x)))
    call()
    assert types == [Tensor, UncomputedNorm, Tensor, Tensor]


def test_an_error_within_an_attention_ends_it(calls: Calls) -> None:
    attention = apply_patch(make_model()).model.layers[0].self_attn
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        attention(torch.randn(1, 3, 5), (torch.randn(1), torch.randn(1)), None)
    x = torch.randn(1, 3, 4, attention.head_dim)
    assert type(attention.q_norm(x)) is Tensor
