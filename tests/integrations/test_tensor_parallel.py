"""Heads whose vocabulary is distributed over ranks, by the tensor parallelism of PyTorch and of
Transformers: fused, as exact as in one process, and no logits are gathered. The steps are in
``tensor_parallel_step``.
"""

from pathlib import Path

import pytest
import torch
import transformers
from gloo_group import run
from packaging.version import Version

SCRIPT = "tensor_parallel_step.py"


def test_plans_of_torch(tmp_path: Path) -> None:
    run(
        SCRIPT,
        str(tmp_path / "group"),
        "cpu",
        "gathered --layers",
        "gathered --model gemma2 --tied",
        "sharded",
        "sharded --model gemma2 --layers",
        "sharded --model cohere --tied",
        "sequence",
        "gathered --verify --model gemma2",
        "gathered --untested",
        "sharded --untested --layers",
        'gathered --verify --wrong --fallback "found a difference"',
    )


def test_plans_of_transformers(tmp_path: Path) -> None:
    is_old = Version(transformers.__version__) < Version("5.17")  # has no biases of shards
    cases = (
        "transformers --layers --hooked",
        f"transformers --layers {'' if is_old else '--bias'} --checkpoints",
        "transformers --tied",
        "transformers --model gemma2 --layers",
        "transformers --packed --layers",
    )
    run(SCRIPT, str(tmp_path / "group"), "cpu", *cases)


def test_adapters_on_shards(tmp_path: Path) -> None:
    """Their layers have hooks of PEFT and Transformers, and run their own code."""
    pytest.importorskip("peft", minversion="0.21", reason="older ones know no shards")
    pytest.importorskip("transformers", minversion="5.17", reason="PEFT asks for it")
    run(SCRIPT, str(tmp_path / "group"), "cpu", "transformers --lora --layers")


@pytest.mark.slow
def test_a_whole_model_in_a_graph(tmp_path: Path) -> None:
    pytest.importorskip("torch", minversion="2.11", reason="older ones trace no such model")
    reason = "torch.compile traces a head whose weight is a DTensor"
    case = f'transformers --compiled --layers --fallback "{reason}"'
    run(SCRIPT, str(tmp_path / "group"), "cpu", case)


def test_three_ranks_with_fewer_rows_on_the_last(tmp_path: Path) -> None:
    run(SCRIPT, str(tmp_path / "group"), "cpu", "head_alone", processes=3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus(tmp_path: Path) -> None:
    # Transformers 5.17 has no shards of two sizes
    cases = "gathered --layers", "sharded --model gemma2", "transformers --even --layers"
    run(SCRIPT, str(tmp_path / "group"), "cuda", *cases)
