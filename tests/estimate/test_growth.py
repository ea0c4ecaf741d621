"""How memory grows with the length of a row, and the longest rows that follow from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import layer_checks
import pytest
import torch
import transformers
from estimated_models import HIDDEN, PEFTS_WARNINGS, SIZE, STEP, TINY
from slow_cases import slow_but
from transformers import LlamaConfig

from liger_patch.estimate import estimate as estimates
from liger_patch.estimate import operations
from liger_patch.estimate.model import build
from liger_patch.estimate.step import EAGER, OURS, OURS_HEAD, host_bytes, trace_step
from liger_patch.estimate.trace import MemoryTrace
from liger_patch.kernels import chunk_sizes, gated_mlp
from liger_patch.layers import long_rows
from liger_patch.layers.checks import TOP_HOOKS


@pytest.fixture
def config() -> LlamaConfig:
    return LlamaConfig(**TINY)


def test_growth_with_offloaded_inputs_is_the_trace_at_any_length() -> None:
    config = LlamaConfig(**TINY | {"num_hidden_layers": 9})
    step = replace(STEP, checkpointing=True, checkpoint_offload=True, length=16384)
    growth = assert_is_the_trace(config, step, OURS, 16384, 400_000)
    trace, _ = trace_step(config, replace(step, length=200_000), OURS)
    assert growth.host_bytes(200_000) == sum(host_bytes(each.size) for each in trace.sent)


def assert_is_the_trace(config: Any, step: Any, contender: Any, *lengths: int, **how: Any) -> Any:
    """Return how the memory of a step grows, which is traced at other lengths."""
    growth = estimates.Growth.of(config, step, contender, **how)
    assert growth is not None
    for length in lengths:
        trace, _ = trace_step(config, replace(step, length=length), contender)
        assert growth.peak(length) == pytest.approx(trace.peak()[0], rel=0.01)
    return growth


@pytest.mark.parametrize("contender", [EAGER, OURS], ids=lambda each: each.name)
@pytest.mark.parametrize("checkpointing", slow_but([True], [False, True]))
def test_growth_is_the_trace_at_any_length(
    config: LlamaConfig, contender: Any, checkpointing: bool
) -> None:
    assert_is_the_trace(config, replace(STEP, checkpointing=checkpointing), contender, 1536, 8192)


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> int:
    """The tokens of a slice; rows of at most 1024 tokens run at once."""
    if TOP_HOOKS is None:
        pytest.skip("torch 2.6 runs no slices")
    token_bytes = 5 * 2 * SIZE
    monkeypatch.setattr(chunk_sizes, "LONG_BYTES", 1024 * token_bytes)
    for module in (long_rows, estimates):
        monkeypatch.setattr(module, "LONG_INPUT_BYTES", 1024 * 2 * HIDDEN)
    for module in (chunk_sizes, operations):
        monkeypatch.setattr(module, "SLICE_BYTES", 256 * token_bytes)
    return 256


LORA = {"lora_rank": 4, "autocast": torch.bfloat16}
SETTINGS = {"full": {}, "LoRA": LORA, "QLoRA": {**LORA, "bits": 4}}


def assert_grows_in_slices(config: Any, setting: dict[str, Any], kept: int) -> None:
    """``kept``: of a token, by a feed-forward layer that runs at once; in elements."""
    step = replace(STEP, checkpointing=True, chunk_mib=1, **setting)
    assert estimates.longest_unsliced(config, step, OURS) == 1024
    growth = assert_is_the_trace(config, step, OURS, 1025, 8192, 40000, shortest=1025)
    longer = assert_is_the_trace(config, step, replace(OURS, slices=False))
    assert growth.peak(8192) < longer.peak(8192) - 8192 * 2 * kept


@pytest.mark.parametrize("setting", slow_but(["QLoRA"], [*SETTINGS]))
@pytest.mark.usefixtures("slices")
def test_growth_in_slices_is_the_trace_at_any_length(config: LlamaConfig, setting: str) -> None:
    assert_grows_in_slices(config, SETTINGS[setting], SIZE)


@PEFTS_WARNINGS
@pytest.mark.usefixtures("slices")
def test_growth_of_experts_in_slices() -> None:
    """A slot keeps as much as a token of a feed-forward layer. So half as many tokens run at once,
    less the results of norms, which are kept until then.
    """
    pytest.importorskip("peft")
    if transformers.__version__.startswith("5.0."):  # looks for the experts that have tokens
        pytest.skip("not estimated with Transformers 5.0")
    size = SIZE - HIDDEN // 5
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": size}
    config = transformers.Qwen3MoeConfig(**TINY, **sizes, head_dim=16)
    assert_grows_in_slices(config, LORA, 8 * size)


@pytest.mark.usefixtures("slices")
def test_the_longest_row_in_slices_fits() -> None:
    """And longer batches too."""
    config = LlamaConfig(**TINY | {"hidden_size": 4 * HIDDEN, "intermediate_size": 16 * SIZE})
    step, found = replace(STEP, checkpointing=True, chunk_mib=1, **LORA), []
    _, sizes = build(config, step)
    for batch, slices in ((1, False), (1, True), (4, True)):
        of_batch, contender = replace(step, batch=batch), replace(OURS, slices=slices)
        longest = estimates.longest_rows(config, of_batch, contender, sizes, 0)[16][0]
        trace, _ = trace_step(config, replace(of_batch, length=longest), contender)
        room = 16 * 2**30 - sizes.weights - 64 * 2**20 - 24 * batch * longest
        assert trace.peak()[0] == pytest.approx(room, rel=0.01)
        found.append(batch * longest)
    at_once, in_slices, of_four = found
    assert min(in_slices, of_four) > 1.2 * at_once


def test_slices_where_a_layer_is_computed_again_alone(config: LlamaConfig) -> None:
    step = replace(STEP, lora_rank=4)
    assert estimates.longest_unsliced(config, step, OURS) is None
    step = replace(step, checkpointing=True)
    assert estimates.longest_unsliced(config, step, OURS_HEAD) is None
    assert estimates.longest_unsliced(config, step, EAGER) is None


@pytest.mark.parametrize("trains", [False, True])
def test_two_slices_take_what_all_do(
    slices: int, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"device": "meta", "dtype": torch.bfloat16}

    def peak(tokens: int) -> int:
        x = torch.empty(tokens, HIDDEN, **options, requires_grad=True)
        gate, up = (torch.empty(SIZE, HIDDEN, **options) for _ in range(2))
        down = torch.empty(HIDDEN, SIZE, **options)
        weights = [each.requires_grad_(trains) for each in (gate, up, down)]
        memory = MemoryTrace([x, *weights])
        with memory:
            y = layer_checks.gated_mlp(x, *weights, slice_tokens=slices)
            memory.start_backward()
            y.backward(torch.empty_like(y))
            return memory.finish([]).peak()[0]

    lengths = 4 * slices, 8 * slices
    of_all = [peak(each) for each in lengths]
    assert of_all[1] - of_all[0] == 4 * slices * 3 * 2 * HIDDEN  # y, dy and dx: x is given
    monkeypatch.setattr(gated_mlp, "slices_of", operations.first_slices)
    assert [peak(each) for each in lengths] == of_all


def test_the_longest_row_fits_and_one_token_more_does_not(
    config: LlamaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "CONTENDERS", [EAGER])
    (eager,) = estimates.estimate(config, STEP, 0)
    longest, growth = eager.longest[16], estimates.Growth.of(config, STEP, EAGER)
    assert growth is not None
    _, sizes = build(config, STEP)
    room = 16 * 2**30 - sizes.weights - 64 * 2**20
    assert growth.peak(longest) + 24 * longest <= room
    assert growth.peak(longest + 1) + 24 * (longest + 1) > room
