"""GRPO whose answers come from a vLLM server, for which a stub stands: TRL's own numbers, and the
weights that TRL sends it.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from training_step import Step, assert_fused, widened
from trl_models import MARKS, assert_same, lora, prompts, reward, train, trainer_of

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning"),
]
WORDS = (8, 120)


def nothing(*_: Any, **__: Any) -> None:
    """For methods that these tests do not need."""


class Server:
    """Answers of random words; AsyncGRPO's transfer too. Keeps the weights it was sent last."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.random, self.weights = np.random.default_rng(0), {}

    init_communicator = reset_prefix_cache = nothing
    init_weight_transfer = pause = resume = destroy = nothing

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.weights = {name: value.clone() for name, value in iterator}

    def update_named_params(self, _: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.send_weights(weights)

    def generate(self, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
        lengths = self.random.integers(2, 7, len(prompts) * n)
        answers = [self.random.integers(*WORDS, length).tolist() for length in lengths]
        log_probs = [[[-4.9 + 0.01 * (token % 7)] for token in each] for each in answers]
        return {"prompt_ids": prompts, "completion_ids": answers, "logprobs": log_probs}


def without_rounding(numbers: Step) -> Step:
    """Without the frozen weights: adapters are merged to be sent, and taken out again."""
    return {name: value for name, value in numbers.items() if "base_layer" not in name}


@pytest.mark.parametrize(("kind", "adapters"), [("GRPO", False), ("GRPO", True), ("GMPO", False)])
def test_answers_of_a_server_are_trained_with_trls_numbers(
    kind: str, adapters: bool, reads: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.generation import vllm_generation

    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda **_: True)
    monkeypatch.setattr(vllm_generation, "VLLMClient", Server, raising=False)
    server = {"use_vllm": True, "vllm_mode": "server", "max_completion_length": 6}
    adapter = lora() if adapters else {}
    how = {**server, "num_generations": 2, "num_iterations": 2}
    how["beta"] = 0.1 if adapters else 0.0  # TRL loads a reference by its name

    def trained(flag: bool | None) -> tuple[Any, Step]:
        named = {"model": widened(tiny_model()), "reward_funcs": reward, "eval_dataset": None}
        trainer = trainer_of(kind, tmp_path, flag, prompts(), {**named, **adapter}, **how)
        return trainer, without_rounding(train(trainer))

    trls, expected = trained(None)
    trainer, found = trained(True)
    assert reads == []
    assert_fused(trainer.model)
    assert_same(found, expected)
    assert {"3 sampling/sampling_logp_difference/mean", "3 entropy"} <= found.keys()
    sent, own = (each.vllm_generation.vllm_client.weights for each in (trainer, trls))
    assert {*sent} == {name for name, _ in tiny_model().named_parameters()}
    assert_same(sent, own)


class Worker:
    """Has scored answers ready, two of each prompt."""

    def __init__(self) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        numbers = np.random.default_rng(0)
        for group in range(10):
            prompt = numbers.integers(*WORDS, 4)
            for advantage in (-1.0, 1.0):
                ids = np.concatenate([prompt, numbers.integers(*WORDS, 5)])
                answer, log_probs = np.repeat([0, 1], [4, 5]), np.repeat([0.0, -4.9], [4, 5])
                self.rollout_buffer.put(
                    RolloutSample([], [], ids, answer, log_probs, advantage, 1, group, {})
                )

    start = stop = update_model_version = check_health = nothing


def varlen(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *_: int, **how: Any
) -> Tensor:
    """Attention of each segment to its path, as flash attention aligns them: at their ends."""
    results = []
    for i in range(len(starts_q) - 1):
        queries = q[starts_q[i] : starts_q[i + 1]].transpose(0, 1)
        keys, values = (x[starts_k[i] : starts_k[i + 1]].transpose(0, 1) for x in (k, v))
        sizes = queries.shape[1], keys.shape[1]
        mask = torch.ones(sizes, dtype=torch.bool).tril(sizes[1] - sizes[0])
        given = (each[None] for each in (queries, keys, values))
        results.append(
            scaled_dot_product_attention(
                *given, attn_mask=mask, scale=how["softmax_scale"], enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(results)


@pytest.fixture
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)  # of numbers that TRL makes itself
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("adapters", [False, True], ids=["trained", "lora"])
def test_async_grpo_trains_with_trls_numbers(
    adapters: bool, in_double: None, reads: list[Any], tmp_path: Path, monkeypatch: Any
) -> None:
    from trl.experimental.async_grpo import async_grpo_trainer as trls
    from trl.experimental.async_grpo import packing

    flash = SimpleNamespace(flash_attn_varlen_func=varlen)
    monkeypatch.setattr(packing, "_flash_attn", lambda: flash)
    monkeypatch.setattr(trls, "VLLMClient", Server)
    monkeypatch.setattr(trls, "get_peak_flops_per_device", lambda *_: None)  # asks for a GPU
    widened(tiny_model()).save_pretrained(tmp_path)
    how = {"token_budget": 0, "model_init_kwargs": {"dtype": torch.float64}}

    def trained(flag: bool | None) -> tuple[Any, Step]:
        transfer = Server()
        named = {"model": str(tmp_path), "reward_funcs": reward, "eval_dataset": None}
        named |= {"rollout_worker": Worker(), "weight_transfer": transfer}
        named |= lora() if adapters else {}
        trainer = trainer_of("AsyncGRPO", tmp_path, flag, prompts(), named, **how)
        numbers = without_rounding(train(trainer))
        clock = ("perf/", "sample/time")
        kept = {n: v for n, v in numbers.items() if not any(name in n for name in clock)}
        return trainer, {**kept, **transfer.weights}

    _, expected = trained(None)
    trainer, found = trained(True)
    assert reads == []
    assert_fused(trainer.model)
    assert_same(found, expected)
    assert {"3 ratio", "3 kl", "3 entropy", "lm_head.weight"} <= found.keys()
